"""An env worker that is killed at every step of its work: what an adopter finds, and that the run ends proved."""

import pytest

from fsref.refs import object_name
from tests.support.roles import Child, Play

BY = pytest.mark.parametrize("by", ["adoption", "recovery"])
"""Who settles what the worker left: a live orchestrator, or a recovery after everyone died."""


def settle(play: Play, by: str, env: Child, orc: Child) -> dict[str, int]:
    """What a live adopter counted; nothing where recovery is to settle it."""
    if by == "recovery":
        orc.kill()
        return {}
    play.dead(env)
    assert orc.call("dead") == [env.inc]
    found: dict[str, int] = orc.call("adopt", env.inc)
    orc.end()
    return found


def without_owner(by: str) -> str:
    """The reason under which a kept object that nobody took goes."""
    return "orphan" if by == "adoption" else "recovered"


@pytest.mark.fault(1)
@BY
@pytest.mark.parametrize("point", ["store.put.mid=kill", "store.put.written=kill:2"])
def test_a_worker_killed_while_it_writes_leaves_a_number_and_no_file(play: Play, point: str, by: str) -> None:
    orc, env = play.orc(), play.env(fail=point)  # the second put that is whole: the first one is the worker's probe
    env.dies("put", play.numbers(1))
    assert play.objects() == [f"obj/{env.inc}/.0000000000.tmp"]
    found = settle(play, by, env, orc)
    assert found.get("staging", 1) == 1
    totals = play.assert_proved({}).totals
    assert (totals.kept, totals.void, totals.extra) == (0, 1, 0)


@pytest.mark.fault(1)
def test_a_worker_killed_before_it_writes_leaves_nothing(play: Play) -> None:
    env = play.env(fail="store.put.before=kill:3")
    env.dies("put", play.numbers(2))
    assert play.objects() == [object_name(f"{env.inc}/0")]
    assert play.assert_proved({"recovered": 1}).totals.void == 0


@pytest.mark.fault(2)
@BY
@pytest.mark.parametrize("point", ["store.put.renamed=kill:3", "keep.before_append=kill:2", "journal.append.before=kill:3"])
def test_a_worker_killed_between_its_object_and_the_record_of_it(play: Play, point: str, by: str) -> None:
    orc, env = play.orc(), play.env(fail=point)
    env.dies("put", play.numbers(2))
    found = settle(play, by, env, orc)
    assert found.get("unjournaled", 1) == 1
    totals = play.assert_proved({without_owner(by): 1, "unjournaled": 1}).totals
    assert (totals.kept, totals.extra) == (1, 1)


@pytest.mark.fault(3)
@BY
@pytest.mark.parametrize("point", ["keep.after_append=kill:2", "journal.append.after=kill:3", "sent.before=kill"])
def test_a_worker_killed_before_its_reply_leaves_orphans(play: Play, point: str, by: str) -> None:
    orc, env = play.orc(), play.env(fail=point)
    env.dies("reply", play.request(), play.numbers(2))
    found = settle(play, by, env, orc)
    assert found.get("orphans", 2) == 2
    play.assert_proved({without_owner(by): 2})


@pytest.mark.fault(3)
def test_the_run_goes_on_with_the_dead_workers_successor(play: Play) -> None:
    orc, trn, env = play.orc(), play.trn(), play.env(fail="keep.after_append=kill:2")
    env.dies("reply", play.request(), play.numbers(2))
    play.dead(env)
    assert orc.call("adopt", env.inc)["orphans"] == 2
    successor = play.env()
    assert successor.inc != env.inc
    play.taken(successor, orc, 4)
    orc.call("ship", 0)
    play.trained(trn, 0)
    assert trn.call("commit", 0, 0) == 0
    for child in (trn, orc, successor):
        child.end()
    play.assert_proved({"orphan": 2, "trained": 4})


@pytest.mark.fault(4)
def test_a_reply_that_was_received_before_its_worker_was_adopted_is_used(play: Play) -> None:
    orc, trn, env = play.orc(), play.trn(), play.env()
    reply = play.reply(env)
    env.kill()
    play.dead(env)
    taken = orc.call("take", reply)  # the receive queue is drained first
    assert orc.call("adopt", env.inc)["orphans"] == 0
    orc.call("ship", 0, taken)
    play.trained(trn, 0)
    trn.call("commit", 0, 0)
    for child in (trn, orc):
        child.end()
    play.assert_proved({"trained": 2})


@pytest.mark.fault(4, 22)
def test_a_reply_that_comes_after_its_worker_was_adopted_is_refused_and_never_read(play: Play) -> None:
    orc, env = play.orc(), play.env()
    first, late = play.reply(env), play.reply(env)
    orc.call("take", first)
    env.kill()
    play.dead(env)
    assert orc.call("adopt", env.inc)["orphans"] == 2
    assert orc.call("take", late) == []
    assert orc.call("take", first) == []
    counters = orc.call("counters")
    assert (counters["late_refused"], counters["dup_reply"], counters["held"]) == (2, 2, 2)
    assert orc.call("flush") == 0
    assert play.objects() == sorted(object_name(s["id"]) for s in first["samples"])  # what was taken is still there to read
    orc.end()
    play.assert_proved({"orphan": 2, "shutdown": 2})


