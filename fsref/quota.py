"""A writer's share of the run's limit on live bytes (``store.bytes_live_max``): admission before a put, back-pressure, no full disk.

The share covers what lies under the writer's own prefixes. An upper bound of that is kept in memory (bytes at the last listing, and all
that was admitted since), so below the share nothing is listed; only where a put would pass it are the prefixes listed again, and while that
does not help the put waits in its thread. A listing here authorises no removal and decides about none.

Owns the bound and the waiting. Refuses to remove anything.
"""

import contextlib
import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from time import monotonic
from typing import Final

from fsref.errors import LedgerError, StoreFull, StoreUnavailable
from fsref.store import Store

logger = logging.getLogger(__name__)

POLL_MIN_S: Final = 0.05
POLL_MAX_S: Final = 2.0


class Quota:
    """One writer process's share. Thread-safe: what is admitted counts at once, so puts side by side cannot pass the share together."""

    def __init__(self, store: Store, prefixes: Callable[[], Sequence[str]], *, share_bytes: int, wait_s: float, fresh: bool = True) -> None:
        """``prefixes`` names the folders that the share covers; with ``fresh`` nothing lies there yet, else they are listed at the first
        put. ``wait_s`` bounds the waiting of one put.
        """
        self._store, self._prefixes = store, prefixes
        self._share, self._wait_s = share_bytes, wait_s
        self._changed = threading.Condition()
        self._known = fresh
        self._bound = 0
        self._in_flight = 0
        self._since: int | None = None  # while a listing runs: what it may not have seen
        self._closed = False
        self._rng = random.Random()  # noqa: S311 - jitter
        self.lists = 0
        self.waits = 0
        """Puts that had to wait."""
        self.waited_s = 0.0
        """Seconds that puts have waited, over all threads."""
        self.waiting = 0
        """Puts that wait now."""

    @property
    def bytes_live(self) -> int:
        """The upper bound of what lies under the own prefixes."""
        return self._bound

    @contextlib.contextmanager
    def admitted(self, byte_count: int, *, stop: threading.Event | None = None) -> Iterator[None]:
        """Waits until ``byte_count`` more bytes fit the share, then counts them; a put that fails in the block does not count.

        Raises ``StoreFull`` at once for more bytes than the share, else after ``wait_s`` seconds; ``CancelledError`` once ``stop`` is
        set or the quota is closed.
        """
        if byte_count > self._share:
            raise StoreFull(
                f"an object of {byte_count} bytes is larger than this worker's whole share of {self._share} bytes: "
                "raise store.bytes_live_max, or use fewer env workers"
            )
        self._admit(byte_count, stop or threading.Event())
        try:
            yield
        except BaseException as e:
            self._settle(byte_count, kept=isinstance(e, StoreUnavailable | LedgerError))  # it may be there: it counts until a listing
            raise
        self._settle(byte_count, kept=True)

    def close(self) -> None:
        """Ends all waiting."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def counters(self) -> dict[str, float]:
        """Gauges and counts for metrics and logs."""
        return {
            "bytes_live": self._bound,
            "bytes_live_share": self._share,
            "quota_waits": self.waits,
            "quota_waiting": self.waiting,
            "quota_waited_s": round(self.waited_s, 3),
            "quota_lists": self.lists,
        }

    def _admit(self, byte_count: int, stop: threading.Event) -> None:
        if self._fits(byte_count):
            return
        start, attempt = monotonic(), 0
        with self._changed:
            self.waiting += 1
        try:
            while not self._fits_now(byte_count):
                if attempt == 0:
                    with self._changed:
                        self.waits += 1
                    logger.warning(
                        "a put of %d bytes waits for room: %d of this worker's %d are used", byte_count, self._bound, self._share
                    )
                attempt += 1
                left = self._wait_s - (monotonic() - start)
                if left <= 0:
                    raise self._full(byte_count)
                self._pause(min(left, self._rng.uniform(0.5, 1.0) * min(POLL_MAX_S, POLL_MIN_S * 2.0 ** min(attempt, 16))), stop)
        finally:
            with self._changed:
                self.waiting -= 1
                self.waited_s += monotonic() - start

    def _fits_now(self, byte_count: int) -> bool:
        """Looks at the store, unless the bound itself has become low enough meanwhile."""
        if self._fits(byte_count):
            return True
        self._list()
        return self._fits(byte_count)

    def _full(self, byte_count: int) -> StoreFull:
        return StoreFull(
            f"this worker's share of store.bytes_live_max is {self._share} bytes, {self._bound} are there and {byte_count} more were "
            f"wanted; within {self._wait_s:g} s nothing was removed that makes room: raise store.bytes_live_max, commit steps "
            "sooner (trainer.commit, trainer.checkpoint_every), or generate fewer batches ahead (orchestrator.ahead_max)"
        )

    def _fits(self, byte_count: int) -> bool:
        """Counts the bytes if they fit."""
        with self._changed:
            if not self._known or self._bound + byte_count > self._share:
                return False
            self._bound += byte_count
            self._in_flight += byte_count
            if self._since is not None:
                self._since += byte_count
            return True

    def _list(self) -> None:
        """Lists the own prefixes, one thread at a time; the others wait for its result."""
        with self._changed:
            if self._since is not None:
                self._changed.wait_for(lambda: self._since is None or self._closed)
                return
            self._since = self._in_flight
            self.lists += 1
        found: int | None = None
        try:
            found = sum(entry.byte_count for prefix in self._prefixes() for entry in self._store.list(prefix))
        finally:
            with self._changed:
                if found is not None:
                    self._bound, self._known = found + self._since, True  # an object that was being put may count twice: an upper bound
                self._since = None
                self._changed.notify_all()

    def _settle(self, byte_count: int, *, kept: bool) -> None:
        with self._changed:
            self._in_flight -= byte_count
            if not kept:
                self._bound = max(0, self._bound - byte_count)
                if self._since is not None:
                    self._since = max(0, self._since - byte_count)
                self._changed.notify_all()

    def _pause(self, seconds: float, stop: threading.Event) -> None:
        """A part of the wait. Raises ``CancelledError`` where it is over."""
        end = monotonic() + seconds
        while (left := end - monotonic()) > 0 and not self._closed:
            if stop.wait(min(left, POLL_MIN_S)):
                break
        if stop.is_set() or self._closed:
            raise CancelledError
