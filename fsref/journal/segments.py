"""Sealed segments: what makes a journal durable where the root is no folder.

A segment ``ledger/<inc>/<n>.seg`` is a range of bytes of the journal; segments 0, 1, 2 ... follow each other without a gap, so that
joined they are a prefix of the journal and offsets mean the same in both. Owns their names, their one writer and reading a range of
them. Refuses to move on past a segment whose fate is unknown: it is put again, with the same bytes under the same name.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from fsref.errors import Fenced, JournalCorrupt, ObjectCorrupt, ObjectExists, StoreError
from fsref.failpoints import failpoint
from fsref.refs import check_incarnation
from fsref.store.base import ObjectFile, Store

PREFIX: Final = "ledger"
SEGMENT_BYTES_MAX: Final = 256 << 20
"""Of one segment, written or read. An env worker's whole journal goes into one: 3,000,000 keeps."""
SEGMENTS_MAX: Final = 1_000_000
READ_BYTES: Final = 8 << 20
RETRY_MIN_S: Final = 0.1
RETRY_MAX_S: Final = 5.0


def segment_name(inc: str, n: int) -> str:
    """The object that holds segment ``n`` of a journal."""
    if not 0 <= n < SEGMENTS_MAX:
        raise StoreError(f"the journal of {inc} has {n} segments, the most that are written: close the run's process and start another")
    return f"{PREFIX}/{check_incarnation(inc)}/{n:06d}.seg"


def put_segment(store: Store, inc: str, n: int, data: bytes) -> None:
    """Creates segment ``n``; one that is there with the same bytes is ours, its reply was lost.

    Raises ``Fenced`` if other bytes are there: only whoever adopted ``inc`` writes under its name. Else ``StoreError``: not durable.
    """
    name = segment_name(inc, n)
    try:
        store.put(name, [data])
    except ObjectExists:
        if not _holds(store, name, data):
            raise Fenced(f"{store.url}/{name} was written by another process: {inc} was declared dead and adopted; stop it") from None


def read_segment(store: Store, inc: str, n: int, *, byte_count: int, start: int = 0, stop: int | None = None) -> bytes:
    """Bytes ``start`` to ``stop`` of a segment that was listed with ``byte_count`` bytes. Raises ``JournalCorrupt`` if it changed."""
    end = byte_count if stop is None else min(stop, byte_count)
    try:
        with store.open(segment_name(inc, n), byte_count=byte_count) as file:
            if file.byte_count != byte_count:
                raise ObjectCorrupt(f"it has {file.byte_count} bytes")
            return _bytes_of(file, start, end)
    except ObjectCorrupt as e:
        raise JournalCorrupt(f"segment {n} was listed with {byte_count} bytes, and segments never change: {e}") from e


def _holds(store: Store, name: str, data: bytes) -> bool:
    with store.open(name) as file:
        return file.byte_count == len(data) and _bytes_of(file, 0, len(data)) == data


def _bytes_of(file: ObjectFile, start: int, end: int) -> bytes:
    out = np.empty(max(0, end - start), np.uint8)
    for at in range(0, len(out), READ_BYTES):
        file.read_into(start + at, out[at : at + READ_BYTES])
    return out.tobytes()


class Sealer:
    """The one writer of a journal's segments. Thread-safe: one range is put at a time, in order."""

    def __init__(self, store: Store, inc: str, read: Callable[[int, int], bytes]) -> None:
        """``read(offset, count)`` gives bytes of the journal that were appended."""
        self._store, self.inc, self._read = store, inc, read
        self._lock = threading.Lock()
        self._next = 0
        self._pending: tuple[int, int] | None = None
        self._rng = random.Random()  # noqa: S311 - jitter
        self.sealed = 0
        """Bytes of the journal that are durable in the root."""
        self.failures = 0
        """Attempts that failed, all told."""

    def seal(self, upto: int, *, retry_s: float) -> None:
        """Returns once the first ``upto`` bytes are in the root; tries for ``retry_s`` seconds.

        Raises ``StoreError`` if they may not be (call again), ``Fenced`` if this incarnation was adopted.
        """
        end = time.monotonic() + retry_s
        attempt = 0
        while True:
            try:
                with self._lock:
                    self._seal(upto)
            except StoreError:
                self.failures += 1
                wait_s = self._rng.uniform(0.5, 1.0) * min(RETRY_MAX_S, RETRY_MIN_S * 2 ** min(attempt, 16))
                if time.monotonic() + wait_s >= end:
                    raise
                time.sleep(wait_s)
                attempt += 1
            else:
                return

    def _seal(self, upto: int) -> None:
        while self.sealed < upto:
            # A put that failed may have happened: its name stands for exactly these bytes, whatever was appended since.
            self._pending = self._pending or (self.sealed, min(upto, self.sealed + SEGMENT_BYTES_MAX))
            start, stop = self._pending
            failpoint("segment.put.before")
            put_segment(self._store, self.inc, self._next, self._read(start, stop - start))
            failpoint("segment.put.after")
            self.sealed, self._next, self._pending = stop, self._next + 1, None


def row_of(found: Sequence[tuple[int, int]], *, bytes_max: int) -> tuple[list[int], str]:
    """Sizes of a journal's segments in order, from ``(number, bytes)`` as listed, and what is wrong with them (empty: nothing).

    The sizes end before a gap (what it held is unknown), before a segment above the limit, and before ``bytes_max`` bytes in all.
    """
    sizes: list[int] = []
    total = 0
    for n, size in sorted(found):
        total += size
        if n != len(sizes):
            return sizes, f"its segment {len(sizes):06d} is missing, {n:06d} is there"
        if size > SEGMENT_BYTES_MAX or total > bytes_max:
            return sizes, f"its segment {n:06d} has {size} bytes, {total} with those before it: at most {SEGMENT_BYTES_MAX} are read"
        sizes.append(size)
    return sizes, ""
