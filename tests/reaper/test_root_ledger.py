"""The ledger on a root that is no folder: segments, marks, death without a file, recovery from elsewhere."""

import threading
from pathlib import Path

import pytest

from fsref.errors import Fenced, RunBusy, StoreUnavailable
from fsref.journal import identity, write_dead
from fsref.journal.file import Journal, journal_path
from fsref.journal.markers import acquire_lock, read_adopted, release_lock, write_adopted
from fsref.journal.place import Ledger
from fsref.journal.read import LedgerReader
from fsref.journal.segments import segment_name
from fsref.ledger.records import Close
from fsref.reaper import Verdict, audit, close_run, history, recover
from tests.reaper.rootstage import RootStage, stage
from tests.reaper.stage import RUN

__all__ = ["stage"]
OTHER_HOST = identity.this_process()._replace(host="another", boot_id="another")


def finished_run(stage: RootStage) -> tuple[str, str, str]:
    """A run of every role that ended as planned."""
    env, orc, trn = stage.env(), stage.orc(), stage.trn()
    trn.taken(stage.ship(orc, 0, stage.reply(env, orc, 3)))
    trn.used(0)
    stage.commit(trn, 0, 0)
    orc.drop(stage.reply(env, orc, 2), "stale")
    env.discard(stage.put(env))
    for holder in (trn, orc, env):
        assert holder.close() == 0
    return env.inc, orc.inc, trn.inc


def test_a_finished_run_is_proved_with_and_without_its_journals_files(stage: RootStage) -> None:
    incs = finished_run(stage)
    found = stage.audit()
    assert found.verdict is Verdict.PROVED, found.render()
    for inc in incs:
        assert stage.sealed(inc) == journal_path(stage.ledger, inc).read_bytes()
    elsewhere = stage.audit_elsewhere()
    assert (elsewhere.verdict, elsewhere.totals) == (Verdict.PROVED, found.totals), elsewhere.render()
    stage.lose_node()
    assert stage.audit_elsewhere() == elsewhere
    assert audit(stage.store, stage.ledger, run=RUN) == elsewhere


def test_a_live_run_is_balanced_from_elsewhere(stage: RootStage) -> None:
    with stage.env() as env, stage.orc() as orc, stage.trn() as trn:
        trn.taken(stage.ship(orc, 0, stage.reply(env, orc, 2)))
        orc.drop(stage.reply(env, orc), "stale")
        stage.put(env)
        assert stage.audit().verdict is Verdict.BALANCED
        found = stage.audit_elsewhere()
        assert found.verdict is Verdict.BALANCED, found.render()
        assert len(found.open_incarnations) == 3  # each is seen from its first line on


def test_drops_wait_for_the_steps_flush(stage: RootStage) -> None:
    with stage.env() as env, stage.orc() as orc:
        dropped = stage.reply(env, orc, 3)
        orc.drop(dropped, "stale")
        assert orc.pending_delete == 3
        assert len(stage.segments(orc.inc)) == 1
        stage.ship(orc, 0, stage.reply(env, orc))
        assert orc.flush() == 0
        assert len(stage.segments(orc.inc)) == 2
        assert len(stage.objects()) == 1


def test_a_full_batch_of_drops_does_not_wait(tmp_path: Path) -> None:
    stage = RootStage(tmp_path, batch_ids_max=4)
    with stage.store, stage.env() as env, stage.orc() as orc:
        gone = threading.Event()
        delete = stage.faulty.inner.delete
        stage.faulty.inner.delete = lambda names: (delete(names), gone.set())[0]  # type: ignore[method-assign, func-returns-value]
        orc.drop(stage.reply(env, orc, 4), "stale")
        assert gone.wait(60)
        assert len(stage.segments(orc.inc)) == 2


