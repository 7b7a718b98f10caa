# SPDX-License-Identifier: Apache-2.0
"""Goal    `forebay run` puts its private folder where the environment says, and where nothing takes it, it names the
        variables to set.
Method  Real processes of build/bin. Folders that take nothing: one that does not exist, one whose path is too long for a
        socket, a /tmp that is mounted read-only for one command alone.
"""

import pathlib
import shutil
import subprocess
import tempfile

import pytest
from forebay_command import FOREBAY, folders_of_run, forebay, run_flags

MISSING = "/does/not/exist"
# Longest parent folder in bytes. With forebay-run-XXXXXX/forebay.sock.new it makes the 107 bytes of a socket's path.
BYTES_MOST = 71


@pytest.fixture
def folders(tmp_path):
    with folders_of_run(tmp_path, "private-folder") as made:
        yield made


@pytest.fixture
def short():
    with tempfile.TemporaryDirectory(prefix="fb") as folder:
        yield pathlib.Path(folder)
        assert list(pathlib.Path(folder).rglob("forebay-run-*")) == [], "left behind"


def folder_of_bytes(parent, count):
    folder = parent / ("x" * (count - len(str(parent)) - 1))
    folder.mkdir()
    return folder


def socket_of(folders, variables, cwd=None):
    """The socket of a private daemon that was started with these values of XDG_RUNTIME_DIR and TMPDIR."""
    environment, _, swap = folders
    environment = {name: text for name, text in environment.items() if name not in ("XDG_RUNTIME_DIR", "TMPDIR")}
    done = forebay(
        *run_flags(swap), "sh", "-c", 'echo "$FOREBAY_SOCKET"', env={**environment, **variables}, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return pathlib.Path(done.stdout.strip())


def test_the_first_variable_whose_folder_takes_it_counts(folders, short):
    first, second = short / "first", short / "second"
    first.mkdir()
    second.mkdir()
    too_long = folder_of_bytes(short, BYTES_MOST + 1)
    for runtime, temporary, chosen in [
        (first, second, first),
        (None, second, second),
        ("", second, second),
        (MISSING, second, second),
        (too_long, second, second),
        (first, too_long, first),
        (too_long, too_long, "/tmp"),
        (None, MISSING, "/tmp"),
        (None, None, "/tmp"),
    ]:
        variables = {"XDG_RUNTIME_DIR": runtime, "TMPDIR": temporary}
        given = {name: str(folder) for name, folder in variables.items() if folder is not None}
        socket = socket_of(folders, given)
        assert socket.parent.parent == pathlib.Path(chosen), given
        assert not socket.parent.exists()


def test_a_folder_has_as_many_bytes_as_a_socket_allows(folders, short):
    longest = folder_of_bytes(short, BYTES_MOST)
    assert socket_of(folders, {"TMPDIR": str(longest)}).parent.parent == longest


def test_a_relative_folder_is_the_one_of_where_it_starts(folders, short):
    (short / "relative").mkdir()
    assert socket_of(folders, {"TMPDIR": "relative"}, cwd=short).parent.parent == short / "relative"


# Returns a command that runs the script with an empty, read-only /tmp. The mount is in a private namespace.
def with_tmp_read_only(script):
    return ["unshare", "--map-root-user", "--mount", "sh", "-c", f"mount -t tmpfs -o ro none /tmp && {script}"]


@pytest.fixture
def beside_tmp():
    """A folder that a mount over /tmp does not hide."""
    folder = pathlib.Path(tempfile.mkdtemp(dir="/dev/shm"))
    if subprocess.run(with_tmp_read_only("true"), capture_output=True).returncode != 0:
        folder.rmdir()
        pytest.skip("no mount namespaces here")
    yield folder
    shutil.rmtree(folder)


def test_without_tmp_it_uses_tmpdir_or_names_the_variables_to_set(beside_tmp):
    def run(variables):
        script = f'unset XDG_RUNTIME_DIR TMPDIR; {variables} "{FOREBAY}" run --dram 64MiB -- true'
        return subprocess.run(with_tmp_read_only(script), capture_output=True, text=True, timeout=60)

    done = run(f"TMPDIR={beside_tmp}")
    assert done.returncode == 0, done.stderr
    for variables in ("", f"TMPDIR={MISSING}", f"XDG_RUNTIME_DIR={MISSING}"):
        done = run(variables)
        assert done.returncode == 1
        error, hint = done.stderr.splitlines()
        assert error.startswith("error[E_OPTION]: ") and "/tmp: Read-only file system" in error, error
        assert (MISSING in error) == (MISSING in variables), error
        assert hint.startswith("hint: set XDG_RUNTIME_DIR or TMPDIR to a folder") and "option" not in hint, hint
