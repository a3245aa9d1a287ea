"""Replies and steps that are lost, doubled, late or crossed; calls that are made twice or by the wrong party."""

import msgspec
import pytest

from fsref import steps
from fsref.errors import StoreUnavailable
from fsref.reaper import Verdict
from fsref.refs import object_name
from fsref.steps import info_name, rank_file_name, read_info
from tests.support.roles import Play, Refused


@pytest.mark.fault(17)
@pytest.mark.parametrize("meanwhile", ["held", "dropped", "shipped"])
def test_a_reply_that_comes_twice_is_counted_and_changes_nothing(play: Play, meanwhile: str) -> None:
    env, orc, trn = play.env(), play.orc(), play.trn()
    reply = play.reply(env, 3)
    ids = orc.call("take", reply)
    if meanwhile == "dropped":
        orc.call("drop", ids, "filtered")
        orc.call("flush")
    elif meanwhile == "shipped":
        orc.call("ship", 0)
        play.trained(trn, 0)
        trn.call("commit", 0, 0)
    assert orc.call("take", reply) == []
    counters = orc.call("counters")
    assert (counters["dup_reply"], counters["taken"], counters["held"]) == (3, 3, 3 if meanwhile == "held" else 0)
    for child in (trn, orc, env):
        child.end()
    play.assert_proved({{"held": "shutdown", "dropped": "filtered", "shipped": "trained"}[meanwhile]: 3})


@pytest.mark.fault(18)
def test_a_reply_that_is_lost_and_then_cancelled_is_removed_as_abandoned(play: Play) -> None:
    env, orc = play.env(), play.orc()
    reply = play.reply(env, 3)  # lost
    assert env.call("counters")["unclaimed"] == 3
    assert env.call("nack", reply["request"]) == 3
    assert env.call("flush") == 0
    assert play.objects() == []
    assert env.call("nack", reply["request"]) == 0  # the cancel comes twice
    assert (env.call("counters")["unclaimed"], env.call("counters")["nack_unknown"]) == (0, 1)
    orc.end()
    env.end()
    play.assert_proved({"abandoned": 3})


@pytest.mark.fault(19)
def test_a_reply_and_a_nack_that_are_both_lost_wait_for_the_end(play: Play) -> None:
    env, orc = play.env(), play.orc()
    play.reply(env, 3)
    assert env.call("counters")["unclaimed"] == 3
    orc.end()
    env.end()
    found = play.audit()
    assert (found.verdict, found.totals.live) == (Verdict.BALANCED, 3)  # nobody has guessed
    assert len(play.objects()) == 3
    play.assert_proved({"recovered": 3})


@pytest.mark.fault(19)
def test_what_a_closed_worker_left_unclaimed_can_be_adopted_while_the_run_goes_on(play: Play) -> None:
    env, orc = play.env(), play.orc()
    play.reply(env, 3)
    old = env.inc
    env.call("rotate")
    assert orc.call("adopt", old)["orphans"] == 3
    assert len(play.taken(env, orc, 1)) == 1
    orc.end()
    env.end()
    play.assert_proved({"orphan": 3, "shutdown": 1})


@pytest.mark.fault(23)
def test_a_step_that_never_comes_ends_the_wait_loudly(play: Play) -> None:
    env, orc = play.env(), play.orc(fail="steps.before_info=exit")
    play.taken(env, orc)
    orc.post("ship", 0)
    assert orc.wait() == 70
    with pytest.raises(StoreUnavailable, match="step_000000 was not published within"):
        steps.wait(play.store, 0, deadline_s=0.05, poll_s=0.01)
    env.end()
    play.assert_proved({"recovered": 2})


@pytest.mark.fault(23)
def test_a_step_that_is_read_twice_is_taken_once_also_by_the_next_trainer(play: Play) -> None:
    env, orc, trn = play.env(), play.orc(), play.trn()
    play.taken(env, orc)
    orc.call("ship", 0)
    play.trained(trn, 0)
    play.trained(trn, 0)
    assert trn.call("counters")["steps_taken"] == 1
    trn.kill()
    again = play.trn()
    play.trained(again, 0)
    again.call("commit", 0, 0)
    for child in (again, orc, env):
        child.end()
    play.assert_proved({"trained": 2})