def test_drops_that_waited_long_enough_are_sealed_for_their_own_sake(tmp_path: Path) -> None:
    stage = RootStage(tmp_path, seal_wait_s=0.05)
    with stage.store, stage.env() as env, stage.orc() as orc:
        gone = threading.Event()
        delete = stage.faulty.inner.delete
        stage.faulty.inner.delete = lambda names: (delete(names), gone.set())[0]  # type: ignore[method-assign, func-returns-value]
        orc.drop(stage.reply(env, orc), "stale")
        assert gone.wait(60)
        assert stage.objects() == []


@pytest.mark.fault(46)
def test_nothing_is_removed_while_its_drop_cannot_be_sealed(stage: RootStage) -> None:
    with stage.env() as env, stage.orc() as orc:
        orc.drop(stage.reply(env, orc, 2), "stale")
        fault = stage.faulty.fail("put", StoreUnavailable("503 SlowDown"), name="ledger/", times=3)
        assert orc.flush(deadline_s=60) == 0
        assert (fault.used, stage.objects()) == (3, [])
        stage.reply(env, orc)  # it goes on
    assert close_run(stage.store, stage.ledger, run=stage.run).verdict is Verdict.PROVED


def test_a_step_is_not_shipped_while_its_record_cannot_be_sealed(stage: RootStage) -> None:
    env, orc = stage.env(), stage.orc()
    stage.faulty.fail("put", StoreUnavailable("503 SlowDown"), name="ledger/orc", times=10**6)
    with pytest.raises(StoreUnavailable):
        stage.ship(orc, 0, stage.reply(env, orc, 2))
    for holder in (env, orc):
        stage.kill(holder)
    stage.faulty.clear()
    found = close_run(stage.store, stage.ledger, run=stage.run)
    assert (found.verdict, found.totals.dropped_by) == (Verdict.PROVED, {"recovered": 2})


@pytest.mark.fault(47)
def test_a_segment_whose_reply_was_lost_is_put_again_under_its_name(stage: RootStage) -> None:
    env, orc = stage.env(), stage.orc()
    stage.faulty.fail("put", StoreUnavailable("no answer"), name="ledger/orc", times=1, after=True)
    orc.drop(stage.reply(env, orc), "stale")
    stage.ship(orc, 0, stage.reply(env, orc))
    assert orc.flush() == 0
    for holder in (orc, env):
        holder.close()
    assert stage.sealed(orc.inc) == journal_path(stage.ledger, orc.inc).read_bytes()
    assert close_run(stage.store, stage.ledger, run=stage.run).verdict is Verdict.PROVED


@pytest.mark.fault(13)
def test_the_loss_of_every_node_loses_no_decision(stage: RootStage, monkeypatch: pytest.MonkeyPatch) -> None:
    env, orc, trn = stage.env(), stage.orc(), stage.trn()
    trn.taken(stage.ship(orc, 0, stage.reply(env, orc, 3)))
    trn.drop_steps(0, 0)
    trn.taken(stage.ship(orc, 1, stage.reply(env, orc, 2)))
    orc.drop(stage.reply(env, orc, 2), "stale")
    stage.reply(env, orc)
    stage.put(env, 2)
    env.discard(stage.put(env))
    env.flush()
    for holder in (env, orc, trn):
        stage.kill(holder)
    stage.lose_node()
    monkeypatch.setattr(identity, "this_process", lambda: OTHER_HOST)
    found = close_run(stage.store, stage.ledger, run=stage.run)
    assert (found.verdict, found.violations, stage.objects()) == (Verdict.PROVED, (), []), found.render()
    assert found.totals.dropped_by == {"trained": 3, "unjournaled": 7}
    assert "found without a keep" in "\n".join(found.render())
    assert stage.audit_elsewhere().totals == found.totals


