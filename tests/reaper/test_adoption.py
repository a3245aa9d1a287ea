"""Adoption by a live orchestrator, recovery of a stopped run, and the run's close."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from fsref.errors import Fenced, JournalCorrupt, LedgerError, RunBusy, RunMismatch, StoreError
from fsref.journal import write_dead
from fsref.journal.file import journal_path
from fsref.journal.folder_marks import LOCK_NAME
from fsref.journal.markers import read_adopted, write_adopted
from fsref.ledger.predicates import StoreView
from fsref.reaper import Verdict, audit, auditing, close_run, recover
from fsref.reaper.listing import list_objects
from fsref.refs import object_name
from fsref.steps import info_name
from fsref.store.base import Store
from tests.reaper.stage import RUN, Stage


@pytest.mark.fault(1, 2, 3, 22)
@pytest.mark.payload("F3")
def test_a_dead_replica_is_adopted_and_the_run_ends_proved(stage: Stage) -> None:
    env, orc = stage.env(), stage.orc()
    taken = stage.reply(env, orc)
    stage.put(env, 2)
    env.next_seq()  # a put that never published
    stage.put(env, 1, keep=False)  # published, killed before its keep
    sent = stage.put(env)
    env.sent("lost", sent)
    stage.store.put(f"obj/{env.inc}/.0000000006.tmp", [b"half"])
    stage.kill(env)
    assert orc.dead_incarnations() == [env.inc]
    done = orc.adopt(env.inc)
    assert (done.how, done.orphans, done.unjournaled, done.lost, done.staging) == ("dead", 3, 1, 0, 1)
    assert orc.dead_incarnations() == []
    assert orc.take("lost", dict.fromkeys(sent, 100)) == []
    assert orc.counters["late_refused"] == 1
    assert orc.drop(taken, "stale") == 1
    assert orc.close() == 0
    found = stage.audit()
    assert found.verdict is Verdict.PROVED, found.render()
    assert found.totals.dropped_by == {"orphan": 3, "unjournaled": 1, "stale": 1}
    assert (found.totals.void, found.totals.extra, stage.objects()) == (2, 1, [])
    assert "1 adopted: 1 dead" in found.render()[1]


def test_an_orchestrator_adopts_dead_replicas_by_itself(tmp_path: Path) -> None:
    stage = Stage(tmp_path, adopt_poll_s=0.02)
    with stage.store:
        orc, replicas = stage.orc(), [stage.env(f"math-{n}-0") for n in range(3)]
        for env in replicas:
            stage.put(env, 2)
        stage.store.list_fails = True
        for env in replicas[:2]:
            stage.kill(env)
        stage.store.wait_until(lambda: stage.store.lists > 5)
        assert orc.counters["adoption_failures"] >= 3
        assert len(stage.objects()) == 6
        stage.store.list_fails = False
        stage.store.wait_until(lambda: len(stage.objects()) == 2)
        assert orc.counters["adopted"] == 2
        assert stage.reply(replicas[2], orc)
        orc.close()
        replicas[2].close()
        found = stage.audit()
        assert found.verdict is Verdict.PROVED, found.render()
        assert found.totals.dropped_by == {"orphan": 4, "never_sent": 2, "shutdown": 1}


def test_adopting_again_changes_nothing(stage: Stage) -> None:
    env, orc = stage.env(), stage.orc()
    stage.put(env)
    stage.kill(env)
    assert orc.adopt(env.inc) is orc.adopt(env.inc)
    orc.close()
    assert stage.audit().verdict is Verdict.PROVED


def test_a_closed_replica_with_unclaimed_replies_is_adopted(stage: Stage) -> None:
    env, orc = stage.env(), stage.orc()
    env.sent("lost", stage.put(env, 2))
    env.close()
    assert orc.adopt(env.inc).how == "closed"
    orc.close()
    found = stage.audit()
    assert (found.verdict, found.totals.dropped_by) == (Verdict.PROVED, {"orphan": 2})


@pytest.mark.fault(5)
def test_what_a_dead_replica_dropped_and_did_not_remove_is_removed(stage: Stage) -> None:
    env, orc = stage.env(), stage.orc()
    found = stage.put(env, 3)
    stage.store.delete_failures = 1_000_000
    env.discard(found, "never_sent")
    stage.kill(env)
    stage.store.delete_failures = 0
    assert orc.adopt(env.inc).redone == 3
    orc.close()
    verdict = stage.audit()
    assert (verdict.verdict, verdict.totals.done_retry, stage.objects()) == (Verdict.PROVED, 3, [])


def test_a_replica_that_may_be_alive_is_not_adopted(stage: Stage) -> None:
    with stage.env() as env, stage.orc() as orc:
        with pytest.raises(LedgerError, match="may be alive"):
            orc.adopt(env.inc)
        assert read_adopted(stage.place, env.inc) is None
        assert orc.take("q", dict.fromkeys(stage.put(env), 100))


def test_the_free_lock_of_a_local_journal_proves_its_death(stage: Stage) -> None:
    env, orc = stage.env(), stage.orc()
    stage.put(env)
    stage.kill(env, reaped=False)
    assert orc.adopt(env.inc).how == "flock"
    orc.close()
    assert stage.audit().verdict is Verdict.PROVED


def test_a_listing_that_fails_decides_nothing(stage: Stage) -> None:
    env, orc = stage.env(), stage.orc()
    stage.put(env)
    stage.kill(env)
    stage.store.list_fails = True
    with pytest.raises(StoreError, match="told to fail"):
        orc.adopt(env.inc)
    assert len(stage.objects()) == 1
    stage.store.list_fails = False
    assert orc.adopt(env.inc).orphans == 1
    orc.close()
    assert stage.audit().verdict is Verdict.PROVED


def test_two_adopters_cannot_both_have_an_incarnation(stage: Stage) -> None:
    env, orc = stage.env(), stage.orc()
    stage.kill(env)
    write_adopted(stage.place, env.inc, by="rec.main.0000000000000009")
    with pytest.raises(Fenced, match=r"adopted by rec\.main"):
        orc.adopt(env.inc)
    orc.close()


def test_an_adopter_that_dies_after_its_marker_is_inherited(stage: Stage) -> None:
    env, orc = stage.env(), stage.orc()
    stage.put(env)
    stage.kill(env)
    write_adopted(stage.place, env.inc, by=orc.inc)
    stage.kill(orc)
    assert close_run(stage.store, stage.ledger, run=stage.run).verdict is Verdict.PROVED


@pytest.mark.payload("F6")
@pytest.mark.payload("F17")
def test_closing_a_run_that_everybody_left_by_a_crash_proves_it(stage: Stage) -> None:
    env, orc, trn = stage.env(), stage.orc(), stage.trn()
    trn.taken(stage.ship(orc, 0, stage.reply(env, orc, 2)))
    trn.used(0)
    trn.drop_steps(0, 0)
    stage.ship(orc, 1, stage.reply(env, orc, 2))
    stage.reply(env, orc)
    stage.put(env)
    stage.put(env, keep=False)
    for holder in (env, orc, trn):
        stage.kill(holder)
    found = close_run(stage.store, stage.ledger, run=stage.run)
    assert found.verdict is Verdict.PROVED, found.render()
    assert found.totals.dropped_by == {"recovered": 4, "trained": 2, "unjournaled": 1}
    assert stage.objects() == []
    assert close_run(stage.store, stage.ledger, run=stage.run).verdict is Verdict.PROVED


def test_a_live_process_keeps_recovery_away_and_is_named(stage: Stage) -> None:
    with stage.env() as env:
        with pytest.raises(RunBusy, match=env.inc):
            recover(stage.store, stage.ledger, run=stage.run, resume_step=None)
        assert stage.audit().violations == ()


@pytest.mark.payload("F16")
def test_recovery_for_a_resume_parks_later_steps_only_where_asked(tmp_path: Path) -> None:
    for replay, parked in (("keep", 2), ("drop", 0)):
        stage = Stage(tmp_path / replay)
        env, orc, trn = stage.env(), stage.orc(), stage.trn()
        for step in range(3):
            info = stage.ship(orc, step, stage.reply(env, orc, 2))
            if step < 2:
                stage.store.put(info_name(step), [msgspec.json.encode(info)])
            trn.taken(info)
        for holder in (env, orc, trn):
            stage.kill(holder)
        done = recover(stage.store, stage.ledger, run=stage.run, resume_step=0, replay=replay)  # type: ignore[arg-type]
        assert (done.parked, done.recovered) == (parked, 6 - parked), replay  # step 0 is behind the checkpoint, step 2 was never published
        second = stage.trn()
        if replay == "keep":
            second.taken(stage.info(1))
            stage.commit(second, 1, 1)
        second.close()
        found = close_run(stage.store, stage.ledger, run=stage.run)
        assert found.verdict is Verdict.PROVED, (replay, found.render())
        stage.store.close()


def test_a_step_number_may_return_with_another_batch_after_a_resume(stage: Stage) -> None:
    env, orc, trn = stage.env(), stage.orc(), stage.trn()
    trn.taken(stage.ship(orc, 0, stage.reply(env, orc)))
    for holder in (env, orc, trn):
        stage.kill(holder)
    recover(stage.store, stage.ledger, run=stage.run, resume_step=-1)
    env, orc, trn = stage.env(), stage.orc(), stage.trn()
    trn.taken(stage.ship(orc, 0, stage.reply(env, orc)))
    stage.commit(trn, 0, 0)
    for holder in (env, orc, trn):
        holder.close()
    found = stage.audit()
    assert found.verdict is Verdict.PROVED, found.render()
    assert found.totals.dropped_by == {"recovered": 1, "trained": 1}


def test_a_recovery_that_was_killed_is_taken_over(stage: Stage) -> None:
    env = stage.env()
    stage.put(env, 2)
    stage.kill(env)
    stage.store.list_fails = True
    with pytest.raises(StoreError):
        recover(stage.store, stage.ledger, run=stage.run, resume_step=None)
    stage.store.list_fails = False
    stage.store.delete_failures = 1_000_000
    first = recover(stage.store, stage.ledger, run=stage.run, resume_step=None, deadline_s=0.1)
    assert len(first.pending) == 2
    stage.store.delete_failures = 0
    second = recover(stage.store, stage.ledger, run=stage.run, resume_step=None)
    assert (second.redone, second.pending) == (2, ())
    assert stage.audit().verdict is Verdict.PROVED
    assert not (stage.ledger / LOCK_NAME).exists()


@pytest.mark.fault(29)
def test_an_object_that_somebody_else_removed_is_reported_and_never_fixed(stage: Stage) -> None:
    env = stage.env()
    found = stage.put(env, 2)
    stage.store.delete([object_name(found[0])])
    stage.kill(env)
    assert recover(stage.store, stage.ledger, run=stage.run, resume_step=None).lost == 1
    after = stage.audit()
    assert (after.verdict, after.violation_counts) == (Verdict.VIOLATED, {"lost": 1})
    assert found[0] in after.violations[0].subject


@pytest.mark.fault(30)
def test_foreign_files_are_named_and_removed_only_on_request(stage: Stage) -> None:
    env = stage.env()
    env.close()
    foreign = ["obj/readme.txt", f"obj/{env.inc}/9999999999.zip", "obj/env.x.0000000000000001/0000000000.zip"]
    for name in foreign[:2]:
        stage.store.put(name, [b"?"])
    assert close_run(stage.store, stage.ledger, run=stage.run).violation_counts == {"unexpected": 2}
    assert stage.objects() == sorted(foreign[:2])
    done = recover(stage.store, stage.ledger, run=stage.run, resume_step=None, remove_unexpected=True)
    assert sorted(done.unexpected) == sorted(foreign[:2])
    assert stage.objects() == []
    assert stage.audit().verdict is Verdict.PROVED


def test_a_damaged_journal_stops_recovery_unless_the_operator_accepts_it(stage: Stage) -> None:
    env = stage.env()
    stage.put(env, 3)
    stage.kill(env)
    path = journal_path(stage.ledger, env.inc)
    data = bytearray(path.read_bytes())
    data[data.find(b'"keep"')] ^= 1
    path.write_bytes(data)
    found = stage.audit()
    assert (found.verdict, found.exit_code) == (Verdict.UNPROVABLE, 20)
    assert env.inc in found.problems[0]
    with pytest.raises(JournalCorrupt, match="--accept-corrupt"):
        recover(stage.store, stage.ledger, run=stage.run, resume_step=None)
    assert len(stage.objects()) == 3
    recover(stage.store, stage.ledger, run=stage.run, resume_step=None, accept_corrupt=True)
    assert stage.objects() == []
    assert stage.audit().verdict is Verdict.UNPROVABLE


@pytest.mark.fault(15)
def test_a_process_that_was_declared_dead_by_force_and_writes_on_is_noticed(stage: Stage) -> None:
    env, orc = stage.env(), stage.orc()
    stage.put(env)
    assert orc.adopt(env.inc, force=True).how == "forced"
    stage.put(env)
    env.flush(deadline_s=1)
    orc.close()
    found = stage.audit()
    assert "I8" in found.violation_counts
    env.discard([f"{env.inc}/1"])
    env.flush(deadline_s=30)
    with pytest.raises(Fenced):
        env.discard([f"{env.inc}/0"])
    with pytest.raises(Fenced):
        env.close()


WORKER = """
import sys
import threading
from pathlib import Path
from fsref.journal import read_run
from fsref.reaper import EnvHolder
from fsref.refs import object_name
from fsref.store import open_root
root, run = sys.argv[1:]
store = open_root(root, run=run)
env = EnvHolder(store, Path(root) / run / "ledger", run=read_run(store), label="victim")
for _ in range(5):
    object_id = env.next_id()
    store.put(object_name(object_id), [b"x"])
    env.keep(int(object_id.split("/")[1]), byte_count=1, checksum=0, token_count=1, fields=1)