@pytest.mark.fault(4)
def test_a_worker_killed_between_its_last_act_and_the_transport_loses_its_reply(play: Play) -> None:
    orc, env = play.orc(), play.env(fail="sent.after=kill")
    env.dies("reply", play.request(), play.numbers(3))
    play.dead(env)
    assert orc.call("adopt", env.inc)["orphans"] == 3
    orc.end()
    play.assert_proved({"orphan": 3})


@pytest.mark.fault(5)
@BY
@pytest.mark.parametrize(
    "point",
    [
        "drop.after_append=kill",
        "deleter.before_sync=kill",
        "deleter.after_sync=kill",
        "store.delete.before=kill:2",  # the first one is the probe
        "store.delete.after=kill:3",
        "deleter.after_delete=kill",
    ],
)
def test_a_worker_killed_between_its_decision_and_done_has_it_carried_out(play: Play, point: str, by: str) -> None:
    orc, env = play.orc(), play.env(fail=point)
    ids = [s["id"] for s in play.put(env, 3)]
    env.dies("discard", ids)
    found = settle(play, by, env, orc)
    assert found.get("redone", 3) == 3
    totals = play.assert_proved({"never_sent": 3}).totals
    assert (totals.dropped, totals.done, totals.done_retry) == (3, 3, 3)


@pytest.mark.fault(5)
def test_a_worker_killed_after_done_leaves_nothing_to_do(play: Play) -> None:
    orc, env = play.orc(), play.env(fail="deleter.after_done=kill")
    env.dies("discard", [s["id"] for s in play.put(env, 3)])
    assert settle(play, "adoption", env, orc)["redone"] == 0
    assert play.assert_proved({"never_sent": 3}).totals.done_retry == 0


@pytest.mark.fault(5)
def test_a_worker_killed_on_closing_has_decided_about_all_that_it_never_sent(play: Play) -> None:
    orc, env = play.orc(), play.env(fail="close.before_append=kill")
    play.put(env, 3)
    env.dies("close")
    settle(play, "adoption", env, orc)
    play.assert_proved({"never_sent": 3})


@pytest.mark.fault(6)
def test_a_whole_pool_dies_and_returns_under_the_same_labels(play: Play) -> None:
    labels = [f"math-{n}-0" for n in range(9)]
    orc = play.orc()
    first = [play.env(label) for label in labels]
    kept = [play.taken(env, orc, 1) for env in first]
    for env in first:
        play.put(env, 1)
    play.kill_only(first)
    for env in first:
        play.dead(env)
    second = [play.env(label) for label in labels]
    assert sorted(orc.call("dead")) == sorted(env.inc for env in first)
    assert [orc.call("adopt", env.inc)["orphans"] for env in first] == [1] * 9
    again = [play.taken(env, orc, 1) for env in second]
    assert len({i for ids in kept + again for i in ids}) == 18
    orc.end()
    for env in second:
        env.end()
    found = play.assert_proved({"orphan": 9, "shutdown": 18})
    assert found.totals.producers_adopted == {"dead": 9}
    assert len({env.inc for env in first + second}) == 18


@pytest.mark.fault(1)
@pytest.mark.parametrize(
    "point", ["journal.open.before=kill", "journal.open.after=kill", "store.put.renamed=kill", "store.delete.after=kill"]
)
def test_a_worker_killed_while_it_starts_leaves_nothing_to_settle(play: Play, point: str) -> None:
    env = play.spawn_closed("env", fail=point)
    assert env.wait() == -9
    play.taken(play.env(), play.orc(), 1)
    play.kill_all()
    play.assert_proved({"recovered": 1})


@pytest.mark.fault(6)
@pytest.mark.parametrize("point", ["close.before_append=kill", "close.after_sync=kill", "journal.open.before=kill:2"])
def test_a_worker_killed_between_two_sessions_is_settled_like_any_other(play: Play, point: str) -> None:
    orc, env = play.orc(), play.env(fail=point)
    play.reply(env, 2)
    held = play.taken(env, orc, 1)
    first = env.inc
    env.dies("rotate")
    if not point.startswith("close.before"):
        assert orc.call("adopt", first)["how"] == "closed"
        assert orc.call("drop", held) == 1
        orc.end()
        play.assert_proved({"orphan": 2, "stale": 1})
    else:
        play.dead(env)
        assert orc.call("adopt", first)["orphans"] == 2
        orc.end()
        play.assert_proved({"orphan": 2, "shutdown": 1})
