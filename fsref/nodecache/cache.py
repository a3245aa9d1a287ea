"""Chunks from whoever of the node fetched them: looked up, waited for, or fetched here and left for the others.

A request is read like this. All its chunks are looked up at once. Those that are there are copied out. Those that nobody fetches are
claimed, all at the same moment, fetched in as few ranged reads as touch, and left for the others. What another rank fetches is waited
for, after the own ones are done, so that no two ranks wait for each other. Who died while fetching is replaced at once, as the kernel says
so; who hangs is replaced by each rank after ``wait_s``. Whatever goes wrong with the cache itself, the request is read from the store.

Owns no policy on errors: a fetch that fails raises in the rank that fetched, and leaves nothing behind. Bytes are not checked here; readers
check them as ever, and call ``discard`` for what does not add up.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from fsref.failpoints import failpoint
from fsref.nodecache.shared import SharedFile
from fsref.nodecache.spans import Claimed, Span, groups, read_at, runs, written_at
from fsref.nodecache.table import Slot, State, Table, key_of

LIVENESS_S: Final = 0.05
"""Between looks whether a rank that is waited for lives."""
POLL_S: Final = 1e-3
LOSSES_MAX: Final = 4
"""Times that chunks may be replaced between look-up and copy, before they are read past the cache."""

Fetch = Callable[[int, int], None]
"""``fetch(start, stop)`` fills bytes [start, stop) of the request's buffer from the store."""


@dataclass
class NodeCacheCounters:
    """What this rank's cache did; plain numbers that a metrics hook may copy."""

    hits: int = 0
    """Chunks that came from the cache."""
    bytes_saved: int = 0
    """Their stored bytes."""
    fetched: int = 0
    """Chunks that this rank fetched for all."""
    waits: int = 0
    """Requests that waited for another rank."""
    takeovers: int = 0
    """Chunks fetched here because the rank that fetched them had died or hung."""
    bypasses: int = 0
    """Chunks read past the cache: too large, no slot, no room, or its lock could not be had."""
    discards: int = 0
    """Chunks that were thrown out because their bytes were damaged."""


class _Turn(NamedTuple):
    """What one look at the table said of the pending chunks."""

    ready: list[tuple[Span, Slot, int]]
    """With the place in the file."""
    mine: list[Claimed]
    """With the claim's generation."""
    waiting: list[Span]
    past: list[Span]
    """To be read past the cache."""