print(env.inc, flush=True)
sys.stdin.read()
"""


def test_a_worker_that_is_killed_is_proved_dead_and_adopted(stage: Stage) -> None:
    with stage.orc() as orc:
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(stage.root), RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert worker.stdout is not None
        assert worker.stdin is not None
        inc = worker.stdout.readline().strip()
        with pytest.raises(LedgerError, match="may be alive"):
            orc.adopt(inc)
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
        worker.stdin.close()
        write_dead(stage.place, inc, by="test", why="waitpid")
        assert orc.adopt(inc).orphans == 5
    assert stage.audit().verdict is Verdict.PROVED


@pytest.mark.fault(65)
def test_a_removed_journal_makes_the_audit_unprovable_and_is_named(stage: Stage) -> None:
    env, orc = stage.env(), stage.orc()
    orc.drop(stage.reply(env, orc), "stale")
    orc.close()
    env.close()
    assert stage.audit().verdict is Verdict.PROVED
    journal_path(stage.ledger, env.inc).unlink()
    found = stage.audit()
    assert found.verdict is Verdict.UNPROVABLE
    assert any(env.inc in p for p in found.problems)


def test_a_store_that_cannot_be_listed_makes_the_audit_unprovable(stage: Stage) -> None:
    stage.env().close()
    stage.store.list_fails = True
    found = stage.audit()
    assert (found.verdict, found.totals.present) == (Verdict.UNPROVABLE, None)
    assert "not listed" in found.render()[4]


def test_a_folder_without_journals_is_unprovable(stage: Stage) -> None:
    assert stage.audit().verdict is Verdict.UNPROVABLE


@pytest.mark.fault(61)
def test_journals_of_another_run_are_refused(stage: Stage) -> None:
    stage.env().close()
    with pytest.raises(RunMismatch, match="used by another run"):
        audit(stage.store, stage.ledger, run=RUN, run_uuid="f" * 32)


def test_the_report_is_plain_data_and_lines(stage: Stage) -> None:
    env, orc = stage.env(), stage.orc()
    orc.drop(stage.reply(env, orc, 2), "stale")
    orc.close()
    env.close()
    found = stage.audit()
    data = msgspec.json.decode(msgspec.json.encode(found.to_json()))
    assert (data["verdict"], data["exit_code"], data["kept"], data["dropped_by"]) == ("PROVED", 0, 2, {"stale": 2})
    lines = found.render()
    assert lines[0] == "run r1  CLOSED  PROVED"
    assert lines[1] == "kept      2 objects  200 B   from 1 incarnations (1 closed)"
    assert lines[2] == "dropped   2 = stale 2"
    assert lines[4] == "store     0 objects, 0 staging files under obj/"


@pytest.mark.fault(64)
def test_auditing_a_busy_run_never_finds_a_violation(stage: Stage) -> None:
    stop = threading.Event()
    env, orc = stage.env(), stage.orc()

    def work() -> None:
        while not stop.is_set():
            found = stage.reply(env, orc, 3)
            orc.drop(found[:2], "stale")
            orc.drop(found[2:], "filtered")

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for _ in range(30):
            found = stage.audit()
            assert (found.verdict, found.violations) == (Verdict.BALANCED, ()), found.render()
    finally:
        stop.set()
        worker.join()
    orc.close()
    env.close()
    assert stage.audit().verdict is Verdict.PROVED


@pytest.mark.fault(64)
def test_a_run_that_ends_while_it_is_audited_is_not_accused_of_what_was_listed_before(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listing still shows an object; before the journals are read again it is removed, and everybody has closed."""
    env, orc = stage.env(), stage.orc()
    (found,) = stage.reply(env, orc)

    def list_then_end(store: Store) -> StoreView:
        listed = list_objects(store)
        orc.drop([found], "stale")
        orc.close()
        env.close()
        return listed

    monkeypatch.setattr(auditing, "list_objects", list_then_end)
    during = stage.audit()
    assert (during.verdict, during.violations) == (Verdict.BALANCED, ()), during.render()
    monkeypatch.undo()
    assert stage.audit().verdict is Verdict.PROVED


