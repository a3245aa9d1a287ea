"""As test_crash_points, on a root that is no folder: a recovery or adoption is cut off at each store operation and record, with and without
the loss of the node that it ran on; running it again always ends PROVED."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from fsref.journal import write_dead
from fsref.journal.catalogue import read_catalogue
from fsref.journal.file import Journal, _open_journals
from fsref.journal.place import Ledger
from fsref.reaper import ConsumerHolder, EnvHolder, StepHolder, Verdict, close_run, consumer, holder, recover, recovery
from fsref.reaper.deleter import Deleter
from fsref.refs import object_name
from fsref.store import Capabilities
from tests.reaper.cuts import Cutter, Killed, crashed
from tests.reaper.rootstage import RootStage
from tests.support.faultystore import FaultyStore

OPERATIONS = ((Journal, "append"), (FaultyStore, "put"), (FaultyStore, "open"), (FaultyStore, "delete"), (FaultyStore, "list"))


CUTS = pytest.mark.parametrize(
    ("after", "lost_node"),
    [
        pytest.param(False, False, id="before"),
        pytest.param(True, True, id="after, node lost"),
        pytest.param(True, False, id="after", marks=pytest.mark.slow),
        pytest.param(False, True, id="before, node lost", marks=pytest.mark.slow),
    ],
)


@pytest.fixture(autouse=True)
def _probe_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's probe is cut off in its own tests."""
    good = Capabilities(create_only=True, list_after_write=True, bulk_delete_max=1, delete_works=True, versioning="none")
    monkeypatch.setattr(recovery, "probe", lambda _: good)
    monkeypatch.setattr(holder, "probe_root", lambda _: good)


def cut(cutter: Cutter, act: Callable[[], object]) -> bool:
    """Whether the act was cut off."""
    before = set(_open_journals)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in OPERATIONS:
            patch.setattr(owner, name, cutter.wrap(getattr(owner, name)))
        try:
            act()
        except Killed:
            for journal in set(_open_journals) - before:
                journal.close()  # its lock goes with the process
            return True
    return False


def bury(stage: RootStage, *, lost_node: bool) -> None:
    """What a launcher does for processes that its node took along: their journals are gone, it says that they are dead."""
    if lost_node:
        stage.lose_node()
        for inc in read_catalogue(stage.faulty).segments:
            write_dead(Ledger(None, stage.faulty), inc, by="launcher", why="its node is lost")


@pytest.mark.fault(8)
@pytest.mark.fault(13)
@CUTS
def test_recovery_over_objects_can_be_killed_anywhere(tmp_path: Path, after: bool, lost_node: bool) -> None:
    for at in itertools.count(1):
        stage = crashed(RootStage(tmp_path / str(at)))
        was_cut = cut(Cutter(at, after=after), partial(recover, stage.store, stage.ledger, run=stage.run, resume_step=None))
        bury(stage, lost_node=lost_node)
        found = close_run(stage.store, stage.ledger, run=stage.run)
        assert (found.verdict, stage.objects()) == (Verdict.PROVED, []), (at, found.render())
        assert found.totals.dropped_by["trained"] == 2, at
        assert stage.audit_elsewhere().verdict is Verdict.PROVED, at
        stage.faulty.close()
        if not was_cut:
            assert at > 40, "fewer operations than a recovery has: the test cuts nothing"
            return


@pytest.mark.fault(13)
@CUTS
def test_a_live_adoption_over_objects_can_be_killed_anywhere(
    tmp_path: Path, after: bool, lost_node: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer.ConsumerHolder, "_taken_by_others", lambda *_: set())
    for at in itertools.count(1):
        stage = RootStage(tmp_path / str(at))
        env, orc = stage.env(), stage.orc()
        kept = stage.put(env, 3)
        stage.reply(env, orc)
        stage.put(env, 1, keep=False)
        env.discard(kept[:1])
        stage.kill(env)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Deleter, "put", lambda *_, **__: None)  # removals are cut in the simulation
            was_cut = cut(Cutter(at, after=after), partial(orc.adopt, env.inc))
        stage.kill(orc)
        bury(stage, lost_node=lost_node)
        found = close_run(stage.store, stage.ledger, run=stage.run)
        assert (found.verdict, stage.objects()) == (Verdict.PROVED, []), (at, found.render())
        stage.faulty.close()
        if not was_cut:
            assert at > 12, "fewer operations than an adoption has: the test cuts nothing"
            return


@pytest.mark.fault(13)
@CUTS
def test_a_whole_run_over_objects_can_be_killed_anywhere(tmp_path: Path, after: bool, lost_node: bool) -> None:
    """Everybody dies at once: no decision that had an effect is lost, nothing leaks, nothing counts as lost."""

    def run(stage: RootStage, env: EnvHolder, orc: ConsumerHolder, trn: StepHolder) -> None:
        trn.taken(stage.ship(orc, 0, stage.reply(env, orc, 2)))
        trn.used(0)
        orc.drop(stage.reply(env, orc, 1), "stale")
        stage.ship(orc, 1, stage.reply(env, orc, 1))
        orc.flush(deadline_s=0.0)
        trn.drop_steps(0, 0)
        stage.store.delete([object_name(o) for o in stage.batches[0]])
        trn.done_steps(0, 0)
        env.discard(stage.put(env))

    for at in itertools.count(1):
        stage = RootStage(tmp_path / str(at), batch_wait_s=3600.0)
        env, orc, trn = stage.env(), stage.orc(), stage.trn()
        was_cut = cut(Cutter(at, after=after), partial(run, stage, env, orc, trn))
        for one in (env, orc, trn):
            stage.kill(one)
        bury(stage, lost_node=lost_node)
        found = close_run(stage.store, stage.ledger, run=stage.run)
        assert (found.violations, stage.objects()) == ((), []), (at, found.render())
        assert found.verdict is Verdict.PROVED, (at, found.render())
        stage.faulty.close()
        if not was_cut:
            assert at > 18, "fewer operations than a run has: the test cuts nothing"
            return
