"""The three holders over real files: records, background removal, and what each refuses."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fsref.errors import DoubleDrop, Fenced, JournalPoisoned, NotHolder, RunBusy, StepReleased
from fsref.journal.file import journal_path
from fsref.journal.markers import write_adopted
from fsref.ledger.records import Drop, Keep, Ship, Take, decode_line
from fsref.reaper import Verdict
from fsref.refs import object_name
from tests.reaper.stage import Stage


def records(stage: Stage, inc: str) -> list[object]:
    lines = journal_path(stage.ledger, inc).read_bytes().splitlines()
    return [decode_line(line) for line in lines]


def test_a_clean_run_is_proved_and_leaves_nothing_behind(stage: Stage) -> None:
    env, orc, trn = stage.env(), stage.orc(), stage.trn()
    first = stage.reply(env, orc, 3)
    orc.drop(first[:1], "filtered")
    info = stage.ship(orc, 0, first[1:])
    trn.taken(info)
    trn.used(0, {})
    stage.commit(trn, 0, 0)
    assert env.discard(stage.put(env, 2), "encode_error") == 2
    given_up = stage.put(env)
    env.sent("given up", given_up)
    assert env.nack("given up") == 1
    stage.reply(env, orc)
    assert (trn.close(), orc.close(), env.close()) == (0, 0, 0)
    found = stage.audit()
    assert found.verdict is Verdict.PROVED, found.render()
    assert found.totals.dropped_by == {"trained": 2, "encode_error": 2, "filtered": 1, "abandoned": 1, "shutdown": 1}
    assert stage.objects() == []


def test_an_open_run_is_balanced_and_counts_what_is_live(stage: Stage) -> None:
    with stage.env() as env, stage.orc() as orc:
        stage.reply(env, orc, 2)
        found = stage.audit()
        assert (found.verdict, found.exit_code, found.totals.live, found.totals.live_bytes) == (Verdict.BALANCED, 10, 2, 200)


def test_a_keep_is_one_short_line_with_what_the_audit_needs(stage: Stage) -> None:
    with stage.env() as env:
        stage.put(env)
        kept = [r for r in records(stage, env.inc) if isinstance(r, Keep)]
        assert [(r.s, r.b, r.x, r.n, r.f) for r in kept] == [(0, 100, 7, 10, 1)]
        line = journal_path(stage.ledger, env.inc).read_bytes().splitlines()[1]
        assert len(line) <= 90


def test_a_reply_is_one_record_whatever_its_size(stage: Stage) -> None:
    with stage.env() as env, stage.orc() as orc:
        stage.reply(env, orc, 50)
        assert sum(isinstance(r, Take) for r in records(stage, orc.inc)) == 1


def test_a_step_that_does_not_fit_a_line_is_split_and_counts_once(stage: Stage) -> None:
    with stage.orc() as orc:
        spread = [f"env.worker-{p}.{p:016x}/{3 * n}" for p in range(600) for n in range(40)]
        orc.take("q", dict.fromkeys(spread, 100))
        orc.ship(0, dict.fromkeys(spread, 100))
        ships = [r for r in records(stage, orc.inc) if isinstance(r, Ship)]
        assert [r.part for r in ships] == [(k, len(ships)) for k in range(1, len(ships) + 1)]
        assert len(ships) > 1
        assert {r.n for r in ships} == {24_000}
        orc.close(discard=False)


def test_a_drop_is_durable_before_anything_is_deleted(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    with stage.env() as env, stage.orc() as orc:
        found = stage.reply(env, orc)
        sync, delete = orc._journal.sync, stage.store.delete

        def noted_sync(*args: Any, **kwargs: Any) -> None:
            events.append("sync")
            sync(*args, **kwargs)

        def noted_delete(names: Sequence[str]) -> object:
            events.append("delete")
            return delete(names)

        monkeypatch.setattr(orc._journal, "sync", noted_sync)
        monkeypatch.setattr(stage.store, "delete", noted_delete)
        orc.drop(found, "stale")
        orc.flush(deadline_s=30)
        assert events == ["sync", "delete"]
        monkeypatch.undo()


def test_a_ship_is_durable_on_return(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    with stage.env() as env, stage.orc() as orc:
        found = stage.reply(env, orc)
        synced: list[int] = []
        sync = orc._journal.sync

        def noted_sync(*args: Any, **kwargs: Any) -> None:
            synced.append(len(records(stage, orc.inc)))
            sync(*args, **kwargs)

        monkeypatch.setattr(orc._journal, "sync", noted_sync)
        stage.ship(orc, 0, found)
        assert synced == [3]  # open, take and ship were written before the sync
        monkeypatch.undo()


@pytest.mark.fault(25)
@pytest.mark.payload("F11")
def test_strict_mode_raises_on_a_second_drop_and_the_default_counts_it(tmp_path: Path) -> None:
    for strict in (False, True):
        stage = Stage(tmp_path / str(strict), strict=strict)
        with stage.store, stage.env() as env, stage.orc() as orc:
            found = stage.reply(env, orc)
            orc.drop(found, "stale")
            if strict:
                with pytest.raises(DoubleDrop):
                    orc.drop(found, "stale")
            else:
                assert orc.drop(found, "stale") == 0
                assert orc.counters["suppressed"] == 1
            assert sum(isinstance(r, Drop) for r in records(stage, orc.inc)) == 1


@pytest.mark.fault(27)
def test_a_drop_of_what_was_never_taken_deletes_nothing(stage: Stage) -> None:
    with stage.env() as env, stage.orc() as orc:
        found = stage.put(env)
        with pytest.raises(NotHolder, match="never took it"):
            orc.drop(found, "filtered")
        orc.flush(deadline_s=5)
        assert stage.objects() == [object_name(found[0])]


def test_a_reason_of_another_role_is_refused(stage: Stage) -> None:
    with stage.env() as env, stage.orc() as orc:
        found = stage.reply(env, orc)
        with pytest.raises(ValueError, match="reason 'trained'"):
            orc.drop(found, "trained")


@pytest.mark.fault(17)
def test_a_doubled_reply_is_counted_and_recorded_once(stage: Stage) -> None:
    with stage.env() as env, stage.orc() as orc:
        found = stage.reply(env, orc)
        assert orc.take("q1", dict.fromkeys(found, 100)) == []
        assert orc.counters["dup_reply"] == 1
        assert sum(isinstance(r, Take) for r in records(stage, orc.inc)) == 1


@pytest.mark.fault(62)
def test_the_shutdown_drops_exactly_what_is_held(stage: Stage) -> None:
    env, orc, trn = stage.env(), stage.orc(), stage.trn()
    found = stage.reply(env, orc, 4)
    orc.drop(found[:1], "filtered")
    trn.taken(stage.ship(orc, 0, found[1:2]))
    orc.close()
    stage.commit(trn, 0, 0)
    trn.close()
    env.close()
    assert stage.audit().totals.dropped_by == {"shutdown": 2, "filtered": 1, "trained": 1}


def test_an_evaluation_removes_all_that_it_took(stage: Stage) -> None:
    env, evl = stage.env(), stage.orc("evl")
    stage.reply(env, evl, 3)
    evl.close()
    env.close()
    found = stage.audit()
    assert (found.verdict, found.totals.dropped_by) == (Verdict.PROVED, {"eval": 3})


@pytest.mark.payload("F1")
def test_a_removal_that_fails_is_tried_again_and_counted(stage: Stage) -> None:
    env, orc = stage.env(), stage.orc()
    found = stage.reply(env, orc, 3)
    stage.store.delete_failures = 2
    orc.drop(found, "stale")
    assert orc.flush(deadline_s=60) == 0
    assert stage.store.deletes.count(object_name(found[0])) == 3
    orc.close()
    env.close()
    totals = stage.audit().totals
    assert (totals.done, totals.done_retry, totals.pending) == (3, 3, 0)


@pytest.mark.fault(63)
@pytest.mark.payload("F1")
@pytest.mark.payload("F20")
def test_removals_beyond_the_deadline_stay_pending_and_are_named(stage: Stage) -> None:
    env, orc = stage.env(), stage.orc()
    found = stage.reply(env, orc)
    stage.store.delete_failures = 1_000_000
    orc.drop(found, "stale")
    assert orc.close(deadline_s=0.2) == 1
    stage.store.delete_failures = 0
    env.close()
    audit = stage.audit()
    assert (audit.verdict, audit.totals.pending, audit.pending_ids) == (Verdict.BALANCED, 1, tuple(found))


def test_a_slow_store_blocks_nobody_but_the_deleter(stage: Stage) -> None:
    env, orc = stage.env(), stage.orc()
    stage.store.gate.clear()
    for _ in range(20):
        orc.drop(stage.reply(env, orc), "stale")
    assert orc.pending_delete == 20
    stage.store.gate.set()
    assert orc.flush(deadline_s=60) == 0
    orc.close()
    env.close()


def test_removals_are_batched(stage: Stage) -> None:
    env, orc = stage.env(), stage.orc()
    stage.store.gate.clear()
    found = stage.reply(env, orc, 300)
    for object_id in found:
        orc.drop([object_id], "stale")
    stage.store.gate.set()
    orc.close()
    env.close()
    text = journal_path(stage.ledger, orc.inc).read_text()
    assert text.count('"t":"drop"') == 300
    assert text.count('"t":"done"') < 30


@pytest.mark.fault(15)
def test_an_adopted_process_deletes_nothing_more_and_is_told(stage: Stage) -> None:
    env, orc = stage.env(), stage.orc()
    found = stage.reply(env, orc, 2)
    write_adopted(stage.place, orc.inc, by="rec.main.0000000000000001")
    orc.drop(found[:1], "stale")
    orc.flush(deadline_s=30)
    with pytest.raises(Fenced, match=r"adopted by rec\.main"):
        orc.drop(found[1:], "stale")
    with pytest.raises(Fenced):
        orc.ship(0, {})
    assert len(stage.objects()) == 2
    with pytest.raises(Fenced):
        orc.close()
    env.close()


def test_a_poisoned_journal_stops_keeping_and_removing(stage: Stage) -> None:
    env, orc = stage.env(), stage.orc()
    found = stage.reply(env, orc, 2)
    os.close(orc._journal._fd)  # the next write fails as on a dead disk
    with pytest.raises(JournalPoisoned):
        orc.drop(found[:1], "stale")
    with pytest.raises(JournalPoisoned):
        orc.take("q9", {f"{env.inc}/99": 100})
    orc._journal._fd = -1
    assert len(stage.objects()) == 2
    with pytest.raises(JournalPoisoned):
        orc.close()
    env.close()


@pytest.mark.fault(60)
@pytest.mark.payload("F7")
def test_a_second_orchestrator_of_a_live_run_is_refused(stage: Stage) -> None:
    with stage.orc() as orc:
        with pytest.raises(RunBusy, match=orc.inc):
            stage.orc()
        stage.orc("evl").close()
    stage.orc().close()
    assert stage.audit().violations == ()


def test_a_second_trainer_of_a_live_run_is_refused(stage: Stage) -> None:
    with stage.trn() as trn, pytest.raises(RunBusy, match=trn.inc):
        stage.trn()


@pytest.mark.fault(28)
@pytest.mark.payload("F15")
@pytest.mark.payload("F16")
def test_a_restarted_trainer_replays_what_was_not_released_and_is_told_what_was(stage: Stage) -> None:
    env, orc, first = stage.env(), stage.orc(), stage.trn()
    for step in range(3):
        first.taken(stage.ship(orc, step, stage.reply(env, orc)))
        first.used(step)
    stage.commit(first, 0, 1)
    stage.kill(first)
    second = stage.trn()
    with pytest.raises(StepReleased, match=r"commit of steps 0\.\.1"):
        second.taken(stage.info(1))
    second.taken(stage.info(2))
    stage.commit(second, 2, 2)
    for holder in (second, orc, env):
        holder.close()
    found = stage.audit()
    assert found.verdict is Verdict.PROVED, found.render()


@pytest.mark.fault(11)
def test_a_restarted_trainer_redoes_the_removals_of_the_one_before(stage: Stage) -> None:
    env, orc, first = stage.env(), stage.orc(), stage.trn()
    first.taken(stage.ship(orc, 0, stage.reply(env, orc, 4)))
    first.drop_steps(0, 0)
    stage.store.delete([object_name(o) for o in stage.batches[0][:2]])  # half of the leaders' work
    stage.kill(first)
    second = stage.trn()
    second.flush(deadline_s=30)
    for holder in (second, orc, env):
        holder.close()
    found = stage.audit()
    assert found.verdict is Verdict.PROVED, found.render()
    assert (found.totals.done_retry, found.violation_counts) == (4, {})


@pytest.mark.fault(27)
def test_a_step_that_was_not_taken_cannot_be_used_dropped_or_done(stage: Stage) -> None:
    with stage.trn() as trn:
        for call in (lambda: trn.used(0), lambda: trn.drop_steps(0, 0), lambda: trn.done_steps(0, 0)):
            with pytest.raises(NotHolder):
                call()


def test_what_no_rank_could_fetch_is_removed_as_such(stage: Stage) -> None:
    env, orc, trn = stage.env(), stage.orc(), stage.trn()
    info = stage.ship(orc, 0, stage.reply(env, orc, 3))
    trn.taken(info)
    trn.used(0, {stage.batches[0][0]: "corrupt"})
    stage.commit(trn, 0, 0)
    for holder in (trn, orc, env):
        holder.close()
    assert stage.audit().totals.dropped_by == {"trained": 2, "fetch_failed": 1}


@pytest.mark.payload("F10")
def test_a_rotated_worker_goes_on_under_a_new_name(stage: Stage) -> None:
    env, orc = stage.env(), stage.orc()
    old = env.inc
    stage.put(env)
    env.rotate()
    assert env.inc != old
    assert env.next_id() == f"{env.inc}/0"
    stage.reply(env, orc)
    orc.close()
    env.close()
    found = stage.audit()
    assert found.verdict is Verdict.PROVED, found.render()
    assert (found.totals.producers, found.totals.dropped_by) == (2, {"never_sent": 1, "shutdown": 1})


def test_keeps_from_many_threads_are_all_recorded(stage: Stage) -> None:
    env = stage.env()
    threads = [threading.Thread(target=stage.put, args=(env, 50)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert env.counters["kept"] == 200
    env.close()
    found = stage.audit()
    assert found.verdict is Verdict.PROVED, found.render()
    assert found.totals.kept == 200


def test_a_worker_that_cannot_remove_under_obj_does_not_start(stage: Stage) -> None:
    stage.store.delete_failures = 1
    with pytest.raises(OSError, match="told to fail"):
        stage.env()
    assert stage.audit().open_incarnations == ()