@pytest.mark.fault(59)
def test_nothing_outside_the_run_is_ever_touched(stage: Stage) -> None:
    canary = stage.root / "obj"
    canary.mkdir()
    (canary / "0000000000.zip").write_bytes(b"keep me")
    env, orc = stage.env(), stage.orc()
    outside = stage.root / RUN / "obj" / "env.evil.0000000000000001"
    outside.symlink_to(canary, target_is_directory=True)
    stage.put(env)
    for holder in (env, orc):
        stage.kill(holder)
    found = close_run(stage.store, stage.ledger, run=stage.run)
    assert found.violation_counts == {"unexpected": 1}
    recover(stage.store, stage.ledger, run=stage.run, resume_step=None, remove_unexpected=True)
    assert (canary / "0000000000.zip").read_bytes() == b"keep me"


@pytest.mark.fault(4)
def test_an_eval_beside_the_run_refuses_the_late_reply_of_a_worker_that_the_orchestrator_adopted(stage: Stage) -> None:
    env, orc, evl = stage.env(), stage.orc(), stage.orc("evl")
    early, late = stage.reply(env, evl), stage.put(env)
    env.sent("late", late)
    stage.kill(env)
    adopted = orc.adopt(env.inc)
    assert adopted.orphans == 1
    assert evl.take("late", dict.fromkeys(late, 100)) == []
    assert evl.counters["late_refused"] == 1
    evl.drop(early, "eval")
    for holder in (evl, orc):
        holder.close()
    found = close_run(stage.store, stage.ledger, run=stage.run)
    assert (found.verdict, found.violations) == (Verdict.PROVED, ()), found.render()
    assert stage.objects() == []