@pytest.mark.fault(13)
def test_a_worker_whose_node_is_lost_is_adopted_while_the_run_goes_on(stage: RootStage) -> None:
    env, orc = stage.env(), stage.orc()
    dropped, shipped, held = stage.reply(env, orc, 2), stage.reply(env, orc, 2), stage.reply(env, orc, 1)
    orc.drop(dropped, "stale")
    stage.ship(orc, 0, shipped)
    orc.flush()
    stage.put(env, 3)
    stage.kill(env, reaped=False)
    journal_path(stage.ledger, env.inc).unlink()
    write_dead(Ledger(None, stage.faulty), env.inc, by="launcher", why="its node is lost")
    assert orc.dead_incarnations() == [env.inc]
    done = orc.adopt(env.inc)
    assert (done.how, done.orphans, done.unjournaled, done.lost) == ("dead", 0, 3, 0)
    assert orc.drop(held, "stale") == 1
    orc.close()
    trn = stage.trn()
    trn.taken(stage.info(0))
    stage.commit(trn, 0, 0)
    trn.close()
    found = stage.audit()
    assert (found.verdict, stage.objects()) == (Verdict.PROVED, []), found.render()
    assert found.totals.unreceipted == 2
    assert "known from others' journals only (node lost)" in "\n".join(found.render())


