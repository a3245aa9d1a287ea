"""An orchestrator that follows one that died, while env servers and trainer live on."""

import itertools
from pathlib import Path

import msgspec
import pytest

from fsref.errors import LedgerError, RunBusy
from fsref.journal.file import Journal
from fsref.journal.identity import mint
from fsref.journal.markers import read_adopted
from fsref.reaper import EnvHolder, StepHolder, Verdict, close_run, recover, succession
from fsref.reaper.delete import delete_objects
from fsref.reaper.deleter import Deleter
from fsref.steps import info_name
from tests.reaper.cuts import Cutter, Killed
from tests.reaper.stage import FaultyStore, Stage


def publish(stage: Stage, step: int) -> None:
    stage.store.put(info_name(step), [msgspec.json.encode(stage.info(step))])


def left_by_the_first(stage: Stage) -> tuple[EnvHolder, StepHolder]:
    """Something of each kind, and the orchestrator is killed; env worker and trainer live."""
    env, trn, orc = stage.env(), stage.trn(), stage.orc()
    ids = {name: stage.reply(env, orc, 2) for name in ("used", "visible", "invisible", "held", "dropped")}
    trn.taken(stage.ship(orc, 0, ids["used"]))
    publish(stage, 0)
    stage.ship(orc, 1, ids["visible"])
    publish(stage, 1)
    stage.ship(orc, 2, ids["invisible"])
    orc._deleter.put = lambda *_, **__: None  # type: ignore[method-assign]  # it dies before it removes
    orc.drop(ids["dropped"], "stale")
    dead = stage.env("math-1-0")
    stage.put(dead, 2)
    stage.kill(dead)
    orc.adopt(dead.inc)  # its orphans are dropped, and not removed either
    stage.kill(orc)
    return env, trn


@pytest.mark.fault(7)
@pytest.mark.fault(60)
def test_a_new_orchestrator_settles_what_a_dead_one_left_and_leaves_its_steps_alone(stage: Stage) -> None:
    env, trn = left_by_the_first(stage)
    orc = stage.orc()
    assert (len(orc.inherited.adopted), len(orc.inherited.recovered), len(orc.inherited.redo)) == (1, 4, 4)
    assert orc.flush() == 0
    held = stage.objects()
    assert len(held) == 4, "the two visible steps, and nothing else"
    trn.used(0)
    trn.taken(stage.info(1))
    trn.used(1)
    trn.taken(stage.ship(orc, 2, stage.reply(env, orc)))
    trn.used(2)
    stage.commit(trn, 0, 2)
    for holder in (orc, trn, env):
        holder.close()
    found = stage.audit()
    assert found.verdict is Verdict.PROVED, found.render()
    assert found.totals.dropped_by == {"trained": 5, "recovered": 4, "stale": 2, "orphan": 2}
    assert stage.objects() == []


