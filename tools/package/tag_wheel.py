"""Gives a wheel the tag of what it needs.

usage: tag_wheel.py WHEEL

A wheel that was built on this machine is tagged linux_x86_64, which no index takes. Its binaries say which version of the C
library they need; every other library has to be inside, but libstdc++ and libgcc_s, which come with torch's own needs. The
file gets the name that belongs to the tag, which is printed.
"""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

OUTSIDE = re.compile(r"(ld-linux.*|lib(c|m|dl|pthread|rt|gcc_s|stdc\+\+))\.so\.\d+")


def needs(binary: Path) -> tuple[set[str], set[tuple[int, ...]]]:
    """Libraries by name, and versions of the C library."""
    text = subprocess.run(["objdump", "-pT", binary], capture_output=True, text=True, check=True).stdout
    versions = re.findall(r"\(GLIBC_([0-9.]+)\)", text)
    return set(re.findall(r"NEEDED\s+(\S+)", text)), {tuple(map(int, v.split("."))) for v in versions}


def c_library_of(folder: Path) -> tuple[int, ...]:
    """The newest version that a binary below `folder` needs."""
    binaries = [path for path in folder.rglob("*") if path.is_file() and path.read_bytes()[:4] == b"\x7fELF"]
    inside = {path.name for path in binaries}
    newest: tuple[int, ...] = (2, 17)
    for binary in binaries:
        libraries, versions = needs(binary)
        missing = {name for name in libraries if not OUTSIDE.fullmatch(name)} - inside
        if missing:
            raise SystemExit(f"tag_wheel: {binary.name} needs {', '.join(sorted(missing))}, outside of the wheel")
        newest = max([newest, *versions])
    return newest


def record_line(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}"


def retag(wheel: Path, platform: str) -> Path:
    """Writes the wheel anew beside the old one, which it removes."""
    tagged = wheel.with_name(re.sub(r"-[^-]+\.whl$", f"-{platform}.whl", wheel.name))
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(tagged, "w", zipfile.ZIP_DEFLATED) as new:
        (about,) = (name for name in old.namelist() if name.endswith(".dist-info/WHEEL"))
        text = re.sub(rb"(?m)^(Tag: .*-)[^-\n]+$", rb"\g<1>" + platform.encode(), old.read(about))
        for info in old.infolist():
            content = old.read(info)
            if info.filename == about:
                content = text
            elif info.filename == about.replace("WHEEL", "RECORD"):
                line = rf"(?m)^{re.escape(about)},.*$"
                content = re.sub(line, record_line(about, text), content.decode()).encode()
            new.writestr(info, content, zipfile.ZIP_DEFLATED)
    wheel.unlink()
    return tagged


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    wheel = Path(arguments[1])
    machine = re.search(r"-linux_(\w+)\.whl$", wheel.name)
    if machine is None:
        raise SystemExit(f"tag_wheel: {wheel.name} is not a wheel of this machine")
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        major, minor = c_library_of(Path(folder))[:2]
    print(retag(wheel, f"manylinux_{major}_{minor}_{machine[1]}"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
