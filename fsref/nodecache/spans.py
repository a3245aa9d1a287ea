"""Chunks of a request as pieces of its buffer, how they go together, and their bytes to and from a file."""

import os
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

HOLD_BYTES: Final = 1 << 20
"""Bytes copied into the cache under one lock."""


class Span(NamedTuple):
    """A chunk of a request: its number in it, where it lies in the object, where in the request's buffer, and how long it is."""

    number: int
    object_offset: int
    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


Claimed = tuple[Span, int]
"""A chunk and the generation of its claim; 0 without one."""


def runs(spans: Iterable[Claimed]) -> Iterator[list[Claimed]]:
    """Chunks that follow each other in their request: one ranged read each, as the plan has it."""
    run: list[Claimed] = []
    for item in spans:
        if run and item[0].number > run[-1][0].number + 1:
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def groups(run: Iterable[Claimed]) -> Iterator[list[Claimed]]:
    """Parts of a run that are copied under one lock."""
    group: list[Claimed] = []
    size = 0
    for item in run:
        if group and size + item[0].size > HOLD_BYTES:
            yield group
            group, size = [], 0
        group.append(item)
        size += item[0].size
    if group:
        yield group


def read_at(fd: int, out: NDArray[np.uint8], offset: int) -> bool:
    """Fills ``out`` from a file; whether all of it was there."""
    view, done = memoryview(out), 0
    while done < len(view):
        try:
            n = os.preadv(fd, [view[done:]], offset + done)
        except OSError:
            return False
        if n == 0:
            return False
        done += n
    return True


def written_at(fd: int, data: NDArray[np.uint8], offset: int) -> bool:
    """Writes to a file; whether there was room for all of it."""
    view, done = memoryview(data), 0
    while done < len(view):
        try:
            done += os.pwritev(fd, [view[done:]], offset + done)
        except OSError:
            return False
    return True