def test_who_may_be_alive_on_another_node_keeps_recovery_away(stage: RootStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = stage.env()
    stage.put(env, 2)
    with monkeypatch.context() as patch:
        patch.setattr(identity, "this_process", lambda: OTHER_HOST)
        with pytest.raises(RunBusy, match=env.inc):
            close_run(stage.store, tmp_path / "elsewhere", run=stage.run)
        assert len(stage.objects()) == 2
        forced = close_run(stage.store, tmp_path / "elsewhere", run=stage.run, force_dead=[env.inc])
    assert (forced.verdict, stage.objects()) == (Verdict.PROVED, []), forced.render()
    assert forced.totals.producers_adopted == {"forced": 1}


@pytest.mark.fault(15)
def test_a_zombie_can_seal_nothing_more(stage: RootStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env, orc = stage.env(), stage.orc()
    held = stage.reply(env, orc, 2)
    with monkeypatch.context() as patch:
        patch.setattr(identity, "this_process", lambda: OTHER_HOST)
        recover(stage.store, tmp_path / "elsewhere", run=stage.run, resume_step=-1, force_dead=[env.inc, orc.inc])
    with pytest.raises(Fenced, match="declared dead"):
        stage.ship(orc, 0, held)
    stage.faulty.calls.clear()
    orc._deleter.check()
    stage.kill(orc, reaped=False)
    stage.kill(env, reaped=False)
    assert stage.faulty.calls["delete"] == 0
    found = stage.audit()  # with its file: the ship behind the adoption is seen
    assert {v.predicate for v in found.violations} == {"I8"}
    assert stage.audit_elsewhere().violations == ()


def test_only_one_recovery_has_the_lock_at_a_time(stage: RootStage) -> None:
    first, second = "rec.main.0000000000000001", "rec.main.0000000000000002"
    assert acquire_lock(stage.place, first) is None
    assert acquire_lock(stage.place, second) == first
    release_lock(stage.place, second)
    assert acquire_lock(stage.place, second) == first
    release_lock(stage.place, first)
    release_lock(stage.place, first)
    assert acquire_lock(stage.place, second) is None
    assert acquire_lock(stage.place, first) == second


def test_a_fence_in_the_root_has_one_owner(stage: RootStage) -> None:
    inc = "env.a.0000000000000001"
    write_adopted(stage.place, inc, by="rec.main.0000000000000001")
    write_adopted(stage.place, inc, by="rec.main.0000000000000001")
    with pytest.raises(Fenced, match="0000000000000001"):
        write_adopted(stage.place, inc, by="rec.main.0000000000000002")
    assert read_adopted(stage.place, inc) == "rec.main.0000000000000001"


@pytest.mark.fault(50)
def test_a_store_that_ignores_the_condition_is_named_and_its_fences_hold(stage: RootStage, caplog: pytest.LogCaptureFixture) -> None:
    stage.faulty.honours_create_only = False
    env, orc = stage.env(), stage.orc()
    assert "ignores If-None-Match" in caplog.text
    stage.put(env)
    stage.kill(env)
    write_adopted(stage.place, env.inc, by="rec.main.0000000000000009")
    with pytest.raises(Fenced, match=r"adopted by rec\.main"):
        orc.adopt(env.inc)
    assert acquire_lock(stage.place, orc.inc) is None
    assert acquire_lock(stage.place, env.inc) == orc.inc
    orc.close()


@pytest.mark.fault(65)
def test_a_gap_in_the_segments_is_unprovable(stage: RootStage) -> None:
    _, orc, _ = finished_run(stage)
    assert len(stage.segments(orc)) > 2
    stage.faulty.inner.delete([segment_name(orc, 1)])
    for found in (stage.audit(), stage.audit_elsewhere()):
        assert any(f"{orc}" in p and "000001 is missing" in p for p in found.problems), found.render()
        assert found.verdict in (Verdict.UNPROVABLE, Verdict.VIOLATED)
    assert stage.audit().verdict is Verdict.UNPROVABLE  # its file tells everything, and still


@pytest.mark.fault(65)
def test_segments_that_cannot_be_listed_or_read_are_unprovable(stage: RootStage) -> None:
    finished_run(stage)
    for operation in ("list", "open", "read_into"):
        stage.faulty.fail(operation, StoreUnavailable("told to fail"), name="ledger", times=10**6)
        found = stage.audit()
        assert found.verdict is Verdict.UNPROVABLE, (operation, found.render())
        assert "told to fail" in "\n".join(found.problems)
        stage.faulty.clear()
    assert stage.audit().verdict is Verdict.PROVED


def test_a_segment_that_differs_from_its_file_is_unprovable(stage: RootStage) -> None:
    env, _, _ = finished_run(stage)
    name = segment_name(env, 1)
    data = bytearray(stage.faulty.inner.read(name, bytes_max=1 << 20))
    data[20] ^= 1
    stage.faulty.inner.replace(name, bytes(data))
    found = stage.audit()
    assert found.verdict is Verdict.UNPROVABLE
    assert "its file and its sealed segment differ" in found.problems[0]


@pytest.mark.fault(58)
def test_hostile_names_and_sizes_in_the_ledger_are_refused_unread(stage: RootStage, monkeypatch: pytest.MonkeyPatch) -> None:
    env, _, _ = finished_run(stage)
    stage.faulty.inner.put("ledger/notes.txt", [b"x"])
    stage.faulty.inner.put("ledger/marks/env.a.adopted", [b"x"])
    found = stage.audit_elsewhere()
    assert found.verdict is Verdict.UNPROVABLE
    assert sum("not named as a part of a ledger" in p for p in found.problems) == 2
    monkeypatch.setattr("fsref.journal.segments.SEGMENT_BYTES_MAX", 100)
    stage.faulty.calls.clear()
    found = stage.audit_elsewhere()
    assert stage.faulty.calls["read_into"] == 0
    assert any(env in p and "at most 100 are read" in p for p in found.problems)


def test_known_segments_are_not_read_again(stage: RootStage) -> None:
    with stage.env() as env, stage.orc() as orc:
        stage.ship(orc, 0, stage.reply(env, orc))
        reader = LedgerReader(Ledger(None, stage.faulty), run_uuid=stage.run.run_uuid)
        reader.refresh()
        stage.counted()
        reader.refresh()
        assert stage.counted() == {"list": 1, "list_entry": 3}
        stage.ship(orc, 1, stage.reply(env, orc))
        reader.refresh()
        assert stage.faulty.calls["read_into"] == 1
        assert set(reader.journals[orc.inc].fold.ships) == {0, 1}


def test_a_file_that_a_power_loss_cut_gives_way_to_its_longer_segments(stage: RootStage) -> None:
    _, orc, _ = finished_run(stage)
    path = journal_path(stage.ledger, orc)
    path.write_bytes(path.read_bytes()[:100])
    assert stage.audit().verdict is Verdict.PROVED


def test_inspection_reads_times_from_segments(stage: RootStage) -> None:
    finished_run(stage)
    object_id = stage.batches[0][0]
    here = history(stage.store, stage.ledger, [object_id])[object_id]
    assert (here.state, here.step) == ("removed", 0)
    assert min(here.kept_ms, here.dropped_ms, here.done_ms) > 0
    assert history(stage.store, None, [object_id])[object_id] == here


def test_a_journal_of_which_nothing_is_left_is_settled_where_the_operator_says_so(stage: RootStage) -> None:
    env, orc = stage.env(), stage.orc()
    orc.drop(stage.reply(env, orc, 2), "stale")
    stage.ship(orc, 0, stage.reply(env, orc))
    orc.flush()
    stage.put(env, 3)
    for holder in (env, orc):
        stage.kill(holder, reaped=holder is orc)
    stage.lose_node()
    stage.faulty.inner.delete(stage.segments(env.inc))
    first = recover(stage.store, stage.ledger, run=stage.run, resume_step=None)
    assert (first.recovered, first.unjournaled, len(stage.objects())) == (0, 0, 4)
    found = stage.audit()
    assert (found.verdict, found.violations) == (Verdict.UNPROVABLE, ())
    second = recover(stage.store, stage.ledger, run=stage.run, resume_step=None, force_dead=[env.inc])
    assert (second.unjournaled, stage.objects(), second.adopted) == (4, [], {env.inc: "forced", first.inc: "closed"})
    found = stage.audit()
    assert (found.verdict, found.violations) == (Verdict.UNPROVABLE, ()), found.render()
    assert any(env.inc in p for p in found.problems)
    recover(stage.store, stage.ledger, run=stage.run, resume_step=None)
    assert stage.audit().violations == ()


def test_a_worker_that_cannot_seal_its_close_says_so_and_the_runs_close_does_it(stage: RootStage) -> None:
    env, orc = stage.env(), stage.orc()
    stage.reply(env, orc)
    orc.close()
    stage.faulty.fail("put", StoreUnavailable("503 SlowDown"), name="ledger/env", times=10**6)
    with pytest.raises(StoreUnavailable):
        env.close()
    stage.faulty.clear()
    assert stage.audit().verdict is Verdict.PROVED
    assert len(stage.segments(env.inc)) == 1
    assert stage.audit_elsewhere().verdict is Verdict.UNPROVABLE or stage.audit_elsewhere().open_incarnations == (env.inc,)
    recover(stage.store, stage.ledger, run=stage.run, resume_step=None)
    assert stage.audit_elsewhere().verdict is Verdict.PROVED


def test_a_journal_that_cannot_be_sealed_at_its_start_is_not_opened(stage: RootStage) -> None:
    stage.faulty.fail("put", StoreUnavailable("no answer"), name="ledger/env", times=10**6)
    with pytest.raises(StoreUnavailable):
        stage.env()
    stage.faulty.clear()
    (path,) = stage.ledger.glob("env.*.jnl")
    reader = LedgerReader(stage.place)
    found = reader.read_one(path.stem)
    assert found is not None
    assert found.fold.sealed  # nobody takes it for a live one


def test_large_journals_are_sealed_in_several_segments(stage: RootStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsref.journal.segments.SEGMENT_BYTES_MAX", 150)
    stage.ledger.mkdir()
    with Journal(stage.place, "orc.main.0000000000000001", run_uuid=stage.run.run_uuid) as journal:
        for _ in range(20):
            journal.append(Close(1))
        journal.sync()
    assert len(stage.segments(journal.inc)) > 5
    assert stage.sealed(journal.inc) == journal.path.read_bytes()
