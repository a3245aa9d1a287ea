"""All or nothing, whoever gives up and when."""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor

import numpy as np
import pytest

from fsref.envserver.keep import KeepJob
from fsref.episodes.branches import Branch
from fsref.errors import PayloadError, StoreFull
from fsref.refs import Payload, PayloadRef, Segment

INC = "env.test.0123456789abcdef"


class Ledger:
    def __init__(self) -> None:
        self.discarded: list[tuple[tuple[str, ...], str]] = []

    def discard(self, object_ids: Iterable[str], reason: str = "never_sent") -> int:
        ids = tuple(object_ids)
        if ids:
            self.discarded.append((ids, reason))
        return len(ids)


class Writer:
    """Puts count up; put number ``fails_at`` raises, and ``hold`` keeps puts waiting."""

    def __init__(self, fails_at: int = -1, error: Exception | None = None) -> None:
        self.puts, self.fails_at, self.error = 0, fails_at, error
        self.entered, self.hold = threading.Event(), threading.Event()
        self.hold.set()

    def put(self, payload: Payload, *, stop: threading.Event) -> PayloadRef:
        del stop
        self.entered.set()
        assert self.hold.wait(20)
        number, self.puts = self.puts, self.puts + 1
        if number == self.fails_at and self.error is not None:
            raise self.error
        segment = Segment(f"{INC}/{number}", 100, 0, payload.token_count, 0, b"")
        return PayloadRef(b"12345678", payload.token_count, b"12345678", payload.token_count, (segment,))


def branches(count: int) -> Iterator[tuple[Branch, Payload]]:
    for n in range(count):
        ids = np.asarray([1, 2, 3], np.int32)
        flags = np.asarray([False, True, True])
        yield Branch("t", n, ids, flags, flags, np.zeros(3, np.float32), ()), Payload(ids, {})


def job(ledger: Ledger, writer: Writer, count: int = 3) -> KeepJob:
    return KeepJob(lambda: branches(count), writer, ledger)


def test_every_branch_is_put() -> None:
    ledger = Ledger()
    kept = job(ledger, Writer()).run()
    assert [ref.object_ids for ref in kept.values()] == [(f"{INC}/{n}",) for n in range(3)]
    assert list(kept) == [("t", 0), ("t", 1), ("t", 2)]
    assert ledger.discarded == []


@pytest.mark.parametrize("error", [StoreFull("no space"), PayloadError("field 'x': wrong")])
@pytest.mark.payload("F22")
def test_a_put_that_fails_discards_the_ones_before_and_names_its_branch(error: Exception) -> None:
    ledger = Ledger()
    with pytest.raises(type(error), match=f"branch t/2: {error}"):
        job(ledger, Writer(fails_at=2, error=error)).run()
    assert ledger.discarded == [((f"{INC}/0", f"{INC}/1"), "encode_error")]


def test_a_failed_first_put_leaves_nothing_to_discard() -> None:
    ledger = Ledger()
    with pytest.raises(StoreFull):
        job(ledger, Writer(fails_at=0, error=StoreFull("x"))).run()
    assert ledger.discarded == []


def test_branches_that_cannot_be_built_discard_the_ones_before() -> None:
    def broken() -> Iterator[tuple[Branch, Payload]]:
        yield from branches(1)
        raise PayloadError("branch t/1: field 'x' is missing")

    ledger = Ledger()
    with pytest.raises(PayloadError, match="branch t/1"):
        KeepJob(broken, Writer(), ledger).run()
    assert ledger.discarded == [((f"{INC}/0",), "encode_error")]


def test_giving_up_a_kept_episode_discards_it_at_once() -> None:
    ledger = Ledger()
    done = job(ledger, Writer())
    done.run()
    done.give_up()
    assert ledger.discarded == [((f"{INC}/0", f"{INC}/1", f"{INC}/2"), "never_sent")]


@pytest.mark.payload("F22")
def test_giving_up_while_a_put_runs_does_not_wait_and_the_thread_discards() -> None:
    ledger, writer = Ledger(), Writer()
    writer.hold.clear()
    running = job(ledger, writer)
    with ThreadPoolExecutor(1) as pool:
        future = running.start(pool)
        assert writer.entered.wait(20)
        running.give_up()
        assert ledger.discarded == []
        writer.hold.set()
        with pytest.raises(CancelledError):
            future.result(20)
    assert ledger.discarded == [((f"{INC}/0",), "never_sent")]
    assert writer.puts == 1


def test_giving_up_before_the_start_puts_nothing() -> None:
    ledger, writer = Ledger(), Writer()
    early = job(ledger, writer)
    early.give_up()
    with pytest.raises(CancelledError):
        early.run()
    assert (writer.puts, ledger.discarded) == (0, [])


def test_what_breaks_after_giving_up_is_no_failure_of_the_episode() -> None:
    """The trace's arrays are freed as soon as the request ends, so a thread that goes on finds none."""
    ledger = Ledger()

    def freed() -> Iterator[tuple[Branch, Payload]]:
        yield from branches(1)
        late.give_up()
        raise PayloadError("branch t/1: field 'x' is missing")

    late = KeepJob(freed, Writer(), ledger)
    with pytest.raises(PayloadError):
        late.run()
    assert ledger.discarded == [((f"{INC}/0",), "never_sent")]
