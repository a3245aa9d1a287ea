"""Real filesystems that fail on purpose: full, out of inodes, read only, immutable, dead, cut off from power.

Everything is mounted in a mount namespace of this test process alone, so a process that is killed leaves no mount and no loop device
behind. Each function skips on a machine that cannot do it (``needs``).
"""

import contextlib
import ctypes
import fcntl
import functools
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.support import needs

CLONE_NEWNS: Final = 0x00020000
EXT4_IOC_SHUTDOWN: Final = 0x8004587D
SHUTDOWN_WITHOUT_LOG_FLUSH: Final = 2
NOBODY: Final = 65534


@functools.cache
def own_mounts() -> None:
    """Moves this process to a mount namespace of its own, once."""
    needs.root()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    _run("mount", "--make-rprivate", "/")


def _run(*command: str | Path) -> None:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"


@contextlib.contextmanager
def _mounted(folder: Path, *options: str | Path) -> Iterator[Path]:
    own_mounts()
    folder.mkdir(parents=True, exist_ok=True)
    _run("mount", *options, folder)
    try:
        yield folder
    finally:
        _run("umount", "--lazy", folder)


@contextlib.contextmanager
def tmpfs(folder: Path, *, size: str = "256k", inodes: int = 0) -> Iterator[Path]:
    """A filesystem in memory of so many bytes, and inodes if given."""
    options = f"size={size}" + (f",nr_inodes={inodes}" if inodes else "")
    with _mounted(folder, "-t", "tmpfs", "-o", options, "tmpfs") as made:
        yield made


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """The folder as a read-only mount of itself, for as long as the block lasts. What was opened before still sees the old one."""
    own_mounts()
    _run("mount", "--bind", folder, folder)
    try:
        _run("mount", "-o", "remount,bind,ro", folder)
        yield folder
    finally:
        _run("umount", "--lazy", folder)


@contextlib.contextmanager
def immutable(path: Path) -> Iterator[Path]:
    """``chattr +i``: not even root may remove or change it. Needs a filesystem that knows the flag (``ext4`` below does)."""
    needs.root()
    chattr = needs.program("chattr")
    _run(chattr, "+i", path)
    try:
        yield path
    finally:
        _run(chattr, "-i", path)


class Ext4:
    """An ext4 filesystem on a loop device whose power can be cut."""

    def __init__(self, image: Path, folder: Path) -> None:
        self.image, self.folder = image, folder
        self.folder.mkdir(parents=True, exist_ok=True)

    def mount(self) -> None:
        _run("mount", "-o", "loop,commit=600", self.image, self.folder)  # no commit by time: what is durable is what was synced

    def unmount(self) -> None:
        _run("umount", self.folder)

    def shut_down(self) -> None:
        """From here on every operation is an I/O error, and what was not synced is gone after the next mount."""
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, struct.pack("I", SHUTDOWN_WITHOUT_LOG_FLUSH))
        finally:
            os.close(fd)

    def restart(self) -> None:
        """Power is back. Every process with an open file here must be gone."""
        self.unmount()
        self.mount()


@functools.cache
def _blank(mib: int) -> Path:
    image = Path(tempfile.mkdtemp(prefix="fsref-disk-")) / "blank"
    with image.open("wb") as file:
        file.truncate(mib << 20)
    _run(needs.program("mkfs.ext4"), "-q", "-F", image)
    return image


@contextlib.contextmanager
def ext4(folder: Path, *, mib: int = 16) -> Iterator[Ext4]:
    """A fresh ext4, mounted at ``folder``."""
    needs.loop_device()
    own_mounts()
    folder.parent.mkdir(parents=True, exist_ok=True)
    image = folder.with_name(f"{folder.name}.image")
    shutil.copyfile(_blank(mib), image)
    disk = Ext4(image, folder)
    disk.mount()
    try:
        yield disk
    finally:
        _run("umount", "--lazy", folder)
        image.unlink()


def fill(folder: Path, *, leave: int = 0) -> Path:
    """Takes all of a small filesystem's space but about ``leave`` bytes; removing the file that is returned frees it."""
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(b"\0" * 4096):
            pass
    if leave:
        os.truncate(ballast, max(0, ballast.stat().st_size - leave))
    return ballast


BECOME_NOBODY: Final = f"""
import os
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
"""
"""For a program that has imported what it needs: another user may not even see the interpreter."""


def python(code: str, *args: str | Path, file_bytes_max: int = 0) -> "subprocess.CompletedProcess[str]":
    """Runs a program to its end; ``file_bytes_max`` limits the size of the files that it writes (a short write, then EFBIG)."""

    def limit() -> None:
        if file_bytes_max:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes_max, file_bytes_max))

    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A temporary folder that other users can reach, which a test's own folder is not."""
    folder = Path(tempfile.mkdtemp(prefix="fsref-open-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
