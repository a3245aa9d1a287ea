"""An orchestrator that is killed at every step of its work, its successor, its zombie, and its end by a signal."""

import signal
from pathlib import Path

import pytest

from fsref.errors import RunMismatch
from fsref.journal.file import journal_path
from fsref.journal.markers import read_adopted
from fsref.reaper import Verdict, audit, close_run
from fsref.refs import object_name
from tests.support.roles import Play, Refused, Zygote


def survivors_go_on(play: Play, *, steps: list[int]) -> dict[str, int]:
    """A new orchestrator ships the last of these steps, a trainer trains them all, and everyone ends; the drops of the new step."""
    env, orc, trn = play.env(), play.orc(), play.trn()
    play.taken(env, orc, 2)
    orc.call("ship", steps[-1])
    for step in steps:
        play.trained(trn, step)
    trn.call("commit", steps[0], steps[-1])
    for child in (trn, orc, env):
        child.end()
    return {"trained": 2}


@pytest.mark.fault(7)
@pytest.mark.parametrize("by", ["succession", "recovery"])
@pytest.mark.parametrize(
    "point",
    [
        "take.before_append=kill:2",  # O1
        "take.after_append=kill:2",  # O2
        "ship.before_append=kill",  # O4
        "ship.after_append=kill",
        "ship.after_sync=kill",  # O5
        "steps.before_info=kill",
        "steps.after_info=kill",  # O6
    ],
)
def test_what_a_killed_orchestrator_held_is_settled_and_the_next_one_goes_on(play: Play, point: str, by: str) -> None:
    env, orc = play.env(), play.orc(fail=point)
    first, second = play.reply(env), play.reply(env)
    orc.call("take", first)
    if point.startswith("take"):
        orc.dies("take", second)
    else:
        orc.call("take", second)
        orc.dies("ship", 0)
    visible = point.startswith("steps.after_info")
    if by == "recovery":
        env.kill()
        assert play.recover(-1).recovered == 4
        assert play.objects() == []
        visible = False
    gone = survivors_go_on(play, steps=[0, 1] if visible else [1])
    if by == "succession":
        env.end()  # lived on
    play.assert_proved({"trained": 6} if visible else {**gone, "recovered": 4})


@pytest.mark.fault(7)
def test_a_step_that_could_be_seen_when_the_orchestrator_died_is_replayed_where_asked(play: Play) -> None:
    env, orc = play.env(), play.orc(fail="steps.after_info=kill")
    play.taken(env, orc, 4)
    orc.dies("ship", 0)
    env.kill()
    assert play.recover(-1, replay="keep").parked == 4
    trn = play.trn()
    play.trained(trn, 0)
    trn.call("commit", 0, 0)
    trn.end()
    play.assert_proved({"trained": 4})


@pytest.mark.fault(7)
def test_a_step_whose_file_never_appeared_is_not_replayed(play: Play) -> None:
    env, orc = play.env(), play.orc(fail="steps.before_info=kill")
    play.taken(env, orc, 4)
    orc.dies("ship", 0)
    env.kill()
    assert play.recover(-1, replay="keep").parked == 0
    with pytest.raises(Refused, match="ObjectMissing"):
        play.trn().call("take", 0)
    play.kill_all()
    play.assert_proved({"recovered": 4})


@pytest.mark.fault(7)
@pytest.mark.parametrize(
    "point",
    [
        "drop.after_append=kill",
        "deleter.before_sync=kill",
        "deleter.after_sync=kill",
        "store.delete.before=kill",
        "store.delete.after=kill:2",
        "deleter.after_delete=kill",
    ],
)
def test_a_removal_that_the_orchestrator_decided_is_carried_out_by_its_heir(play: Play, point: str) -> None:
    env, orc = play.env(), play.orc(fail=point)
    orc.dies("drop", play.taken(env, orc, 3))
    env.end()
    totals = play.assert_proved({"stale": 3}).totals
    assert (totals.done, totals.done_retry) == (3, 3)


