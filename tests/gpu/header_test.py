# SPDX-License-Identifier: Apache-2.0
# Goal    The declarations of CUDA, NCCL and NVTX in gpu/ match NVIDIA's headers.
# Method  Uses the headers of torch's packages, or of the toolkit; the compiler compares. A copy with a wrong number and one
#         with a wrong parameter must fail.

import pathlib
import shutil
import subprocess
import sysconfig

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = pathlib.Path(sysconfig.get_path("purelib")) / "nvidia"
TOOLKITS = (pathlib.Path("/usr/local/cuda/include"), pathlib.Path("/usr/include"))
ROOM = "gpu/internal"
# NVIDIA's header by the prefix of our files.
CHECKS = {"cuda": "cuda.h", "nccl": "nccl.h", "nvtx": "nvtx3/nvToolsExt.h"}


def folder_of(header):
    folders = [*sorted(PACKAGES.glob("*/include")), *TOOLKITS]
    return next((folder for folder in folders if (folder / header).exists()), None)


def needs(kind):
    header = CHECKS[kind]
    missing = folder_of(header) is None or folder_of("cuda.h") is None
    return pytest.mark.skipif(missing, reason=f"no {header}: torch without CUDA")


def stand_ins(folder):
    """What nccl.h includes of CUDA's, where torch's packages are alone: since CUDA 13 their cuda_runtime.h includes
    the folder crt, which the toolkit has. NCCL's declarations need one type of them; the driver's header says what
    it is."""
    folder.mkdir()
    (folder / "cuda_runtime.h").write_text("#include <cuda.h>\ntypedef CUstream cudaStream_t;\n")
    (folder / "cuda_fp16.h").write_text("")
    return folder


def compiles(root, kind, tmp_path):
    folders = [folder_of(CHECKS[kind]), folder_of("cuda.h")]
    crt = folder_of("crt/host_config.h")
    folders = [*folders, crt] if crt else [stand_ins(tmp_path / "stand_ins"), *folders]
    systems = [flag for folder in folders for flag in ("-isystem", folder)]
    check = f"{ROOM}/{kind}_header_check.cc"
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{root}", *systems, check]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


KINDS = [pytest.param(kind, marks=needs(kind)) for kind in CHECKS]


@pytest.mark.parametrize("kind", KINDS)
def test_the_declarations_are_nvidias(kind, tmp_path):
    done = compiles(ROOT, kind, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("kind", "part", "before", "after", "message"),
    [
        pytest.param(*values, marks=needs(values[0]))
        for values in (
            ("cuda", "types.h", "kNotReady = 600", "kNotReady = 601", "kNotReady"),
            ("cuda", "functions.inc", "(CUevent*, unsigned int)", "(CUevent*, int)", "cuEventCreate"),
            ("nccl", "types.h", "kBFloat16 = 9", "kBFloat16 = 8", "kBFloat16"),
            ("nccl", "types.h", "unsigned version;", "size_t version;", "blocking"),
            ("nvtx", "types.h", "kRangePop = 11", "kRangePop = 10", "kRangePop"),
            ("nvtx", "types.h", "uint32_t reserved;", "uint64_t reserved;", "set_tool_version"),
            ("nccl", "functions.inc", "(ncclUniqueId*)", "(ncclUniqueId)", "ncclGetUniqueId"),
        )
    ],
)
def test_a_wrong_declaration_is_found(tmp_path, kind, part, before, after, message):
    (tmp_path / ROOM).mkdir(parents=True)
    for one in (ROOT / ROOM).glob(f"{kind}_*"):
        shutil.copy(one, tmp_path / ROOM)
    changed = tmp_path / ROOM / f"{kind}_{part}"
    text = changed.read_text(encoding="utf-8")
    assert before in text
    changed.write_text(text.replace(before, after), encoding="utf-8")
    done = compiles(tmp_path, kind, tmp_path)
    assert done.returncode != 0
    assert message in done.stderr, done.stderr
