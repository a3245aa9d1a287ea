"""What a deleter still has to remove, in bounded memory: its work at hand as ids, the rest as bare numbers.

During an outage of the store removals pile up while training goes on, and none may be forgotten. The ids at hand are limited
(``ledger.queue_ids_max``); beyond that an id costs the 8 bytes of its number. Owns order and due times. Refuses locks and threads: the
deleter's condition guards it.
"""

import heapq
from array import array
from collections import deque
from collections.abc import Iterable

from fsref.ledger.ids import split_known

ATTEMPT_MAX = 64
"""Attempts are counted up to here: back-off has long reached its longest wait, and equal counts share a set."""

_Numbers = dict[tuple[str, int], "array[int]"]
"""(producer, attempts so far) to sequence numbers."""


class Backlog:
    """Ids with their attempts so far. Those that waited, or did not fit ``ids_max``, go first; the others first in, first out."""

    def __init__(self, *, ids_max: int) -> None:
        self._ids_max = ids_max
        self._ready: deque[tuple[str, int]] = deque()
        self._spilled: _Numbers = {}
        self._spilled_count = 0
        self._waiting: list[tuple[float, int, _Numbers, int]] = []  # due, tie, numbers, how many
        self._waiting_count = 0
        self._ties = 0

    def __len__(self) -> int:
        """Everything: ready and waiting."""
        return len(self._ready) + self._spilled_count + self._waiting_count

    @property
    def ready(self) -> int:
        """How many may be tried now."""
        return len(self._ready) + self._spilled_count

    @property
    def next_due_s(self) -> float | None:
        """When the first of the waiting ones may be tried again; None if none waits."""
        return self._waiting[0][0] if self._waiting else None

    def add(self, object_ids: Iterable[str], *, attempt: int) -> None:
        """Ids to try now; they were checked before."""
        for object_id in object_ids:
            if len(self._ready) < self._ids_max:
                self._ready.append((object_id, attempt))
            else:
                _add(self._spilled, object_id, attempt)
                self._spilled_count += 1

    def wait(self, attempts: dict[str, int], *, due_s: float) -> None:
        """Ids (to their attempts so far) that failed together: not before ``due_s``."""
        numbers: _Numbers = {}
        for object_id, attempt in attempts.items():
            _add(numbers, object_id, min(attempt, ATTEMPT_MAX))
        self._ties += 1
        heapq.heappush(self._waiting, (due_s, self._ties, numbers, len(attempts)))
        self._waiting_count += len(attempts)

    def wake(self, now_s: float) -> None:
        """Makes ready what is due."""
        while self._waiting and self._waiting[0][0] <= now_s:
            _, _, numbers, count = heapq.heappop(self._waiting)
            for key, seqs in numbers.items():
                self._spilled.setdefault(key, array("Q")).extend(seqs)
            self._waiting_count -= count
            self._spilled_count += count

    def take(self, count_max: int) -> dict[str, int]:
        """Up to ``count_max`` ready ids to their attempts so far; they are the caller's now."""
        out: dict[str, int] = {}
        while self._spilled and len(out) < count_max:
            key = next(iter(self._spilled))
            seqs = self._spilled[key]
            some = seqs[-(count_max - len(out)) :]
            del seqs[-len(some) :]
            if not seqs:
                del self._spilled[key]
            self._spilled_count -= len(some)
            out.update((f"{key[0]}/{seq}", key[1]) for seq in some)
        while self._ready and len(out) < count_max:
            object_id, attempt = self._ready.popleft()
            out[object_id] = attempt
        return out


def _add(into: _Numbers, object_id: str, attempt: int) -> None:
    inc, seq = split_known(object_id)
    into.setdefault((inc, attempt), array("Q")).append(seq)