@pytest.mark.fault(23)
def test_another_batch_under_a_number_that_was_taken_is_refused(play: Play) -> None:
    env, orc, trn = play.env(), play.orc(), play.trn()
    play.taken(env, orc)
    orc.call("ship", 0)
    trn.call("take", 0)
    play.taken(env, orc)
    with pytest.raises(Refused, match="NotHolder: step 0 was shipped before"):
        orc.call("ship", 0)
    info = read_info(play.store, 0)
    play.store.replace(info_name(0), msgspec.json.encode(msgspec.structs.replace(info, sum=info.sum ^ 1)))
    with pytest.raises(Refused, match="StepError: step_000000: 2 owned ids do not match the 2 shipped ones"):
        trn.call("take", 0)
    assert len(play.objects()) == 4
    play.kill_all()
    play.assert_proved({"recovered": 4})


@pytest.mark.fault(24)
@pytest.mark.parametrize("how", ["absent", "left out"])
def test_a_step_without_one_of_its_rank_files_is_refused_before_it_is_taken(play: Play, how: str) -> None:
    env, orc, trn = play.env(), play.orc(), play.trn()
    play.taken(env, orc, 4)
    orc.call("ship", 0)
    info = read_info(play.store, 0)
    if how == "absent":
        play.store.delete([rank_file_name(0, 1)])
    else:
        short = msgspec.structs.replace(info, data_ranks=1, digests=info.digests[:1])
        play.store.replace(info_name(0), msgspec.json.encode(short))
    with pytest.raises(Refused, match="ObjectMissing" if how == "absent" else "2 owned ids do not match the 4 shipped ones"):
        trn.call("take", 0)
    assert trn.call("counters")["steps_taken"] == 0
    play.kill_all()
    play.assert_proved({"recovered": 4})


@pytest.mark.fault(25)
def test_a_commit_or_a_drop_that_is_made_twice_is_suppressed_and_counted(play: Play) -> None:
    env, orc, trn = play.env(), play.orc(), play.trn()
    ids = play.taken(env, orc, 4)
    orc.call("drop", ids[:2])
    orc.call("drop", ids[:2])
    orc.call("ship", 0, ids[2:])
    play.trained(trn, 0)
    trn.call("commit", 0, 0)
    trn.call("drop_again", 0, 0)
    assert orc.call("counters")["suppressed"] == 2
    assert trn.call("counters")["suppressed"] == 1
    for child in (trn, orc, env):
        child.end()
    assert play.assert_proved({"stale": 2, "trained": 2}).totals.suppressed == 3


@pytest.mark.fault(25)
def test_in_strict_mode_the_second_one_raises(play: Play) -> None:
    env, orc, trn = play.env(strict=True), play.orc(strict=True), play.trn(strict=True)
    ids = play.taken(env, orc, 4)
    orc.call("drop", ids[:2])
    with pytest.raises(Refused, match="DoubleDrop"):
        orc.call("drop", ids[:2])
    orc.call("ship", 0, ids[2:])
    play.trained(trn, 0)
    trn.call("commit", 0, 0)
    with pytest.raises(Refused, match="DoubleDrop"):
        trn.call("drop_again", 0, 0)
    unsent = [s["id"] for s in play.put(env, 1)]
    env.call("discard", unsent)
    with pytest.raises(Refused, match="DoubleDrop"):
        env.call("discard", unsent)
    for child in (trn, orc, env):
        child.end()
    play.assert_proved({"stale": 2, "trained": 2, "never_sent": 1})


@pytest.mark.fault(27)
def test_nobody_removes_what_it_does_not_hold(play: Play) -> None:
    env, orc, trn = play.env(), play.orc(), play.trn()
    reply = play.reply(env)
    sent = [s["id"] for s in reply["samples"]]
    foreign = ["env.math-0-0.00000000000000aa/0"]  # of another run, or of nobody
    for who, do, ids in ((orc, "drop", sent), (orc, "drop", foreign), (env, "discard", sent), (env, "discard", foreign)):
        with pytest.raises(Refused, match="NotHolder"):
            who.call(do, ids)
    orc.call("take", reply)
    with pytest.raises(Refused, match="NotHolder"):
        orc.call("drop", [sent[0], *foreign])  # then nothing of it
    with pytest.raises(Refused, match=r"NotHolder: steps 0\.\.0 cannot be dropped"):
        trn.call("drop_again", 0, 0)
    assert play.objects() == sorted(map(object_name, sent))
    for child in (trn, orc, env):
        child.end()
    play.assert_proved({"shutdown": 2})