@pytest.mark.fault(7)
@pytest.mark.parametrize("point", ["close.before_append=kill", "close.after_sync=kill"])
def test_an_orchestrator_killed_at_its_end_has_decided_about_all_that_it_held(play: Play, point: str) -> None:
    env, orc = play.env(), play.orc(fail=point)
    play.taken(env, orc, 3)
    orc.dies("close")
    gone = survivors_go_on(play, steps=[0])
    env.end()
    play.assert_proved({"shutdown": 3, **gone})


@pytest.mark.fault(7, 8)
@pytest.mark.parametrize("point", ["succession.after_fence=kill", "succession.after_append=kill", "drop.after_append=kill"])
def test_an_orchestrator_killed_while_it_takes_over_is_taken_over_itself(play: Play, point: str) -> None:
    env, first = play.env(), play.orc()
    play.taken(env, first, 3)
    first.kill()
    second = play.spawn_closed("orc", fail=point)
    assert second.wait() == -9
    gone = survivors_go_on(play, steps=[0])
    env.end()
    play.assert_proved({"recovered": 3, **gone})


@pytest.mark.fault(60)
def test_a_second_orchestrator_waits_for_the_first_one_to_die(play: Play) -> None:
    env, orc = play.env(), play.orc()
    play.taken(env, orc)
    with pytest.raises(Refused, match=f"RunBusy: {orc.inc} may be alive"):
        play.orc()
    orc.kill()
    gone = survivors_go_on(play, steps=[0])
    env.end()
    play.assert_proved({"recovered": 2, **gone})


@pytest.mark.fault(60)
def test_a_run_that_is_alive_cannot_be_recovered(play: Play) -> None:
    env, orc, trn = play.env(), play.orc(), play.trn()
    for alive in (env, orc, trn):
        with pytest.raises(Refused, match="RunBusy") as refused:
            play.rec().call("recover", -1)
        assert alive.inc in refused.value.text
        alive.end()
    play.assert_proved({})


@pytest.mark.fault(15)
@pytest.mark.parametrize("point", ["deleter.before_sync=pause", "deleter.after_sync=pause"])
def test_a_zombie_that_wakes_up_after_it_was_adopted_deletes_nothing_and_stops(play: Play, point: str) -> None:
    env, orc = play.env(), play.orc(fail=point)
    held = play.taken(env, orc, 4)
    orc.call("drop", held[:2])
    assert orc.wait() == 1000 + signal.SIGSTOP
    env.kill()
    with pytest.raises(Refused, match=f"RunBusy.*{orc.inc}"):
        play.rec().call("recover", -1)  # a stopped process holds its lock
    done = play.recover(-1, force_dead=[orc.inc])
    assert (done.adopted[orc.inc], done.redone, done.recovered) == ("forced", 2, 2)
    successor = play.env()
    fresh = play.put(successor, 2)
    orc.signal(signal.SIGCONT)
    with pytest.raises(Refused, match="Fenced"):
        orc.call("flush_then_check")
    with pytest.raises(Refused, match=f"Fenced.*adopted by {read_adopted(play.place, orc.inc)}"):
        orc.call("drop", held[2:])
    with pytest.raises(Refused, match="Fenced"):
        orc.call("ship", 7, [])
    with pytest.raises(Refused, match="Fenced"):
        orc.call("take", play.reply(successor, 1))
    assert set(play.objects()) >= {object_name(s["id"]) for s in fresh}
    assert play.audit().violations == ()  # it found the fence before it wrote anything
    with pytest.raises(Refused, match="Fenced"):
        orc.call("close")
    orc.stop()
    successor.end()
    play.assert_proved({"stale": 2, "recovered": 3, "never_sent": 2})


@pytest.mark.fault(15)
def test_a_zombie_that_writes_before_it_looks_is_seen_in_the_audit(play: Play) -> None:
    env, orc = play.env(), play.orc()
    held = play.taken(env, orc, 2)
    orc.signal(signal.SIGSTOP)
    env.kill()
    play.recover(-1, force_dead=[orc.inc])
    orc.signal(signal.SIGCONT)
    orc.call("drop", held)  # the holder looks at its fence before it deletes and ships, not at each record
    with pytest.raises(Refused, match="Fenced"):
        orc.call("flush_then_check")
    found = play.audit()
    assert (found.verdict, found.violation_counts) == (Verdict.VIOLATED, {"I8": 1})
    assert found.violations[0].places == ((orc.inc, found.violations[0].places[0][1]),)
    assert found.totals.dropped_by == {"recovered": 2}  # what it wrote counts for nothing
    orc.kill()


