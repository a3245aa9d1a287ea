"""Work of steps ahead of the one that trains: in the order in which it will be wanted, and as much as there is room for.

Owns order, room and clocks. Refuses to know what the work is: a job says how many bytes it will hold, starts its reads, and ends them.

- **Order.** Jobs are prepared and started one after the other, by step and number. So reads of step n + 1 are never in front of reads of
  step n, whatever came first and however long a job took to plan.
- **Room.** A started job of a step that nobody has asked for yet counts with the bytes that it needs, until its step is wanted or released.
  A wanted step is what trains: it is not held back and not counted. So a rank holds the arrays of the steps that it took, and at most
  ``bytes_max`` beside; a single larger job is started when nothing else is ahead.
- **Clocks.** A step's time is the time in which at least one of its jobs was under way, waits for room and for other steps left out.
"""

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")


class Room(NamedTuple):
    """Bytes that a job needs."""

    held: int
    """From its start until its result is dropped: arrays."""
    passing: int
    """While it is under way only: what is fetched and not yet unpacked."""


class Job(Protocol[T_co]):
    """Fetching one micro batch."""

    def prepare(self) -> Room:
        """Plans; returns what the job will need."""

    def start(self) -> None:
        """Starts the reads and returns at once."""

    def finish(self) -> T_co:
        """Waits for the reads and puts the result together."""


@dataclass(order=True)
class _Queued(Generic[U]):
    step: int
    number: int
    job: Job[U] = field(compare=False)
    future: Future[U] = field(compare=False)
    room: Room | None = field(compare=False, default=None)
    """None until it was prepared."""


@dataclass
class _Clock:
    """Time in which something was under way."""

    active: int = 0
    since: float = 0.0
    spent_s: float = 0.0


@dataclass
class _Step:
    wanted: bool = False
    bytes_held: int = 0
    clock: _Clock = field(default_factory=_Clock)