class NodeCache:
    """One rank's view of its node's cache. Thread-safe; close it. In a forked child it reads past itself."""

    def __init__(self, folder: str | Path, *, name: str, bytes_max: int, wait_s: float) -> None:
        """Joins the cache ``name`` (a run's uuid) in ``folder`` (``/dev/shm``, or one for tests), of ``bytes_max`` bytes of chunks.

        ``wait_s``: how long a request waits for other ranks' fetches. Raises as ``SharedFile`` does; leftovers of dead runs in the folder
        are removed.
        """
        self._file = SharedFile(folder, name=name, bytes_max=bytes_max)
        self._chunk_bytes_max = self._file.geometry.data_bytes // 4
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self.counters = NodeCacheCounters()
        self._member_count = len(self._file.members())

    @property
    def member(self) -> int:
        """This rank's number among the members; the lowest free one when it joined."""
        return self._file.member

    @property
    def member_count(self) -> int:
        """Living members, as of the last look; a rank looks when it joins and whenever it releases a step."""
        return self._member_count

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def bytes_held(self) -> int:
        """Of all chunks in the cache, whoever fetched them."""
        with self._file.locked() as table:
            return 0 if table is None else table.bytes_held

    @property
    def evictions(self) -> int:
        """Chunks of all ranks that made room before their step was released: with many, ``bytes_max`` is too small."""
        with self._file.locked() as table:
            return 0 if table is None else table.evictions

    def fill(self, object_id: str, spans: Sequence[Span], out: NDArray[np.uint8], fetch: Fetch, *, step: int) -> int:
        """Fills the spans of ``out`` (uint8, contiguous): distinct chunks, ascending. Bytes between them are filled or left as they are.

        ``step``: the training step that needs them. Returns how many chunks came from another rank, or from an earlier read. What ``fetch``
        raises is raised, and the other ranks find nothing of it.
        """
        with self._file.used() as usable:
            if usable:
                return self._fill(_digest(object_id), list(spans), out, fetch, step)
        self._past(spans, fetch)
        return 0

    def discard(self, object_id: str, spans: Sequence[Span]) -> None:
        """Forgets chunks whose bytes are damaged, if they are there."""
        digest = _digest(object_id)
        found = 0
        with self._file.locked() as table:
            for span in spans if table is not None else ():
                key = key_of(digest, span.object_offset, span.size)
                slot = table.find(key) if table is not None else None
                if table is not None and slot is not None and slot.state == State.READY:
                    table.clear(key, slot.generation)
                    found += 1
        self._count(discards=found)

    def release(self, step: int) -> None:
        """This rank needs nothing more of ``step`` and those before it; what no living rank needs is freed."""
        with self._file.locked() as table:
            if table is not None:
                table.release(self._file.member, step)
                members = self._file.members()
                self._member_count = len(members)
                for offset, size in table.drop_below(members):
                    self._file.punch(offset, size)

    def close(self) -> None:
        """Leaves the cache; the last rank removes its file. Idempotent."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _fill(self, digest: bytes, pending: list[Span], out: NDArray[np.uint8], fetch: Fetch, step: int) -> int:
        end = time.monotonic() + self._wait_s
        waits = losses = shared = 0
        while pending:
            seen = self._file.table.changes
            turn = self._look(digest, pending, step=step, late=time.monotonic() >= end)
            with self._giving_up(digest, turn.mine):
                lost = self._copy_out(digest, turn.ready, out)
                self._fetch_and_leave(digest, turn.mine, out, fetch)
            self._past(turn.past, fetch)
            shared += (hits := len(turn.ready) - len(lost))
            self._count(hits=hits, bytes_saved=sum(s.size for s, _, _ in turn.ready) - sum(s.size for s in lost))
            losses += bool(lost)
            if losses > LOSSES_MAX:
                self._past(lost, fetch)
                lost = []
            pending = sorted([*turn.waiting, *lost])
            if pending and not lost:
                waits = 1
                self._wait_for_change(digest, pending, seen, end)
        self._count(waits=waits)
        return shared

    def _look(self, digest: bytes, spans: Sequence[Span], *, step: int, late: bool) -> _Turn:
        """Claims what nobody fetches, and what is fetched by who died or, when it is ``late``, by anyone."""
        turn = _Turn([], [], [], [])
        alive: dict[int | None, bool] = {}
        taken = 0
        with self._file.locked() as table:
            if table is None:
                return _Turn([], [], [], list(spans))
            for span in spans:
                key = key_of(digest, span.object_offset, span.size)
                slot = table.find(key)
                if slot is not None and slot.state == State.READY:
                    turn.ready.append((span, slot, table.file_offset(slot.place)))
                    continue
                if slot is not None and not late:
                    owner = table.claimed_by(slot)
                    if owner not in alive:
                        alive[owner] = self._file.alive(owner)
                    if alive[owner]:
                        turn.waiting.append(span)
                        continue
                claimed = table.claim(key, owner=self._file.member, step=step) if span.size <= self._chunk_bytes_max else 0
                if claimed:
                    turn.mine.append((span, claimed))
                    taken += slot is not None
                else:
                    turn.past.append(span)
        self._count(takeovers=taken)
        return turn

    def _copy_out(self, digest: bytes, ready: Sequence[tuple[Span, Slot, int]], out: NDArray[np.uint8]) -> list[Span]:
        """Copies bytes that were there; returns the chunks that were replaced meanwhile."""
        if not ready:
            return []
        short = [not read_at(self._file.fd, out[span.start : span.stop], offset) for span, _, offset in ready]
        with self._file.locked() as table:
            if table is None:
                return [span for span, _, _ in ready]
            kept = [_same(table.find(key_of(digest, span.object_offset, span.size)), slot) for span, slot, _ in ready]
        return [span for (span, _, _), lost, same in zip(ready, short, kept, strict=True) if lost or not same]

    def _fetch_and_leave(self, digest: bytes, mine: Sequence[Claimed], out: NDArray[np.uint8], fetch: Fetch) -> None:
        """Fetches what is claimed, run by run, and leaves each run for the others before the next one."""
        if mine:
            failpoint("nodecache.fetch.claimed")
        for run in runs(mine):
            fetch(run[0][0].start, run[-1][0].stop)
            for group in groups(run):
                self._leave(digest, group, out)
            self._count(fetched=len(run))

    def _leave(self, digest: bytes, group: Sequence[Claimed], out: NDArray[np.uint8]) -> None:
        lost = 0
        with self._file.locked() as table:
            if table is None:
                self._count(bypasses=len(group))
                return
            for span, generation in group:
                key = key_of(digest, span.object_offset, span.size)
                slot = table.find(key)
                if slot is None or slot.generation != generation:
                    continue  # another rank took it over
                place = table.place(span.size)
                failpoint("nodecache.leave.placed")
                if written_at(self._file.fd, out[span.start : span.stop], table.file_offset(place)):
                    table.ready(key, claimed=slot, size=span.size, place=place)
                else:
                    table.clear(key, generation)
                    lost += 1
        self._count(bypasses=lost)

    @contextlib.contextmanager
    def _giving_up(self, digest: bytes, mine: Sequence[Claimed]) -> Iterator[None]:
        """Gives claims back that are left when the block ends by an error."""
        try:
            yield
        except BaseException:
            with self._file.locked() as table:
                for span, generation in mine if table is not None else ():
                    assert table is not None
                    table.clear(key_of(digest, span.object_offset, span.size), generation)
            raise

    def _wait_for_change(self, digest: bytes, spans: Sequence[Span], seen: int, end: float) -> None:
        """Until one of the chunks is there, given up or its fetcher dead, at most to ``end``. Looks at the table only if it changed."""
        look = time.monotonic() + LIVENESS_S
        while (now := time.monotonic()) < end:
            changes = self._file.table.changes
            if changes == seen and now < look:
                time.sleep(min(POLL_S, end - now))
                continue
            seen, look = changes, now + LIVENESS_S
            with self._file.locked() as table:
                if table is None or not all(self._still_fetched(table, digest, s) for s in spans):
                    return

    def _still_fetched(self, table: Table, digest: bytes, span: Span) -> bool:
        slot = table.find(key_of(digest, span.object_offset, span.size))
        return slot is not None and slot.state == State.FETCHING and self._file.alive(table.claimed_by(slot))

    def _past(self, spans: Sequence[Span], fetch: Fetch) -> None:
        for run in runs([(span, 0) for span in spans]):
            fetch(run[0][0].start, run[-1][0].stop)
        self._count(bypasses=len(spans))

    def _count(self, **more: int) -> None:
        if any(more.values()):
            with self._lock:
                for name, value in more.items():
                    setattr(self.counters, name, getattr(self.counters, name) + value)


@lru_cache(maxsize=4096)
def _digest(object_id: str) -> bytes:
    return blake2b(object_id.encode(), digest_size=16).digest()


def _same(now: Slot | None, then: Slot) -> bool:
    return now is not None and now.generation == then.generation