@pytest.mark.fault(62)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_orchestrator_that_is_asked_to_end_drops_exactly_what_it_holds(play: Play, number: signal.Signals) -> None:
    env, orc, trn = play.env(), play.orc(), play.trn()
    orc.call("close_on_signals")
    ids = play.taken(env, orc, 9)
    orc.call("ship", 0, ids[:2])
    orc.call("drop", ids[2:5], "group_dropped")
    in_flight = play.reply(env, 2)
    orc.signal(number)
    assert orc.wait() == 0
    assert (env.call("counters")["unclaimed"], len(in_flight["samples"])) == (11, 2)
    play.trained(trn, 0)
    trn.call("commit", 0, 0)
    trn.end()
    env.end()
    play.assert_proved({"shutdown": 4, "group_dropped": 3, "trained": 2, "recovered": 2})


@pytest.mark.fault(63)
def test_removals_that_the_shutdown_has_no_time_for_are_named_and_finished_by_the_close(play: Play) -> None:
    env, orc = play.env(), play.orc(fail="store.delete.before=raise(EIO):1+")
    held = play.taken(env, orc, 3)
    assert orc.call("close", deadline_s=0.0) == 3
    orc.stop()
    env.end()
    found = play.audit()
    assert (found.verdict, found.totals.pending, sorted(found.pending_ids)) == (Verdict.BALANCED, 3, sorted(held))
    assert "pending 3" in "\n".join(found.render())
    assert play.assert_proved({"shutdown": 3}).totals.done_retry == 3


@pytest.mark.fault(59)
def test_recovering_one_run_does_not_touch_another_one_in_the_same_root(zygote: Zygote, tmp_path: Path) -> None:
    one, two = Play(zygote, tmp_path, "one"), Play(zygote, tmp_path, "two")
    dead, alive = (one.env(), one.orc()), (two.env(), two.orc())
    one.taken(*dead)
    held = two.taken(*alive)
    one.put(dead[0])
    one.kill_all()
    before = {p: p.read_bytes() for p in (tmp_path / "two").rglob("*") if p.is_file()}
    one.assert_proved({"recovered": 4})
    assert {p: p.read_bytes() for p in (tmp_path / "two").rglob("*") if p.is_file()} == before
    assert alive[1].call("drop", held) == 2
    for child in reversed(alive):
        child.end()
    two.assert_proved({"stale": 2})
    for play in (one, two):
        play.close()


@pytest.mark.fault(61)
def test_a_project_that_reuses_the_folder_of_another_one_is_refused(play: Play, zygote: Zygote) -> None:
    env, orc = play.env(), play.orc()
    play.taken(env, orc)
    play.kill_all()
    before = play.objects()
    (play.root / play.name / "run.json").unlink()
    again = Play(zygote, play.root, play.name)
    assert again.run.run_uuid != play.run.run_uuid
    for act in (lambda: again.recover(None), again.audit, lambda: close_run(again.store, again.ledger, run=again.run)):
        with pytest.raises(RunMismatch, match="used by another run"):
            act()
    for role in ("orc", "trn"):
        with pytest.raises(Refused, match="RunMismatch"):
            again.spawn(role)
    assert play.objects() == before
    again.close()


@pytest.mark.fault(65)
@pytest.mark.parametrize("how", ["removed", "a folder", "a link"])
def test_a_journal_that_cannot_be_read_is_named_and_nothing_is_called_ok(play: Play, how: str) -> None:
    env, orc = play.env(), play.orc()
    orc.call("drop", play.taken(env, orc))
    orc.end()
    env.end()
    assert play.assert_proved({"stale": 2}).exit_code == 0
    path = journal_path(play.ledger, env.inc)
    path.rename(play.root / "elsewhere")
    if how == "a folder":
        path.mkdir()
    elif how == "a link":
        path.symlink_to(play.root / "elsewhere")
    found = audit(play.store, play.ledger, run=play.name)
    assert (found.verdict, found.exit_code) == (Verdict.UNPROVABLE, 20)
    assert any(env.inc in problem for problem in found.problems)
