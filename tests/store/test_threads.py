"""Threads that may hang: bounded, replaced, and never waited for without a deadline."""

import threading
import weakref
from concurrent.futures import wait

import pytest

from fsref.errors import StoreUnavailable
from fsref.store import threads
from fsref.store.threads import Threads


def test_work_runs_on_at_most_the_given_threads_and_errors_reach_the_future() -> None:
    pool = Threads(2, name="t")
    names: set[str] = set()
    both = threading.Barrier(2, timeout=30)

    def work() -> None:
        names.add(threading.current_thread().name)
        both.wait()

    def fails() -> None:
        raise KeyError("mine")

    futures = [pool.submit(work) for _ in range(20)]
    assert wait(futures, 60).not_done == set()
    assert len(names) == 2
    assert isinstance(pool.submit(fails).exception(30), KeyError)
    assert pool.close(deadline_s=30) == 0
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(work)


def test_a_stuck_thread_is_replaced_up_to_a_limit_and_what_it_says_later_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "ABANDONED_MAX", 2)
    pool = Threads(1, name="t")
    go = threading.Event()
    entered = threading.Semaphore(0)

    def hang() -> None:
        entered.release()
        go.wait(60)

    stuck = []
    for _ in range(2):
        stuck.append(pool.submit(hang))
        assert entered.acquire(timeout=30)
        assert pool.abandon([stuck[-1]], "too late") == 1
    pool.submit(lambda: None).result(30)  # by the second replacement
    last = pool.submit(hang)
    assert entered.acquire(timeout=30)
    assert pool.abandon([last], "too late") == 0  # the limit
    waiting = pool.submit(lambda: None)
    assert pool.abandon([waiting], "too late") == 0
    assert waiting.cancelled()
    assert pool.abandoned == 2
    go.set()
    for future in (*stuck, last):
        assert isinstance(future.exception(30), StoreUnavailable)
    pool.submit(lambda: None).result(30)  # the last one came back and goes on
    assert pool.close(deadline_s=30) == 0


def test_work_of_lower_priority_numbers_goes_first_and_equals_keep_their_order() -> None:
    pool = Threads(1, name="x")
    begun, go = threading.Event(), threading.Event()
    order: list[tuple[int, int]] = []
    futures = [pool.submit(lambda: (begun.set(), go.wait(30)))]  # type: ignore[arg-type, func-returns-value]
    assert begun.wait(30)
    for number, priority in enumerate([2, 1, 2, 0, 1, 0]):
        futures.append(pool.submit(lambda p=priority, n=number: order.append((p, n)), priority=priority))  # type: ignore[misc]
    go.set()
    wait(futures, 30)
    assert order == [(0, 3), (0, 5), (1, 1), (1, 4), (2, 0), (2, 2)]
    assert pool.close(deadline_s=30) == 0


def test_an_idle_thread_keeps_nothing_of_its_last_work() -> None:
    class Memory:
        def __call__(self) -> None: ...

    pool = Threads(1, name="x")
    memory = Memory()
    gone = threading.Event()
    weakref.finalize(memory, gone.set)
    wait([pool.submit(memory)], 30)
    del memory
    assert gone.wait(30)
    assert pool.close(deadline_s=30) == 0