@pytest.mark.fault(60)
def test_an_orchestrator_that_closed_with_removals_pending_is_followed_too(stage: Stage) -> None:
    env, orc = stage.env(), stage.orc()
    found = stage.reply(env, orc, 2)
    stage.store.delete_failures = 1_000_000
    orc.drop(found, "stale")
    assert orc.close(deadline_s=0.0) == 2
    stage.store.delete_failures = 0
    with stage.orc() as second:
        assert second.flush() == 0
    env.close()
    assert (stage.audit().verdict, stage.objects()) == (Verdict.PROVED, [])


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_succession_can_be_killed_anywhere(tmp_path: Path, after: bool) -> None:
    for at in itertools.count(1):
        stage = Stage(tmp_path / str(at))
        env, trn = left_by_the_first(stage)
        cutter = Cutter(at, after=after)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Deleter, "put", cutter.wrap(lambda *_, **__: None))
            patch.setattr(Journal, "append", cutter.wrap(Journal.append))
            for name in ("fence", "sync_journal"):
                patch.setattr(succession, name, cutter.wrap(getattr(succession, name)))
            journals: list[Journal] = []
            init = Journal.__init__

            def remembered(journal: Journal, *args: object, _init: object = init, _all: list[Journal] = journals, **kwargs: object) -> None:
                _all.append(journal)
                _init(journal, *args, **kwargs)  # type: ignore[operator]

            patch.setattr(Journal, "__init__", remembered)
            try:
                stage.kill(stage.orc())
                cut = False
            except Killed:
                cut = True
                journals[0].close()  # its lock goes with it
        with stage.orc() as orc:
            trn.taken(stage.info(1))
            for step in (0, 1):
                trn.used(step)
            trn.drop_steps(0, 1)
            outcome = delete_objects(stage.store, [*stage.batches[0], *stage.batches[1]])
            assert not outcome.absent, (at, "the steps of a live trainer were touched")
            trn.done_steps(0, 1)
            assert orc.flush() == 0
        trn.close()
        env.close()
        found = close_run(stage.store, stage.ledger, run=stage.run)
        assert (found.verdict, stage.objects()) == (Verdict.PROVED, []), (at, found.render())
        assert found.totals.dropped_by["recovered"] == 4, at
        stage.store.close()
        if not cut:
            assert at > 5, "fewer operations than a succession has: the test cuts nothing"
            return


def test_a_fence_that_the_orchestrator_before_put_up_without_its_record_is_taken_over(stage: Stage) -> None:
    dead, orc = stage.env(), stage.orc()
    stage.put(dead, 2)
    stage.kill(dead)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FaultyStore, "list", Cutter(1, after=True).wrap(FaultyStore.list))
        with pytest.raises(Killed):
            orc.adopt(dead.inc)
    assert read_adopted(stage.place, dead.inc) == orc.inc
    stage.kill(orc)
    with stage.orc() as second:
        assert second.dead_incarnations() == [dead.inc]
        assert second.adopt(dead.inc).orphans == 2
        assert second.dead_incarnations() == []
    assert stage.audit().verdict is Verdict.PROVED


def test_what_another_consumer_took_of_a_dead_replica_is_not_its_orphan(stage: Stage) -> None:
    env, first, evl = stage.env(), stage.orc(), stage.orc("evl")
    step, seen = stage.reply(env, first, 2), stage.reply(env, evl)
    evl.drop(seen, "eval")
    assert evl.flush() == 0
    stage.ship(first, 0, step)
    publish(stage, 0)
    stage.kill(first)
    stage.kill(env)
    with stage.orc() as second:
        done = second.adopt(env.inc)
        assert (done.orphans, done.lost) == (0, 0)
        assert len(stage.objects()) == 2, "the step's arrays stay for the trainer"
    evl.close()
    recover(stage.store, stage.ledger, run=stage.run, resume_step=None)
    assert (stage.audit().verdict, stage.objects()) == (Verdict.PROVED, [])


def test_a_replica_that_closed_is_adopted_while_the_run_goes_on(stage: Stage) -> None:
    env, orc = stage.env(), stage.orc()
    env.sent("lost", stage.put(env, 2))
    assert orc.dead_incarnations() == []
    env.close()
    assert orc.dead_incarnations() == [env.inc]
    assert orc.adopt(env.inc).orphans == 2
    orc.close()
    assert stage.audit().verdict is Verdict.PROVED


@pytest.mark.fault(60)
def test_an_orchestrator_waits_for_nobody_who_may_be_alive(stage: Stage) -> None:
    with stage.orc() as orc, pytest.raises(RunBusy, match=orc.inc):
        stage.orc()
    with Journal(stage.place, mint("rec", "main"), run_uuid=stage.run.run_uuid) as rec, pytest.raises(RunBusy, match=rec.inc):
        stage.orc()
    with pytest.raises(LedgerError, match="in the middle of a recovery"):
        stage.orc()
