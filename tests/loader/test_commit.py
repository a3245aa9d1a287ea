"""Drops are durable before removals, and done only when everything is gone."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from fsref.config import ParallelSection, TrainerSection
from fsref.errors import JournalPoisoned, StoreDenied, StoreError
from fsref.loader.commit import Committer
from fsref.loader.ranks import Place, Ranks
from fsref.parallel import Parallel
from fsref.refs import object_name
from fsref.steps import StepInfo, read_info, read_rank
from fsref.store import Deletion, Store
from tests.trainer.runs import SmallRun


class Recorded:
    """A ledger that notes the order of calls and what was present at each."""

    def __init__(self, run: SmallRun, *, broken: bool = False) -> None:
        self.calls: list[tuple[str, int, int, int]] = []
        self.absent: list[str] = []
        self._run, self._broken = run, broken

    def taken(self, info: StepInfo) -> None: ...

    def used(self, step: int, miss: Mapping[str, str]) -> None: ...

    def drop_steps(self, lo: int, hi: int) -> None:
        if self._broken:
            raise JournalPoisoned("the disk is gone")
        self.calls.append(("drop", lo, hi, len(self._run.present())))

    def done_steps(self, lo: int, hi: int, *, absent: Sequence[str]) -> None:
        self.calls.append(("done", lo, hi, len(self._run.present())))
        self.absent += absent


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallRun]:
    run = SmallRun(tmp_path)
    for step in range(2):
        run.publish_step(step)
    yield run
    run.close()


def committer(run: SmallRun, ledger: Recorded, *, store: Store | None = None, policy: str = "checkpoint") -> Committer:
    section = TrainerSection(parallel=ParallelSection(data=1), commit=policy)  # type: ignore[arg-type]
    made = Committer(Ranks(Parallel(), Place()), store or run.store, ledger, section)
    for step in range(2):
        made.fetched(read_rank(run.store, read_info(run.store, step), 0))
    return made


@pytest.mark.payload("F12")
def test_the_drop_is_recorded_while_everything_is_present_and_done_when_nothing_is(small: SmallRun) -> None:
    ledger = Recorded(small)
    with committer(small, ledger) as commit:
        commit.after_checkpoint(2)
        removed = commit.settle(wait=True)
    assert ledger.calls == [("drop", 0, 1, 8), ("done", 0, 1, 0)]
    assert (removed.objects, removed.bytes, removed.pending) == (8, small.bytes_shipped, 0)


@pytest.mark.fault(25)
def test_a_step_is_dropped_once(small: SmallRun) -> None:
    ledger = Recorded(small)
    with committer(small, ledger) as commit:
        commit.after_checkpoint(1)
        commit.after_checkpoint(1)
        commit.finish(1)
        commit.settle(wait=True)
    assert [c[:3] for c in ledger.calls] == [("drop", 0, 0), ("drop", 1, 1), ("done", 0, 0), ("done", 1, 1)]


def test_an_object_that_was_gone_already_is_reported_as_absent(small: SmallRun) -> None:
    ledger = Recorded(small)
    lost = small.objects[0][0][0]
    small.lose(lost)
    with committer(small, ledger) as commit:
        commit.finish(1)
        assert commit.settle(wait=True).absent == 1
    assert ledger.absent == [lost]


class Stubborn:
    """A store that refuses to remove one name."""

    bulk_delete_max = 1

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name, self.url = store, name, store.url

    def delete(self, names: Sequence[str]) -> dict[str, Deletion | StoreError]:
        return self._store.delete([n for n in names if n != self._name]) | {
            n: StoreDenied(f"{n} may not be removed") for n in names if n == self._name
        }


def test_what_could_not_be_removed_is_never_called_done(small: SmallRun, caplog: pytest.LogCaptureFixture) -> None:
    ledger = Recorded(small)
    stubborn = Stubborn(small.store, object_name(small.objects[1][0][0]))
    commit = committer(small, ledger, store=stubborn)  # type: ignore[arg-type]
    commit._stop.set()  # no second attempt
    with commit:
        commit.finish(1)
        removed = commit.settle(wait=True)
    assert (removed.objects, removed.failed) == (7, 1)
    assert [c[0] for c in ledger.calls] == ["drop"]
    assert "is not removed yet" in caplog.text


def test_nothing_is_removed_if_the_drop_could_not_be_recorded(small: SmallRun) -> None:
    with committer(small, Recorded(small, broken=True)) as commit, pytest.raises(JournalPoisoned):
        commit.finish(1)
    assert len(small.present()) == 8
