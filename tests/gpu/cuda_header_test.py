# Goal    What the gpu room declares of CUDA is what NVIDIA's header declares, whatever built it.
# Method  The header of the packages that torch brings, or of the toolkit; the compiler compares. A copy with
#         a wrong number and one with a wrong parameter have to fail.

import pathlib
import shutil
import subprocess
import sysconfig

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = pathlib.Path(sysconfig.get_path("purelib")) / "nvidia"
TOOLKIT = pathlib.Path("/usr/local/cuda/include")
CHECK = "gpu/internal/cuda_header_check.cc"
PARTS = (CHECK, "gpu/internal/cuda_types.h", "gpu/internal/cuda_functions.inc")


def folder_of(header):
    folders = [*sorted(PACKAGES.glob("cu*/include")), TOOLKIT]
    return next((folder for folder in folders if (folder / header).exists()), None)


needs_cuda_h = pytest.mark.skipif(folder_of("cuda.h") is None, reason="no cuda.h: torch without CUDA")


def compiles(root):
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{root}", "-isystem", folder_of("cuda.h"), CHECK]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


@needs_cuda_h
def test_the_declarations_are_nvidias():
    done = compiles(ROOT)
    assert done.returncode == 0, done.stderr


@needs_cuda_h
@pytest.mark.parametrize(
    ("part", "before", "after", "message"),
    [
        (PARTS[1], "kNotReady = 600", "kNotReady = 601", "kNotReady"),
        (PARTS[2], "(CUevent*, unsigned int)", "(CUevent*, int)", "cuEventCreate"),
    ],
)
def test_a_wrong_declaration_is_found(tmp_path, part, before, after, message):
    for one in PARTS:
        (tmp_path / one).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / one, tmp_path / one)
    text = (tmp_path / part).read_text(encoding="utf-8")
    assert before in text
    (tmp_path / part).write_text(text.replace(before, after), encoding="utf-8")
    done = compiles(tmp_path)
    assert done.returncode != 0
    assert message in done.stderr, done.stderr
