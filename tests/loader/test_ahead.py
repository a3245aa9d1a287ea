"""Work of steps ahead, with jobs that do only what the test lets them: order, room, clocks."""

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Literal

import pytest

from fsref.loader.ahead import Ahead, Room

DEADLINE_S = 60.0
Phase = Literal["prepare", "start", "finish"]


class Trail:
    """What happened, in order; a test can wait for it."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._changed = threading.Condition()

    def add(self, event: str) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait(self, *events: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: set(events) <= set(self.events), DEADLINE_S), (events, self.events)

    def of(self, word: str) -> list[str]:
        with self._changed:
            return [e.removeprefix(f"{word} ") for e in self.events if e.startswith(word)]


class FakeJob:
    """A job that stops at chosen phases until it is let go, and fails at chosen ones."""

    def __init__(
        self, trail: Trail, name: str, *, size: int = 1, passing: int = 0, hold: set[Phase] | None = None, fail: Phase | None = None
    ) -> None:
        self.trail, self.name, self.size, self.passing, self.fail = trail, name, size, passing, fail
        self.gates = {phase: threading.Event() for phase in hold or set()}

    def _pass(self, phase: Phase) -> None:
        self.trail.add(f"{phase} {self.name}")
        if phase in self.gates:
            assert self.gates[phase].wait(DEADLINE_S)
        if self.fail == phase:
            raise ValueError(f"{self.name} failed in {phase}")

    def prepare(self) -> Room:
        self._pass("prepare")
        return Room(held=self.size, passing=self.passing)

    def start(self) -> None:
        self._pass("start")

    def finish(self) -> str:
        self._pass("finish")
        return self.name


Begin = Callable[..., "Ahead[str]"]


@pytest.fixture
def trail() -> Trail:
    return Trail()


@pytest.fixture
def begin() -> Iterator[Begin]:
    made: list[Ahead[str]] = []

    def one(*, workers: int = 2, bytes_max: int = 100, now: Callable[[], float] = lambda: 0.0) -> Ahead[str]:
        made.append(Ahead(workers=workers, bytes_max=bytes_max, name="test", now=now))
        return made[-1]

    yield one
    for ahead in made:
        ahead.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("test-")]


def results(futures: list[Future[str]]) -> list[str]:
    return [f.result(DEADLINE_S) for f in futures]


def test_jobs_start_by_step_and_number_whatever_was_added_first(begin: Begin, trail: Trail) -> None:
    ahead = begin()
    first = FakeJob(trail, "0.0", hold={"prepare"})
    ahead.add(0, [first])
    trail.wait("prepare 0.0")
    later = ahead.add(2, [FakeJob(trail, f"2.{n}") for n in range(2)])
    earlier = ahead.add(1, [FakeJob(trail, f"1.{n}") for n in range(3)])
    first.gates["prepare"].set()
    assert results(earlier) == ["1.0", "1.1", "1.2"]
    assert results(later) == ["2.0", "2.1"]
    assert trail.of("start") == ["0.0", "1.0", "1.1", "1.2", "2.0", "2.1"]


def test_no_read_of_the_next_step_starts_while_one_of_this_step_is_still_being_planned(begin: Begin, trail: Trail) -> None:
    ahead = begin(workers=3)
    slow = FakeJob(trail, "1.1", hold={"prepare"})
    ahead.add(1, [FakeJob(trail, "1.0"), slow])
    ahead.add(2, [FakeJob(trail, "2.0")])
    trail.wait("prepare 1.1", "finish 1.0")
    assert trail.of("start") == ["1.0"]
    slow.gates["prepare"].set()
    trail.wait("finish 2.0")
    assert trail.of("start") == ["1.0", "1.1", "2.0"]


def test_the_next_step_is_fetched_while_this_one_is_still_under_way(begin: Begin, trail: Trail) -> None:
    ahead = begin()
    stuck = FakeJob(trail, "1.0", hold={"finish"})
    ahead.add(1, [stuck])
    ahead.want(1)
    assert results(ahead.add(2, [FakeJob(trail, f"2.{n}") for n in range(3)])) == ["2.0", "2.1", "2.2"]
    stuck.gates["finish"].set()


def test_what_is_fetched_and_not_taken_still_counts(begin: Begin, trail: Trail) -> None:
    ahead = begin()
    futures = ahead.add(1, [FakeJob(trail, f"1.{n}", size=40) for n in range(4)])
    assert results(futures[:2]) == ["1.0", "1.1"]
    trail.wait("prepare 1.2")
    assert ahead.bytes_ahead == 80
    assert not futures[2].done()
    assert trail.of("start") == ["1.0", "1.1"]
    ahead.want(1)
    assert results(futures) == ["1.0", "1.1", "1.2", "1.3"]
    assert (ahead.bytes_ahead, ahead.bytes_ahead_peak) == (0, 80)


def test_a_step_that_is_wanted_is_not_held_back_by_what_is_ahead_of_it(begin: Begin, trail: Trail) -> None:
    ahead = begin()
    assert results(ahead.add(2, [FakeJob(trail, "2.0", size=100)])) == ["2.0"]
    waiting = ahead.add(3, [FakeJob(trail, "3.0", size=100)])
    trail.wait("prepare 3.0")
    now = ahead.add(1, [FakeJob(trail, f"1.{n}", size=70) for n in range(3)])
    ahead.want(1)
    assert results(now) == ["1.0", "1.1", "1.2"]
    assert not waiting[0].done()
    ahead.want(2)
    assert results(waiting) == ["3.0"]
    assert ahead.bytes_ahead_peak == 100


def test_a_job_larger_than_all_room_is_started_alone(begin: Begin, trail: Trail) -> None:
    ahead = begin()
    futures = ahead.add(1, [FakeJob(trail, "1.0", size=500), FakeJob(trail, "1.1", size=1)])
    assert results(futures[:1]) == ["1.0"]
    trail.wait("prepare 1.1")
    assert trail.of("start") == ["1.0"]
    ahead.want(1)
    assert results(futures[1:]) == ["1.1"]


def test_bytes_that_only_pass_through_count_while_the_job_is_under_way(begin: Begin, trail: Trail) -> None:
    ahead = begin()
    first = FakeJob(trail, "1.0", size=30, passing=50, hold={"finish"})
    futures = ahead.add(1, [first, FakeJob(trail, "1.1", size=30, passing=40)])
    trail.wait("finish 1.0", "prepare 1.1")
    assert (ahead.bytes_ahead, trail.of("start")) == (80, ["1.0"])
    first.gates["finish"].set()
    assert results(futures) == ["1.0", "1.1"]
    assert (ahead.bytes_ahead, ahead.bytes_ahead_peak) == (60, 100)


def test_a_released_step_makes_room_and_its_queued_jobs_never_start(begin: Begin, trail: Trail) -> None:
    ahead = begin()
    first = ahead.add(1, [FakeJob(trail, "1.0", size=100), FakeJob(trail, "1.1", size=100)])
    assert results(first[:1]) == ["1.0"]
    trail.wait("prepare 1.1")
    second = ahead.add(2, [FakeJob(trail, "2.0", size=100)])
    ahead.release(1)
    assert results(second) == ["2.0"]
    with pytest.raises(CancelledError):
        first[1].result(DEADLINE_S)
    assert trail.of("start") == ["1.0", "2.0"]
    assert ahead.bytes_ahead == 100


@pytest.mark.parametrize("phase", ["prepare", "start", "finish"])
def test_a_job_that_fails_is_its_futures_error_and_holds_nothing(begin: Begin, trail: Trail, phase: Phase) -> None:
    ahead = begin()
    futures = ahead.add(1, [FakeJob(trail, "1.0", size=90, fail=phase), FakeJob(trail, "1.1", size=90)])
    with pytest.raises(ValueError, match=f"failed in {phase}"):
        futures[0].result(DEADLINE_S)
    assert futures[1].result(DEADLINE_S) == "1.1"
    assert ahead.bytes_ahead == 90


def test_a_steps_clock_runs_while_any_of_its_jobs_is_under_way_and_not_while_it_waits_for_room(begin: Begin, trail: Trail) -> None:
    clock = [0.0]
    ahead = begin(now=lambda: clock[0])
    a, b = (FakeJob(trail, f"1.{n}", size=50, hold={"finish"}) for n in range(2))
    last = FakeJob(trail, "1.2", size=50, hold={"finish"})
    futures = ahead.add(1, [a, b, last])
    trail.wait("finish 1.0", "finish 1.1")
    clock[0] = 3.0
    a.gates["finish"].set()
    assert futures[0].result(DEADLINE_S) == "1.0"
    clock[0] = 5.0
    assert ahead.spent_s(1) == 5.0
    b.gates["finish"].set()
    assert futures[1].result(DEADLINE_S) == "1.1"
    clock[0] = 105.0  # nothing is under way: there is no room
    ahead.want(1)
    trail.wait("finish 1.2")
    clock[0] = 107.0
    last.gates["finish"].set()
    assert futures[2].result(DEADLINE_S) == "1.2"
    assert ahead.spent_s(1) == 7.0


def test_closing_cancels_what_has_not_begun_and_waits_for_what_has(begin: Begin, trail: Trail) -> None:
    ahead = begin(workers=1)
    running = FakeJob(trail, "1.0", hold={"finish"})
    futures = ahead.add(1, [running, FakeJob(trail, "1.1")])
    trail.wait("finish 1.0")
    ahead.stop()
    running.gates["finish"].set()
    ahead.close()
    assert futures[0].result(0) == "1.0"
    assert futures[1].cancelled()


def test_a_result_is_kept_by_its_future_alone(begin: Begin) -> None:
    class Made(str): ...

    class Maker:
        def prepare(self) -> Room:
            return Room(1, 1)

        def start(self) -> None: ...

        def finish(self) -> str:
            made = Made("x")
            weakref.finalize(made, gone.set)
            return made

    gone = threading.Event()
    futures = begin().add(1, [Maker()])
    assert results(futures) == ["x"]
    assert not gone.is_set()
    del futures
    assert gone.wait(DEADLINE_S)
