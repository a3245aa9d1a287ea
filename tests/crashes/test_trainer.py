"""A trainer that is killed at every step of its work; the next one reads the same bytes, and every step goes once."""

import pytest

from fsref.refs import object_name
from tests.support.roles import Child, Play

STEPS = 3


def published(play: Play) -> tuple[Child, Child]:
    """A worker and an orchestrator, with three steps that wait for a trainer."""
    env, orc = play.env(), play.orc()
    for step in range(STEPS):
        play.taken(env, orc, 4)
        orc.call("ship", step)
    return env, orc


def goes_on(play: Play, first: int) -> None:
    """A trainer that trains what is left, from step ``first``, and commits it."""
    trn = play.trn()
    for step in range(first, STEPS):
        play.trained(trn, step)
    trn.call("checkpoint", STEPS - 1)
    trn.call("commit", first, STEPS - 1)
    trn.call("flush")
    trn.end()


BEFORE_THE_CHECKPOINT = [
    "taken.before_append=kill:2",
    "taken.after_append=kill:2",  # T1
    "agree.before=kill:2",  # T2
    "agree.after=kill:2",
    "used.before_append=kill:2",
    "used.after_append=kill:2",  # T3
]
BEHIND_IT = [
    "checkpoint.after=kill:2",  # T4
    "drop_steps.before_append=kill:2",
    "drop_steps.after_append=kill:2",
    "drop_steps.after_sync=kill:2",
    "leader.before_delete=kill:4",  # T5: two leaders a commit, of which this is the second one's second
    "store.delete.after=kill:5",
    "leader.after_delete=kill:4",
    "done_steps.before_append=kill:2",
    "done_steps.after_append=kill:2",
]


@pytest.mark.fault(9)
@pytest.mark.parametrize("point", BEFORE_THE_CHECKPOINT + BEHIND_IT)
def test_the_next_trainer_reads_the_same_bytes_and_every_step_goes_once(play: Play, point: str) -> None:
    env, orc = published(play)
    trn = play.trn(fail=point)
    play.trained(trn, 0)
    trn.call("checkpoint", 0)
    trn.call("commit", 0, 0)
    if point in BEFORE_THE_CHECKPOINT:
        trn.dies("train", 1)
        assert play.checkpoint() == 0
        assert len(play.objects()) == 8
        goes_on(play, 1)
    else:
        play.trained(trn, 1)
        trn.dies("checkpoint_and_commit", 1)
        assert play.checkpoint() == 1
        goes_on_after_a_commit(play, point)
    for child in (orc, env):
        child.end()
    found = play.assert_proved({"trained": 12})
    assert found.violations == ()  # what a leader had removed already counts as its retry, not as lost


def goes_on_after_a_commit(play: Play, point: str) -> None:
    """Step 1 is behind the checkpoint: if its drop was not recorded the next trainer takes it over, else its removal is redone."""
    recorded = not point.startswith(("checkpoint.after", "drop_steps.before"))
    trn = play.trn()
    if not recorded:
        assert trn.call("take", 1) == 4
        trn.call("commit", 1, 1)
    play.trained(trn, 2)
    trn.call("checkpoint", 2)
    trn.call("commit", 2, 2)
    trn.call("flush")
    trn.end()


@pytest.mark.fault(11)
@pytest.mark.parametrize("by", ["the next trainer", "recovery"])
@pytest.mark.parametrize("point", ["store.delete.after=kill:1", "leader.after_delete=kill:1", "store.delete.before=kill:4"])
def test_a_leader_killed_half_way_through_its_share_has_the_rest_removed(play: Play, point: str, by: str) -> None:
    env, orc = play.env(), play.orc()
    ids = play.taken(env, orc, 4)
    orc.call("ship", 0)
    trn = play.trn(fail=point)
    play.trained(trn, 0)
    trn.dies("checkpoint_and_commit", 0)
    left = play.objects()
    assert 0 < len(left) < 4
    assert set(left) < set(map(object_name, ids))
    if by == "recovery":
        play.kill_all()
        assert play.recover(0).redone == 4
    else:
        again = play.trn()
        assert again.call("flush") == 0
        for child in (again, orc, env):
            child.end()
    totals = play.assert_proved({"trained": 4}).totals
    assert (totals.done, totals.done_retry) == (4, 4)


@pytest.mark.fault(10)
def test_a_death_before_the_all_reduce_removes_nothing_and_the_step_is_replayed(play: Play) -> None:
    env, orc = published(play)
    trn = play.trn(fail="agree.before=kill")
    trn.dies("train", 0)
    assert len(play.objects()) == 12
    goes_on(play, 0)
    for child in (orc, env):
        child.end()
    play.assert_proved({"trained": 12})


@pytest.mark.fault(9)
@pytest.mark.parametrize("point", ["succeed.after_fence=kill", "succeed.after_append=kill"])
def test_a_trainer_killed_while_it_takes_over_is_taken_over_itself(play: Play, point: str) -> None:
    env, orc = published(play)
    first = play.trn()
    play.trained(first, 0)
    first.kill()
    second = play.spawn_closed("trn", fail=point)
    assert second.wait() == -9
    goes_on(play, 0)
    for child in (orc, env):
        child.end()
    play.assert_proved({"trained": 12})
