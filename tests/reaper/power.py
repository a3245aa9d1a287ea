"""A run of all holders in one process that stands still before or after its n-th change to the disk. ``python -m tests.reaper.power``

Reads lines ``FOLDER N before|after`` and forks a process for each, which prints ``cut`` where it stands still (or ``end``) until it is
killed. What it prints names its pid. Its boot is another one than the reader's, as after a power loss.
"""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from fsref.journal import identity
from fsref.steps import digest, publish
from tests.reaper.stage import Stage

CHANGES: Final = ("write", "writev", "fsync", "fdatasync", "rename", "link", "unlink", "mkdir")


class Cutter:
    """Wraps the calls of ``os`` that change a disk; from the cut on, whoever makes one waits for ever."""

    def __init__(self, at: int, *, after: bool) -> None:
        self._at, self._after = at, after
        self._count, self._lock, self._cut = 0, threading.Lock(), False
        self._say = os.write
        for name in CHANGES:
            setattr(os, name, self._wrap(getattr(os, name)))

    def tell(self, word: str) -> None:
        self._say(1, f"{word} {os.getpid()}\n".encode())

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                if self._cut:
                    threading.Event().wait()
                self._count += 1
                now = self._count == self._at
                if now and not self._after:
                    self._stand_still()
                try:
                    return function(*args, **kwargs)
                finally:
                    if now:
                        self._stand_still()

        return change

    def _stand_still(self) -> None:
        self._cut = True
        self.tell("cut")
        threading.Event().wait()


def play(folder: Path) -> None:
    """Every W1 and W2 that there is: a worker's, an orchestrator's and a trainer's removals, and a step."""
    here = identity.this_process()._replace(boot_id="the-boot-before")
    identity.this_process = lambda: here
    stage = Stage(folder, durability="node")
    env, orc, trn = stage.env(), stage.orc(), stage.trn()
    taken = stage.reply(env, orc, 2)
    orc.drop(taken[:1], "filtered")
    orc.flush()
    env.discard(stage.put(env))
    env.flush()
    info = stage.ship(orc, 0, stage.reply(env, orc, 2))
    info = msgspec.structs.replace(info, digests=(digest(b"rank"),))
    publish(stage.store, info, [b"rank"])
    trn.taken(info)
    trn.used(0)
    stage.commit(trn, 0, 0)
    stage.put(env)
    for holder in (env, orc, trn):
        holder.close()


def main() -> None:
    for line in sys.stdin:
        folder, at, when = line.split()
        pid = os.fork()
        if pid == 0:
            cutter = Cutter(int(at), after=when == "after")
            play(Path(folder))
            cutter.tell("end")
            threading.Event().wait()
        os.waitpid(pid, 0)
        os.write(1, b"gone\n")


if __name__ == "__main__":
    main()