@pytest.mark.fault(28)
def test_a_trainer_that_resumes_before_its_last_commit_is_told_which_one_that_was(play: Play) -> None:
    env, orc, trn = play.env(), play.orc(), play.trn()
    for step in range(3):
        play.taken(env, orc)
        orc.call("ship", step)
        play.trained(trn, step)
    trn.call("commit", 0, 1)
    first = trn.inc
    trn.kill()
    again = play.trn()
    with pytest.raises(Refused, match=rf"StepReleased: the arrays of step 1 were removed by the commit of steps 0\.\.1 by {first}"):
        again.call("take", 1)
    play.trained(again, 2)
    again.call("commit", 2, 2)
    for child in (again, orc, env):
        child.end()
    play.assert_proved({"trained": 6})


@pytest.mark.fault(29)
def test_an_object_that_somebody_removed_from_a_step_is_missed_dropped_and_reported_as_lost(play: Play) -> None:
    env, orc, trn = play.env(), play.orc(), play.trn()
    ids = play.taken(env, orc, 4)
    orc.call("ship", 0)
    play.remove_by_hand(ids[1])
    trn.call("take", 0)
    found = trn.call("fetch", 0)
    assert found.pop("1") == "missing"
    play.check_arrays(found)
    trn.call("use", 0, {ids[1]: "missing"})
    trn.call("commit", 0, 0)
    for child in (trn, orc, env):
        child.end()
    found = play.audit()
    assert (found.verdict, found.exit_code, found.violation_counts) == (Verdict.VIOLATED, 1, {"lost": 1})
    assert found.violations[0].subject == ids[1]
    assert found.totals.dropped_by == {"trained": 3, "fetch_failed": 1}
    assert play.objects() == []


@pytest.mark.fault(29)
@pytest.mark.parametrize("then", ["dropped", "recovered"])
def test_an_object_that_somebody_removed_while_it_was_held_is_reported_as_lost(play: Play, then: str) -> None:
    env, orc = play.env(), play.orc()
    ids = play.taken(env, orc, 2)
    play.remove_by_hand(ids[0])
    if then == "dropped":
        orc.call("drop", ids)
        orc.end()
        env.end()
        found = play.audit()
    else:
        play.kill_all()
        assert play.recover(None).lost == 1
        found = play.audit()
    assert (found.verdict, found.exit_code, found.violation_counts) == (Verdict.VIOLATED, 1, {"lost": 1})
    assert play.objects() == []


@pytest.mark.fault(30)
def test_a_foreign_file_among_the_objects_is_named_and_left_alone(play: Play) -> None:
    env = play.env()
    play.put(env, 1)
    foreign = play.root / play.name / "obj" / env.inc / "notes.txt"
    foreign.write_text("mine")
    env.kill()
    done = play.recover(None)
    assert (done.recovered, done.unexpected) == (1, (f"obj/{env.inc}/notes.txt",))
    found = play.audit()
    assert (found.verdict, found.violation_counts) == (Verdict.VIOLATED, {"unexpected": 1})
    assert foreign.read_text() == "mine"
    play.recover(None, remove_unexpected=True)
    assert not foreign.exists()
    play.assert_proved({"recovered": 1})


@pytest.mark.fault(16)
def test_a_forked_child_cannot_write_in_its_parents_journal(play: Play) -> None:
    env, orc = play.env(), play.orc()
    play.taken(env, orc, 1)
    assert env.call("fork_and_keep") == "41"  # JournalPoisoned
    play.taken(env, orc, 1)  # the parent, its lock and its journal are as before
    with pytest.raises(Refused, match="may be alive"):
        orc.call("adopt", env.inc)
    orc.end()
    env.end()
    totals = play.assert_proved({"shutdown": 2}).totals
    assert (totals.kept, totals.void) == (2, 1)
