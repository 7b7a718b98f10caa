# SPDX-License-Identifier: Apache-2.0
"""A PC with AVX-512 that runs one program: kernel, files and Bochs around it."""

import os
import pathlib
import pty
import re
import select
import shutil
import subprocess
import time
import tty

SHARE = pathlib.Path("/usr/share/bochs")
LOADER = [
    pathlib.Path("/usr/lib/ISOLINUX/isolinux.bin"),
    pathlib.Path("/usr/lib/syslinux/modules/bios/ldlinux.c32"),
]
NEEDED = {  # file or program: Debian package that has it
    "bochs-bin": "bochs",
    "/usr/lib/x86_64-linux-gnu/bochs/plugins/libbx_term_gui.so": "bochs-term",
    str(SHARE / "BIOS-bochs-latest"): "bochs",
    "xorriso": "xorriso",
    str(LOADER[0]): "isolinux",
    str(LOADER[1]): "syslinux-common",
}
# Bochs 2.7 gives the compact form of XSAVE a wrong size: Linux then disables AVX, and the lazy
# binding of glibc faults.
COMMAND_LINE = (
    "console=ttyS0 quiet loglevel=3 mitigations=off noxsaves clearcpuid=xsavec LD_BIND_NOW=1"
)
SETTINGS = """\
config_interface: textconfig
display_library: term
cpu: model=corei7_skylake_x, ips=100000000
memory: guest=512, host=512
romimage: file={share}/BIOS-bochs-latest
vgaromimage: file={share}/VGABIOS-lgpl-latest
ata0-master: type=cdrom, path="{folder}/disk.iso", status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev="{folder}/serial"
log: {folder}/bochs.log
panic: action=fatal
error: action=report
clock: sync=none
"""


def kernel_package():
    """The newest small kernel: the meta package names it."""
    found = subprocess.run(
        ["apt-cache", "depends", "linux-image-cloud-amd64"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return re.search(r"Depends: (linux-image-\S+)", found.stdout).group(1)


def libraries_of(program):
    listed = subprocess.run(["ldd", program], stdout=subprocess.PIPE, text=True, check=True)
    return [pathlib.Path(path) for path in re.findall(r"(/\S+) \(0x", listed.stdout)]


def archive(files, folders):
    """A cpio archive of the kind "newc" with {path: bytes} and, before them, their folders."""
    out = bytearray()

    def add(path, mode, data=b"", device=(0, 0)):
        name = path.encode() + b"\0"
        numbers = (len(out) + 1, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name), 0)
        out.extend(b"070701" + "".join(f"{number:08x}" for number in numbers).encode() + name)
        out.extend(bytes(-len(out) % 4) + data)
        out.extend(bytes(-len(out) % 4))

    for path in files:
        folders = folders | {str(above) for above in pathlib.PurePath(path).parents}
    for path in sorted(folders - {"."}):
        add(path, 0o040755)
    add("dev/console", 0o020600, device=(5, 1))
    for path, data in files.items():
        add(path, 0o100755, data)
    add("TRAILER!!!", 0)
    return bytes(out)


def make_disk(kernel, init, program, folder, gtest_filter):
    files = {"init": init.read_bytes(), "cpu_adam_test": program.read_bytes()}
    files |= {str(path)[1:]: path.read_bytes() for path in libraries_of(program)}
    disk = folder / "disk"
    shutil.rmtree(disk, ignore_errors=True)
    disk.mkdir()
    shutil.copy(kernel, disk / "kernel")
    (disk / "files").write_bytes(archive(files, {"dev", "proc", "sys", "tmp"}))
    for part in LOADER:
        shutil.copy(part, disk)
    (disk / "isolinux.cfg").write_text(
        "default tests\nlabel tests\n  kernel /kernel\n  initrd /files\n"
        f"  append {COMMAND_LINE} FILTER={gtest_filter}\n",
        encoding="utf-8",
    )
    command = ["xorriso", "-as", "mkisofs", "-quiet", "-o", folder / "disk.iso", "-c", "boot.cat"]
    command += ["-b", LOADER[0].name, "-no-emul-boot", "-boot-load-size", "4", "-boot-info-table"]
    subprocess.run(
        [*command, disk], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True
    )


def wait_on_terminal(command, limit_s, **variables):
    """Runs Bochs on a terminal, and discards its output."""
    terminal, its_end = pty.openpty()
    process = subprocess.Popen(
        command, stdin=its_end, stdout=its_end, stderr=its_end, env=os.environ | variables
    )
    os.close(its_end)
    terminals, said = [terminal], b""
    deadline = time.monotonic() + limit_s
    try:
        while process.poll() is None and time.monotonic() < deadline:
            for readable in select.select(terminals, [], [], 1)[0]:
                try:
                    said = (said + os.read(readable, 1 << 16))[-1000:]
                except OSError:  # the other end has closed
                    terminals.remove(readable)
            screen = re.search(rb'connected to screen "(/dev/pts/\d+)"', said)
            if screen is not None:
                terminals.append(os.open(screen.group(1), os.O_RDONLY | os.O_NOCTTY))
                tty.setraw(terminals[-1])
                said = b""
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        for each in {terminal, *terminals}:
            os.close(each)


def boot(kernel, built, folder, gtest_filter, limit_s):
    """Text of the serial line, and the exit status of the program or why it has none."""
    make_disk(kernel, built / "emulated_init", built / "tests/cpu_adam_test", folder, gtest_filter)
    serial, settings, commands = folder / "serial", folder / "bochsrc", folder / "commands"
    serial.unlink(missing_ok=True)
    settings.write_text(SETTINGS.format(share=SHARE, folder=folder), encoding="utf-8")
    commands.write_text("c\n", encoding="utf-8")  # continue: Debian's Bochs starts in a debugger
    wait_on_terminal(
        ["bochs-bin", "-q", "-f", settings, "-rc", commands],
        limit_s,
        TERM="xterm",
        LD_PRELOAD=str(built / "libfix_bochs.so"),
    )
    text = serial.read_text(encoding="utf-8", errors="replace") if serial.exists() else ""
    text = text.replace("\r", "")
    ended = re.search(r"^end of tests: (\d+)$", text, re.M)
    return text, int(ended.group(1)) if ended else "no end, or too late"
