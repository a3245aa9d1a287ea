"""A small process that outlives the launcher by a moment, so that nothing else does.

The launcher holds the write end of this process's stdin. When it goes, however it goes (SIGKILL included), the read ends and the guard
stops every process of the run: those that carry the run's mark in their environment, and those of the sessions that the launcher named
on the pipe (a process may overwrite its environment to set its title). SIGTERM first, SIGKILL after the grace period; servers that the
others need to end in order are stopped once those are gone. Run as ``python -m fsref.pipeline.guard MARK GRACE_S``.

Owns the search for a run's processes. Refuses to signal anything but a process that it has just identified through a pid descriptor, so
that a reused pid is never hit. Standard library only: it must start in milliseconds.
"""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final

MARK: Final = "FSREF_LAUNCH"
"""Name of the environment variable whose value marks the processes of one launch."""
POLL_S: Final = 0.02


def members(mark: str, sessions: set[int], spared: AbstractSet[int] = frozenset()) -> Iterator[int]:
    """Descriptors (pidfd) of the live processes of a launch, this one and the sessions of ``spared`` excepted. The caller closes each."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(int(entry.name))
            # read after the descriptor is open: what is read now belongs to the process that the descriptor holds, or that one is gone
            if _is_member(entry, mark, sessions, spared):
                yield descriptor
            else:
                os.close(descriptor)


def _is_member(entry: Path, mark: str, sessions: set[int], spared: AbstractSet[int]) -> bool:
    try:
        state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        if state in {"Z", "X"} or int(session) in spared:
            return False
        return int(session) in sessions or f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def send(mark: str, sessions: set[int], number: int, spared: AbstractSet[int] = frozenset()) -> int:
    """Signals every live process of the launch; returns how many there were."""
    count = 0
    for descriptor in members(mark, sessions, spared):
        count += 1
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(descriptor, number)
        os.close(descriptor)
    return count


def sweep(mark: str, sessions: set[int], *, grace_s: float, kill_s: float = 10.0, spared: AbstractSet[int] = frozenset()) -> int:
    """SIGTERM, then after ``grace_s`` SIGKILL until none is left; returns how many would not go within ``kill_s`` more."""
    if not send(mark, sessions, signal.SIGTERM, spared):
        return 0
    end = time.monotonic() + grace_s
    while time.monotonic() < end:
        if not send(mark, sessions, 0, spared):
            return 0
        time.sleep(POLL_S)
    end = time.monotonic() + kill_s
    while left := send(mark, sessions, signal.SIGKILL, spared):
        if time.monotonic() >= end:
            return left
        time.sleep(POLL_S)
    return 0


def watch(source: int) -> tuple[set[int], set[int], bool]:
    """Reads ``+SID``, ``=SID`` (a server that goes last) and ``-SID`` lines until the end of the pipe: the sessions, those of servers, and
    whether a ``done`` line came: the launcher has cleaned up itself.
    """
    sessions: set[int] = set()
    servers: set[int] = set()
    done = False
    data = b""
    while True:
        select.select([source], [], [])
        chunk = os.read(source, 4096)
        data += chunk
        *lines, data = data.split(b"\n")
        for line in lines:
            if line == b"done":
                done = True
            elif line[:1] in b"+=":
                (sessions if line[:1] == b"+" else servers).add(int(line[1:]))
            else:
                sessions.discard(int(line[1:]))
                servers.discard(int(line[1:]))
        if not chunk:
            return sessions, servers, done


def main(argv: list[str]) -> int:
    """Waits for the launcher's end, then sweeps."""
    mark, grace_s = argv[1], float(argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # only the launcher's end ends the guard
    sessions, servers, done = watch(sys.stdin.fileno())
    if done:
        return 0
    left = sweep(mark, sessions, grace_s=grace_s, spared=servers)
    return min(left + sweep(mark, servers, grace_s=0.0), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
