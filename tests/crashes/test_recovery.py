"""Recovery and adoption as processes that are killed at each of their operations: what runs after them converges."""

import signal
from pathlib import Path

import pytest

from fsref.failpoints import POINTS
from fsref.reaper import close_run
from tests.support.roles import Child, Play, Refused, Zygote

OPERATIONS = ("journal.append", "journal.sync", "marker.create", "marker.release", "store.delete")
RECOVERY = [p for p in POINTS if p.startswith("recover.")] + ["journal.open.before", "journal.open.after", "store.list.before"]
ADOPTION = [p for p in POINTS if p.startswith("adopt.")] + ["store.list.before", "drop.before_append", "drop.after_append"]


def wreck(play: Play) -> None:
    """A run whose every process was killed, with something of each kind left."""
    env, orc, trn = play.env(fail="keep.before_append=kill:10"), play.orc(), play.trn(fail="leader.after_delete=kill")
    play.taken(env, orc, 4)
    orc.call("ship", 0)
    orc.call("drop", play.taken(env, orc, 1))
    play.taken(env, orc, 2)
    play.put(env, 2)
    play.trained(trn, 0)
    trn.dies("checkpoint_and_commit", 0)
    env.dies("put", play.numbers(1))
    orc.kill()
    play.store.put(f"obj/{env.inc}/.0000000077.tmp", [b"half"])


def recovered(play: Play) -> None:
    found = play.assert_proved()
    assert {k: v for k, v in found.totals.dropped_by.items() if k != "stale"} == {"trained": 4, "recovered": 4, "unjournaled": 1}


@pytest.mark.fault(8)
@pytest.mark.parametrize("point", RECOVERY)
def test_a_recovery_killed_at_any_of_its_steps_is_finished_by_the_next_one(play: Play, point: str) -> None:
    wreck(play)
    rec = play.rec(fail=f"{point}=kill")
    rec.post("recover", None)
    assert rec.wait() == -9
    recovered(play)


@pytest.mark.slow
@pytest.mark.fault(8)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_recovery_killed_before_or_after_any_single_operation_is_finished_by_the_next_one(
    tmp_path: Path, zygote: Zygote, operation: str
) -> None:
    for moment in ("before", "after"):
        number = 0
        while True:
            number += 1
            play = Play(zygote, tmp_path / f"{moment}{number}")
            wreck(play)
            rec = play.rec(fail=f"{operation}.{moment}=kill:{number}")
            rec.post("recover", None)
            rec.post("end")
            killed = rec.wait() == -9
            recovered(play)
            play.close()
            if not killed:
                break
        assert number > 1, f"recovery has no {operation}"


@pytest.mark.fault(8)
@pytest.mark.parametrize(
    "rule", ["journal.append.after=kill:3", "journal.append.before=kill:5", "marker.create.after=kill:2", "store.delete.after=kill:4"]
)
def test_a_recovery_killed_at_an_operation_is_finished_by_the_next_one(play: Play, rule: str) -> None:
    wreck(play)
    rec = play.rec(fail=rule)
    rec.post("recover", None)
    assert rec.wait() == -9
    recovered(play)


@pytest.mark.fault(8)
def test_recoveries_that_are_killed_one_after_the_other_end_with_one_that_is_not(play: Play) -> None:
    wreck(play)
    for point in RECOVERY:
        rec = play.rec(fail=f"{point}=kill")
        rec.post("recover", None)
        rec.post("end")
        rec.wait()
    recovered(play)


@pytest.mark.fault(8)
@pytest.mark.parametrize("point", ADOPTION)
def test_an_adoption_killed_at_any_of_its_steps_is_finished_by_an_heir(play: Play, point: str) -> None:
    env, orc = dead_worker(play, f"{point}=kill")
    orc.dies("adopt", env.inc)
    heir = play.orc()
    if env.inc in heir.call("dead"):
        heir.call("adopt", env.inc)
    heir.end()
    finished(play)


@pytest.mark.slow
@pytest.mark.fault(8)
@pytest.mark.parametrize("operation", ["journal.append", "journal.sync", "store.delete", "marker.create"])
def test_an_adoption_killed_before_or_after_any_single_operation_is_finished_by_recovery(
    tmp_path: Path, zygote: Zygote, operation: str
) -> None:
    for moment in ("before", "after"):
        number = 1 if operation == "marker.create" else 2  # the first records and syncs are those of its start
        while True:
            number += 1
            play = Play(zygote, tmp_path / f"{moment}{number}")
            env, orc = dead_worker(play, f"{operation}.{moment}=kill:{number}")
            orc.post("adopt", env.inc)
            orc.post("flush")
            orc.post("end")
            killed = orc.wait() == -9
            finished(play)
            play.close()
            if not killed:
                break


def dead_worker(play: Play, point: str) -> tuple[Child, Child]:
    """A reaped worker with kept, sent, taken, dropped and unrecorded objects; and the orchestrator that is to adopt it."""
    env = play.env(fail="keep.before_append=kill:8")
    orc = play.orc(fail=point)
    play.taken(env, orc, 2)
    play.reply(env, 2)
    env.call("discard", [s["id"] for s in play.put(env, 2)])
    play.put(env, 1)
    env.dies("put", play.numbers(1))
    play.store.put(f"obj/{env.inc}/.0000000077.tmp", [b"half"])
    play.dead(env)
    return env, orc


def finished(play: Play) -> None:
    found = close_run(play.store, play.ledger, run=play.run)
    assert found.verdict == "PROVED", "\n".join(found.render())
    totals = found.totals
    assert play.objects() == []
    assert (totals.kept, totals.extra, totals.dropped, totals.done) == (7, 1, 8, 8)
    assert (totals.dropped_by["never_sent"], totals.dropped_by["unjournaled"]) == (2, 1)


@pytest.mark.fault(8)
def test_a_recovery_that_stands_still_keeps_others_away_until_it_is_dead(play: Play) -> None:
    wreck(play)
    rec = play.rec(fail="recover.after_sync=pause")
    rec.post("recover", None)
    assert rec.wait() == 1000 + signal.SIGSTOP
    with pytest.raises(Refused, match=r"RunBusy: the recovery rec\.main\.\w+ may be alive"):
        play.rec().call("recover", None)
    rec.kill()
    recovered(play)


@pytest.mark.fault(15)
@pytest.mark.parametrize("point", ["recover.after_look=pause", "recover.after_sync=pause", "recover.after_delete=pause"])
def test_a_recovery_that_wakes_up_after_it_was_declared_dead_removes_nothing_more(play: Play, point: str) -> None:
    env, orc = play.env(), play.orc()
    play.taken(env, orc, 2)
    orc.call("ship", 0)
    play.taken(env, orc, 1)
    orc.call("drop", play.taken(env, orc, 1))
    for child in (env, orc):
        child.kill()
    zombie = play.rec(fail=point)
    zombie.post("recover", -1, "keep")
    assert zombie.wait() == 1000 + signal.SIGSTOP
    name = next(p.stem for p in play.ledger.glob("rec.*.jnl"))
    done = play.recover(-1, replay="keep", force_dead=[name])
    assert (done.adopted[name], done.pending) == ("forced", ())
    left = play.objects()
    zombie.signal(signal.SIGCONT)
    with pytest.raises(Refused, match="Fenced"):
        zombie.answer()
    assert play.objects() == left
    zombie.kill()
    play.kill_all()
    close_run(play.store, play.ledger, run=play.run)
    assert play.objects() == []
    assert set(play.audit().violation_counts) <= {"I8"}
