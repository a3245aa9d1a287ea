"""Recovery that is cut off before or after each of its operations, one after the other: running it again always ends PROVED."""

import itertools
import random
from pathlib import Path

import pytest

from fsref.journal import write_dead
from fsref.journal.file import Journal
from fsref.journal.markers import read_adopted
from fsref.reaper import Verdict, adopt, close_run, recover, recovery, step
from fsref.reaper.adopt import fence
from fsref.reaper.deleter import Deleter
from fsref.refs import object_name
from tests.reaper.cuts import Cutter, Killed, crashed
from tests.reaper.stage import FaultyStore, Stage


def crashed_run(root: Path) -> Stage:
    """A run whose every process was killed, with something of each kind left, half an object too."""
    stage = crashed(Stage(root))
    folder = object_name(stage.batches[0][0]).rpartition("/")[0]
    stage.store.put(f"{folder}/.0000000099.tmp", [b"half"])
    return stage


def cut_recovery(stage: Stage, cutter: Cutter) -> bool:
    """Whether the recovery was cut."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (Journal, "append"),
            (Journal, "sync"),
            (FaultyStore, "delete"),
            (FaultyStore, "list"),
        ):
            patch.setattr(owner, name, cutter.wrap(getattr(owner, name)))
        for name in ("fence", "acquire_lock", "release_lock", "sync_journal"):
            patch.setattr(recovery, name, cutter.wrap(getattr(recovery, name)))
        try:
            recover(stage.store, stage.ledger, run=stage.run, resume_step=None)
        except Killed:
            return True
    return False


@pytest.mark.fault(8)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_recovery_can_be_killed_anywhere(tmp_path: Path, after: bool) -> None:
    for at in itertools.count(1):
        stage = crashed_run(tmp_path / str(at))
        cut = cut_recovery(stage, Cutter(at, after=after))
        found = close_run(stage.store, stage.ledger, run=stage.run)
        assert found.verdict is Verdict.PROVED, (at, found.render())
        assert found.totals.dropped_by == {"trained": 2, "recovered": 2, "unjournaled": 1}, at
        assert stage.objects() == [], at
        stage.store.close()
        if not cut:
            assert at > 15, "fewer operations than a recovery has: the test cuts nothing"
            return


@pytest.mark.fault(8)
@pytest.mark.parametrize("seed", range(4))
def test_recovery_can_be_killed_again_and_again(tmp_path: Path, seed: int) -> None:
    stage = crashed_run(tmp_path)
    rng = random.Random(seed)
    for _ in range(12):
        cut_recovery(stage, Cutter(rng.randrange(1, 24), after=rng.random() < 0.5))
    found = close_run(stage.store, stage.ledger, run=stage.run)
    assert (found.verdict, found.violations) == (Verdict.PROVED, ())
    assert stage.objects() == []
    stage.store.close()


@pytest.mark.fault(8)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_live_adoption_can_be_killed_anywhere(tmp_path: Path, after: bool) -> None:
    for at in itertools.count(1):
        stage = Stage(tmp_path / str(at))
        env, orc = stage.env(), stage.orc()
        kept = stage.put(env, 3)
        stage.reply(env, orc)
        stage.put(env, 1, keep=False)
        env.discard(kept[:1])
        stage.kill(env)
        cutter = Cutter(at, after=after)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Deleter, "put", cutter.wrap(lambda *_, **__: None))  # removals are cut in the simulation
            for owner, name in ((Journal, "append"), (FaultyStore, "delete"), (FaultyStore, "list")):
                patch.setattr(owner, name, cutter.wrap(getattr(owner, name)))
            for name in ("write_adopted", "sync_journal"):
                patch.setattr(adopt, name, cutter.wrap(getattr(adopt, name)))
            try:
                orc.adopt(env.inc)
                cut = False
            except Killed:
                cut = True
        stage.kill(orc)
        found = close_run(stage.store, stage.ledger, run=stage.run)
        assert found.verdict is Verdict.PROVED, (at, found.render())
        assert stage.objects() == [], at
        stage.store.close()
        if not cut:
            assert at > 8, "fewer operations than an adoption has: the test cuts nothing"
            return


@pytest.mark.fault(8)
def test_a_trainer_inherits_the_fence_of_one_that_died_before_its_record(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    first = stage.trn()
    stage.kill(first)
    with monkeypatch.context() as patch:
        patch.setattr(step, "fence", Cutter(1, after=True).wrap(fence))
        with pytest.raises(Killed):
            stage.trn()
    second = read_adopted(stage.place, first.inc)
    assert second is not None
    write_dead(stage.place, second)
    stage.trn().close()
    found = stage.audit()
    assert (found.verdict, found.violations) == (Verdict.PROVED, ())