class Ahead(Generic[U]):
    """Runs the jobs of steps in its own threads. Close it."""

    def __init__(self, *, workers: int, bytes_max: int, name: str, now: Callable[[], float] = time.monotonic) -> None:
        """``workers``: jobs under way at once. ``bytes_max``: what jobs of steps that nobody wants yet may hold."""
        self._bytes_max, self._now = bytes_max, now
        self._changed = threading.Condition()
        self._queue: list[_Queued[U]] = []
        self._steps: dict[int, _Step] = {}
        self._starting = False
        self._closed = False
        self.bytes_ahead = 0
        """Held by steps that nobody wants yet."""
        self.bytes_ahead_peak = 0
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True) for n in range(workers)]
        for thread in self._threads:
            thread.start()

    def add(self, step: int, jobs: Sequence[Job[U]]) -> list[Future[U]]:
        """Queues the jobs of a step; their results, in the same order. Returns at once."""
        futures: list[Future[U]] = [Future() for _ in jobs]
        with self._changed:
            assert not self._closed
            self._steps.setdefault(step, _Step())
            for number, (job, future) in enumerate(zip(jobs, futures, strict=True)):
                heapq.heappush(self._queue, _Queued(step, number, job, future))
            self._changed.notify_all()
        return futures

    def want(self, step: int) -> None:
        """Somebody waits for ``step`` now: it and the steps before it are no longer held back or counted."""
        with self._changed:
            for number, held in self._steps.items():
                if number <= step and not held.wanted:
                    held.wanted = True
                    self.bytes_ahead -= held.bytes_held
            self._changed.notify_all()

    def release(self, step: int) -> None:
        """Forgets a step; what of it has not begun is cancelled."""
        with self._changed:
            for queued in [q for q in self._queue if q.step == step]:
                queued.future.cancel()
            self._queue = [q for q in self._queue if q.step != step]
            heapq.heapify(self._queue)
            held = self._steps.pop(step, None)
            if held is not None and not held.wanted:
                self.bytes_ahead -= held.bytes_held
            self._changed.notify_all()

    def spent_s(self, step: int) -> float:
        """Seconds in which jobs of a step were under way, so far."""
        with self._changed:
            clock = self._steps[step].clock
            return clock.spent_s + (self._now() - clock.since if clock.active else 0.0)

    def stop(self) -> None:
        """Cancels what has not begun. Returns at once."""
        with self._changed:
            self._closed = True
            for queued in self._queue:
                queued.future.cancel()
            self._queue.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """``stop``, and waits for what is under way: end its reads first."""
        self.stop()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (queued := self._next()) is not None:
            self._finish(queued)
            del queued  # its result must not wait for the next job

    def _finish(self, queued: _Queued[U]) -> None:
        try:
            result = queued.job.finish()
        except Exception as e:  # noqa: BLE001 - carried to whoever waits for the future
            self._ended(queued, failed=True)
            queued.future.set_exception(e)
        else:
            self._ended(queued, failed=False)
            queued.future.set_result(result)

    def _next(self) -> _Queued[U] | None:
        """The next job, started; None: stop. One thread at a time prepares and starts, so that jobs start in order."""
        with self._changed:
            self._changed.wait_for(lambda: not self._starting)
            self._starting = True
        try:
            while True:
                queued = self._admitted()
                if queued is None:
                    return None
                if self._started(queued):
                    return queued
        finally:
            with self._changed:
                self._starting = False
                self._changed.notify_all()

    def _admitted(self) -> _Queued[U] | None:
        """The first job of the queue, if there is room for it; prepares those whose size is not known. Waits."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._may_go_on())
                if self._closed:
                    return None
                first = self._queue[0]
                if first.room is not None:
                    heapq.heappop(self._queue)
                    if first.future.set_running_or_notify_cancel():
                        self._hold(first)
                        return first
                    continue
            room = self._prepared(first)
            with self._changed:
                first.room = room

    def _may_go_on(self) -> bool:
        if not self._queue:
            return False
        first = self._queue[0]
        if first.room is None or self._steps[first.step].wanted:
            return True
        return self.bytes_ahead == 0 or self.bytes_ahead + sum(first.room) <= self._bytes_max

    def _prepared(self, queued: _Queued[U]) -> Room:
        try:
            return queued.job.prepare()
        except Exception as e:  # noqa: BLE001 - carried to whoever waits for the future
            with self._changed:
                if queued in self._queue:
                    self._queue.remove(queued)
                    heapq.heapify(self._queue)
            _fail(queued.future, e)
            return Room(0, 0)

    def _started(self, queued: _Queued[U]) -> bool:
        try:
            queued.job.start()
        except Exception as e:  # noqa: BLE001 - carried to whoever waits for the future
            self._ended(queued, failed=True)
            queued.future.set_exception(e)
            return False
        return True

    def _hold(self, queued: _Queued[U]) -> None:
        """Under the lock."""
        assert queued.room is not None
        held = self._steps[queued.step]
        self._charge(held, sum(queued.room))
        if held.clock.active == 0:
            held.clock.since = self._now()
        held.clock.active += 1

    def _charge(self, step: _Step, more: int) -> None:
        """Under the lock."""
        step.bytes_held += more
        if not step.wanted:
            self.bytes_ahead += more
            self.bytes_ahead_peak = max(self.bytes_ahead_peak, self.bytes_ahead)
            self._changed.notify_all()

    def _ended(self, queued: _Queued[U], *, failed: bool) -> None:
        assert queued.room is not None
        with self._changed:
            step = self._steps.get(queued.step)
            if step is None:
                return  # released meanwhile
            step.clock.active -= 1
            if step.clock.active == 0:
                step.clock.spent_s += self._now() - step.clock.since
            self._charge(step, -queued.room.passing - failed * queued.room.held)


def _fail(future: "Future[U]", error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
