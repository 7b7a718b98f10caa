# SPDX-License-Identifier: Apache-2.0
"""Goal    The wheel is what it says: it needs nothing but the C library of its tag and a C++ library, is small, and has no
        dependency; its programs run where nothing else is. The source distribution has what the build needs. The
        Debian package has programs, unit, user, folder, completion and manual pages, and systemd takes them.
Method  The files of build/wheel, which tools/setup.sh makes, are taken apart; programs run below a root with nothing but
        glibc; `cpack` in build. What takes minutes (a whole root, pip, torch) is tests/packages/run, by hand.
"""

import email.parser
import gzip
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
DEADLINE_S = 120
VERSION = "0.2.0"
WHEEL_BYTES_MAX = 12 << 20
# Newest symbol versions that the wheel may need: those of RHEL 9, the oldest distribution of the wheel's tag, with glibc 2.34
# and the libraries of GCC 11.
VERSIONS_MAX = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (11,)}
OF_THE_C_LIBRARY = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"}
OF_THE_C_LIBRARY |= {"ld-linux-x86-64.so.2", "libgcc_s.so.1"}

LICENSES = {"libabsl", "libcapnp", "libhwloc", "libspdlog", "liburing", "Apache-2.0"}

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the tag is of x86-64")


def run(*words, check=True, **options):
    done = subprocess.run(
        [*map(str, words)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        stdin=subprocess.DEVNULL,
        check=False,
        **options,
    )
    assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel():
    wheels = list((BUILD / "wheel").glob("forebay-*.whl"))
    assert len(wheels) == 1, "build it: source tools/setup.sh; install_wheel"
    return wheels[0]


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    for program in scripts(folder).iterdir():
        program.chmod(0o755)
    return folder


def scripts(folder):
    return folder / f"forebay-{VERSION}.data" / "scripts"


def binaries(folder):
    return [
        path for path in folder.rglob("*") if path.is_file() and path.read_bytes()[:4] == b"\x7fELF"
    ]


def numbers(version):
    return tuple(map(int, version.split(".")))


def test_it_is_small_and_its_tag_names_the_oldest_c_library(wheel):
    assert wheel.stat().st_size <= WHEEL_BYTES_MAX
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    python = "cp312-abi3" if sys.version_info >= (3, 12) else f"{python}-{python}"
    assert wheel.name == f"forebay-{VERSION}-{python}-manylinux_2_34_x86_64.whl"


def test_it_needs_no_package_and_torch_is_an_extra(unpacked):
    text = (unpacked / f"forebay-{VERSION}.dist-info" / "METADATA").read_text(encoding="utf-8")
    metadata = email.parser.Parser().parsestr(text)
    needs = metadata.get_all("Requires-Dist")
    assert [need for need in needs if "extra ==" not in need] == []
    assert any(re.match(r"torch>=2\.4; extra == .torch.", need) for need in needs), needs


def test_it_brings_the_whole_package(unpacked):
    source = ROOT / "client" / "python" / "forebay"
    parts = {path.relative_to(source).as_posix() for path in source.rglob("*.py*") if path.suffix != ".pyc"}
    inside = {p.relative_to(unpacked / "forebay").as_posix() for p in (unpacked / "forebay").rglob("*")}
    assert "__init__.py" in parts and "_core.pyi" in parts and "py.typed" in inside
    assert parts <= inside
    assert [name for name in inside if re.fullmatch(r"_core\..*so", name)]


def test_the_package_states_the_version_of_the_wheel(unpacked):
    words = [sys.executable, "-S", "-c", "import forebay; print(forebay.__version__)"]
    assert run(*words, env={"PYTHONPATH": str(unpacked)}, cwd="/").stdout == f"{VERSION}\n"


def test_it_brings_both_programs_and_the_terms_of_what_is_linked(unpacked):
    assert {path.name for path in scripts(unpacked).iterdir()} == {"forebay", "forebayd"}
    licenses = unpacked / f"forebay-{VERSION}.dist-info" / "licenses"
    assert LICENSES <= {path.name for path in licenses.iterdir()}


def test_no_binary_needs_a_newer_symbol_than_the_tag_says(unpacked):
    found = binaries(unpacked)
    assert len(found) >= 3
    for binary in found:
        table = run("objdump", "-T", binary).stdout
        for library, version in re.findall(r"\*UND\*.*\((GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)\)", table):
            assert numbers(version) <= VERSIONS_MAX[library], f"{binary.name}: {library}_{version}"


def test_every_library_is_inside(unpacked):
    inside = {path.name for path in (unpacked / "forebay.libs").iterdir()}
    for binary in binaries(unpacked):
        needed = set(re.findall(r"NEEDED\s+(\S+)", run("objdump", "-p", binary).stdout))
        if binary.parent == scripts(unpacked):
            assert needed <= OF_THE_C_LIBRARY, binary.name
        else:
            assert needed <= OF_THE_C_LIBRARY | inside | {"libstdc++.so.6"}, binary.name


def test_a_wheel_that_lacks_a_library_gets_no_tag(wheel, tmp_path):
    lacking = tmp_path / wheel.name.replace("manylinux_2_34", "linux")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(lacking, "w") as new:
        for name in whole.namelist():
            content = whole.read(name)
            if name.endswith("/RECORD"):
                content = re.sub(rb"(?m)^forebay\.libs/libkj-0.*\n", b"", content)
            if not name.startswith("forebay.libs/libkj-0"):
                new.writestr(name, content)
    command = f"source tools/setup.sh; tag_wheel {lacking} {tmp_path / 'tagged'}"
    done = run("bash", "-c", command, check=False, cwd=ROOT)
    assert done.returncode == 1 and not list(tmp_path.glob("tagged/*manylinux*"))
    assert re.search(r"libkj-0-\S+. could not be located", done.stderr), done.stderr


def soname(library):
    return re.search(r"SONAME\s+(\S+)", run("objdump", "-p", library).stdout)[1]


def test_no_library_of_the_wheel_has_the_name_of_a_library_of_the_system(unpacked):
    libraries = list((unpacked / "forebay.libs").iterdir())
    assert {library.name.partition("-")[0] for library in libraries} >= {"libabsl_strings", "libcapnp", "libkj"}
    for library in libraries:
        assert re.search(r"-[0-9a-f]{8}\.", library.name), library.name
        assert soname(library) == library.name


def test_the_package_works_beside_another_library_of_each_soname(unpacked, tmp_path):
    """Each stand-in has the soname of Debian's library and none of its symbols."""
    originals = set()
    for library in (unpacked / "forebay.libs").iterdir():
        original = soname(pathlib.Path("/usr/lib/x86_64-linux-gnu", re.sub("-[0-9a-f]{8}", "", library.name)))
        originals.add(original)
        run("cc", "-shared", "-nostdlib", f"-Wl,-soname,{original}", "-o", tmp_path / original, "-xc", "/dev/null")
    assert any(re.fullmatch(r"libabsl_strings\.so\.\d+", name) for name in originals), originals
    code = (
        "import ctypes, pathlib, subprocess, sys\n"
        "for library in pathlib.Path(sys.argv[1]).iterdir(): ctypes.CDLL(library, ctypes.RTLD_GLOBAL)\n"
        "import forebay._core\n"
        "for program in map(pathlib.Path(sys.argv[2]).joinpath, ('forebay', 'forebayd')):\n"
        "    subprocess.run([program, '--version'], check=True)\n"
        "print(open('/proc/self/maps').read())"
    )
    words = [sys.executable, "-S", "-c", code, tmp_path, scripts(unpacked)]
    said = run(*words, env={"PYTHONPATH": str(unpacked), "LD_LIBRARY_PATH": str(tmp_path)}, cwd="/").stdout
    assert len(re.findall(r"^forebayd? [\d.]+$", said, re.M)) == 2
    assert f"{tmp_path}/libkj" in said and f"{unpacked}/forebay.libs/libkj" in said


def test_the_extension_is_loaded_with_the_libraries_of_the_wheel(unpacked):
    code = "import forebay._core; print(open('/proc/self/maps').read())"
    maps = run(sys.executable, "-S", "-c", code, env={"PYTHONPATH": str(unpacked)}, cwd="/").stdout
    loaded = {line.split()[-1] for line in maps.split("\n") if re.search(r"lib(capnp|kj|absl)", line)}
    assert loaded
    assert {pathlib.Path(path).parent for path in loaded} == {unpacked / "forebay.libs"}


@pytest.mark.skipif(os.getuid() != 0, reason="chroot(2) is for root")
def test_the_programs_run_where_nothing_but_the_c_library_is(unpacked, tmp_path):
    for library in OF_THE_C_LIBRARY:
        place = next(
            folder / library
            for folder in map(pathlib.Path, ("/lib64", "/lib/x86_64-linux-gnu", "/usr/lib64"))
            if (folder / library).exists()
        )
        target = tmp_path / ("lib64" if library.startswith("ld-") else "lib") / library
        target.parent.mkdir(exist_ok=True)
        shutil.copy(place, target)
    for program in scripts(unpacked).iterdir():
        shutil.copy(program, tmp_path)
    environment = {"LD_LIBRARY_PATH": "/lib"}
    for program in ("forebay", "forebayd"):
        done = run("chroot", tmp_path, f"/{program}", "--version", env={**os.environ, **environment})
        assert done.stdout == f"{program} {VERSION}\n"
    doctor = run("chroot", tmp_path, "/forebay", "doctor", env={**os.environ, **environment}, check=False)
    assert "CPU target" in doctor.stdout, doctor.stderr


def test_the_programs_have_the_instruction_sets_that_highway_finds(unpacked):
    flags = pathlib.Path("/proc/cpuinfo").read_text(encoding="ascii")
    doctor = run(scripts(unpacked) / "forebay", "doctor", "--json", check=False).stdout
    for target, flag in (("avx2", "avx2"), ("avx3", "avx512bw")):
        assert (target in doctor) == (f" {flag} " in flags), (target, doctor)


def test_the_source_distribution_has_all_that_is_built(tmp_path):
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    run(sys.executable, "-c", code, tmp_path, cwd=ROOT / "client" / "python")
    (archive,) = tmp_path.glob(f"forebay-{VERSION}.tar.gz")
    with tarfile.open(archive) as tar:
        inside = {name.partition("/")[2] for name in tar.getnames()}
    rooms = ["client", "cpu_adam", "daemon", "gpu", "nvme", "pinned_mem", "protocol", "tools/forebay"]
    ours = run("git", "-C", ROOT, "ls-files", "CMakeLists.txt", "tools/CMakeLists.txt", "tools/package", *rooms)
    missing = set(ours.stdout.split()) - inside
    assert not missing
    assert "pyproject.toml" in inside and "PKG-INFO" in inside
    assert not [name for name in inside if name.endswith(".pyc")]


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    run("cpack", "-B", folder, cwd=BUILD)
    yield folder
    shutil.rmtree(folder)


def unpack(package, folder):
    run("dpkg-deb", "--raw-extract", package, folder)
    control = (folder / "DEBIAN" / "control").read_text(encoding="utf-8")
    depends = re.search(r"^Depends: (.*)$", control, re.M)[1].split(", ")
    for script in ("postinst", "prerm", "postrm"):
        run("sh", "-n", folder / "DEBIAN" / script)
    assert (folder / "DEBIAN" / "conffiles").is_file()
    return {word.split()[0] for word in depends}


@pytest.fixture(scope="module")
def tree(packages, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree")
    (package,) = packages.glob(f"forebay_{VERSION}_amd64.deb")
    depends = unpack(package, folder)
    assert depends <= {"libc6", "libgcc-s1"}, depends
    return folder


def test_the_package_has_all_its_parts_and_needs_the_c_library_alone(tree):
    for part in (
        "usr/bin/forebay",
        "usr/bin/forebayd",
        "usr/lib/systemd/system/forebayd.service",
        "usr/lib/sysusers.d/forebay.conf",
        "usr/lib/tmpfiles.d/forebay.conf",
        "usr/share/bash-completion/completions/forebay",
        "usr/share/forebay/forebay.toml",
        "usr/share/man/man1/forebay.1.gz",
        "usr/share/man/man8/forebayd.8.gz",
        "etc/forebay/forebay.toml",
    ):
        assert (tree / part).is_file(), part
    assert LICENSES <= {path.name for path in (tree / "usr/share/forebay/licenses").iterdir()}


def test_the_gateway_is_a_package_of_its_own_that_needs_ucx(packages, tree, tmp_path):
    made = list(packages.glob(f"forebay-gateway_{VERSION}_amd64.deb"))
    if not made:
        pytest.skip("forebay-gateway is not built: no libucx-dev 1.13 or newer")
    depends = unpack(made[0], tmp_path)
    assert {"libucx0", "libssl3"} <= depends, depends
    files = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    for part in (
        "usr/bin/forebay-gateway",
        "usr/lib/systemd/system/forebay-gateway.service",
        "usr/share/forebay/gateway.toml",
        "usr/share/man/man8/forebay-gateway.8.gz",
        "etc/forebay/gateway.toml",
    ):
        assert pathlib.Path(part) in files, part
    assert LICENSES <= {path.name for path in (tmp_path / "usr/share/forebay-gateway/licenses").iterdir()}
    both = {path for path in files if path.parts[0] != "DEBIAN" and (tree / path).is_file()}
    assert not both  # dpkg refuses two packages that contain the same file
    unit = (tmp_path / "usr/lib/systemd/system/forebay-gateway.service").read_text(encoding="utf-8")
    assert "ExecStart=/usr/bin/forebay-gateway --config /etc/forebay/gateway.toml" in unit
    page = gzip.decompress((tmp_path / "usr/share/man/man8/forebay-gateway.8.gz").read_bytes()).decode()
    assert ".B forebay\\-gateway connect [OPTIONS]" in page


def test_systemd_takes_unit_user_and_folder(tree):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tree / "usr/lib/systemd/system/forebayd.service"
    text = unit.read_text(encoding="utf-8")
    assert "ExecStart=/usr/bin/forebayd --config /etc/forebay/forebay.toml" in text
    unit.write_text(text.replace("/usr/bin/", f"{tree}/usr/bin/"), encoding="utf-8")
    run("systemd-analyze", "verify", "--man=no", unit)
    for folder in ("var/lib", "etc", "run"):
        (tree / folder).mkdir(parents=True, exist_ok=True)
    for name in ("passwd", "group", "shadow", "gshadow"):
        (tree / "etc" / name).touch()
    run("systemd-sysusers", f"--root={tree}", "forebay.conf")
    assert re.search(r"^forebay:x:\d+:\d+:.*:/var/lib/forebay:", (tree / "etc/passwd").read_text())
    assert re.search(r"^forebay:x:\d+:", (tree / "etc/group").read_text())
    run("systemd-tmpfiles", f"--root={tree}", "--create", "forebay.conf")
    assert (tree / "var/lib/forebay").is_dir()


def test_manual_pages_and_completion_know_every_command_and_option(tree, unpacked):
    program = scripts(unpacked) / "forebay"
    commands = re.findall(r"^  (\w+) ", run(program, "--help").stdout.partition("Subcommands:")[2], re.M)
    assert "run" in commands and "doctor" in commands
    pages = {}
    for page in ("forebay.1", "forebayd.8"):
        file = tree / "usr/share/man" / f"man{page[-1]}" / f"{page}.gz"
        pages[page] = gzip.decompress(file.read_bytes()).decode().replace("\\-", "-")
        if shutil.which("man") is not None:
            assert run("man", "--warnings", "-l", file, env={**os.environ, "MANPAGER": "cat"}).stderr == ""
    completion = tree / "usr/share/bash-completion/completions/forebay"
    for command in commands:
        options = re.findall(r"^  (?:-\w,)?(--[\w-]+)", run(program, command, "--help").stdout, re.M)
        typed = f"COMP_WORDS=(forebay {command} --) COMP_CWORD=2; _forebay; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        completed = run("bash", "-c", f"source {completion}; {typed}").stdout.split()
        assert set(options) <= set(completed), command
        for option in set(options) - {"--help"}:
            assert option in pages["forebay.1"], f"{command} {option}"
    assert "swap.capacity" in pages["forebayd.8"]
    top = "COMP_WORDS=(forebay '') COMP_CWORD=1; _forebay; printf '%s\\n' \"${COMPREPLY[@]}\""
    assert set(commands) <= set(run("bash", "-c", f"source {completion}; {top}").stdout.split())
