"""Threads for operations that may hang for ever, as a read from a dead network filesystem does.

Owns a bounded number of daemon threads, the futures of their work and its order. A thread that does not come back is abandoned: counted,
replaced by a fresh one, and left alone with the memory that it may still write to. Refuses to wait without a deadline.
"""

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from typing import Final

from fsref.errors import StoreUnavailable

ABANDONED_MAX: Final = 64
"""Threads that one pool gives up at most; beyond, work waits for the ones that are left."""
_Work = tuple[Future[None], Callable[[], None]]
_Queued = tuple[float, int, _Work]
"""Priority, and a serial number so that equals keep their order and work is never compared."""


class _Worker(threading.Thread):
    """Takes work until it is told to stop or was abandoned."""

    def __init__(self, pool: "Threads", name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.pool = pool
        self.abandoned = False
        self.future: Future[None] | None = None

    def run(self) -> None:
        while (work := self.pool.take(self)) is not None:
            _do(*work)
            del work  # whatever it refers to must not wait for the next work


def _do(future: Future[None], call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as e:  # noqa: BLE001 - carried to whoever waits for the future
        settle(future, e)
    else:
        settle(future, None)


class Threads:
    """A pool whose threads can be abandoned. Close it."""

    def __init__(self, count: int, *, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: list[_Queued] = []
        """A heap. One lock for it and for who works on what: taking the next work costs one hold of it."""
        self._serial = itertools.count()
        self._workers: list[_Worker] = []
        self._count = count
        self._closed = False
        self.abandoned = 0
        """Threads that were given up so far."""

    def submit(self, call: Callable[[], None], *, priority: float = 0) -> Future[None]:
        """Runs ``call`` on a thread, lower ``priority`` first, else in order; its exception becomes the future's."""
        future: Future[None] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            if len(self._workers) < self._count:
                self._start()
            heapq.heappush(self._queue, (priority, next(self._serial), (future, call)))
            self._changed.notify()
        return future

    def abandon(self, futures: Iterable[Future[None]], reason: str) -> int:
        """Ends futures that are not done with ``StoreUnavailable(reason)``; the threads that run them are given up and replaced.

        Returns how many threads were given up. Whatever memory the work writes to must not be used again.
        """
        given_up = 0
        with self._lock:
            wanted = {f for f in futures if not _dropped(f)}
            for worker in [w for w in self._workers if w.future in wanted]:
                if self.abandoned >= ABANDONED_MAX:
                    break
                worker.abandoned = True
                self._workers.remove(worker)
                self.abandoned += 1
                given_up += 1
                if not self._closed:
                    self._start()
        for future in wanted:
            settle(future, StoreUnavailable(reason))
        return given_up

    def close(self, *, deadline_s: float) -> int:
        """Lets running work end, up to ``deadline_s`` seconds; what has not begun is cancelled. Returns the threads given up now."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
            for _, _, (future, _) in self._queue:
                _dropped(future)
            self._queue.clear()
            self._changed.notify_all()
        end = time.monotonic() + deadline_s
        for worker in workers:
            worker.join(max(0.0, end - time.monotonic()))
        stuck = [w.future for w in workers if w.is_alive() and w.future is not None]
        return self.abandon(stuck, f"a {self._name} thread did not come back within {deadline_s:g} s")

    def take(self, worker: _Worker) -> _Work | None:
        """The next work that still is to be done, for a worker whose last one is over; None: stop. Waits."""
        with self._lock:
            worker.future = None
            while not worker.abandoned:
                if not self._queue:
                    if self._closed:
                        return None
                    self._changed.wait()
                    continue
                work = heapq.heappop(self._queue)[2]
                future = work[0]
                if not future.cancelled() and future.set_running_or_notify_cancel():
                    worker.future = future
                    return work
            return None

    def _start(self) -> None:
        worker = _Worker(self, f"{self._name}-{len(self._workers)}")
        self._workers.append(worker)
        worker.start()


def _dropped(future: Future[None]) -> bool:
    """Whether the future is over, or was now cancelled because its work has not begun. Whoever waits for it is told."""
    if future.done():
        return True
    return future.cancel() and not future.set_running_or_notify_cancel()


def settle(future: Future[None], error: Exception | None) -> None:
    """Sets the outcome, unless the future was given up before."""
    try:
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
    except InvalidStateError:
        pass  # abandoned: whoever waited was told so
