"""Locks on byte ranges of a file that belong to an open file, not to a process: Linux's open file description locks.

The kernel releases them when the file is closed or its process dies, however it dies. Unlike locks of processes (``fcntl.lockf``), closing
another descriptor of the same file does not drop them, and two opens in one process exclude each other. A forked child shares its
parent's until both are gone.
"""

import errno
import fcntl
import struct
from typing import Final

_FLOCK: Final = struct.Struct("hhqqi0q")
"""``struct flock`` of 64-bit Linux: type, whence, start, length, pid (0), padded."""
_TAKEN: Final = {errno.EACCES, errno.EAGAIN}


def try_lock(fd: int, start: int, length: int = 1) -> bool:
    """Whether bytes [start, start + length) are now locked by this open file alone. Never waits."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, start, length, 0))
    except OSError as e:
        if e.errno in _TAKEN:
            return False
        raise
    return True


def unlock(fd: int, start: int, length: int = 1) -> None:
    """Gives a lock back."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, start, length, 0))


def locked_elsewhere(fd: int, start: int, length: int = 1) -> bool:
    """Whether another open file has a lock on a byte of [start, start + length)."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, start, length, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
