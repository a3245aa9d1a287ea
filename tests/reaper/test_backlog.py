"""What is dropped and cannot be removed yet: nothing is forgotten, and it costs next to nothing."""

import tracemalloc

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from fsref.ledger import Verdict
from fsref.reaper.backlog import ATTEMPT_MAX, Backlog
from tests.reaper.stage import Stage

INC = "env.a.0000000000000001"
OTHER = "env.b.0000000000000002"


@given(st.integers(1, 8), st.lists(st.tuples(st.sampled_from(["add", "take", "fail", "wake"]), st.integers(0, 30)), max_size=60))
def test_every_id_that_goes_in_comes_out_once(ids_max: int, ops: list[tuple[str, int]]) -> None:
    backlog = Backlog(ids_max=ids_max)
    added: set[str] = set()
    out: dict[str, int] = {}
    now = 0.0
    for op, number in ops:
        if op == "add":
            fresh = [f"{inc}/{len(added) + n}" for n in range(number) for inc in (INC, OTHER)]
            added.update(fresh)
            backlog.add(fresh, attempt=0)
        elif op == "take":
            some = backlog.take(number)
            assert len(some) <= number
            out |= some
        elif op == "fail" and out:
            back = {o: out.pop(o) + 1 for o in list(out)[:number]}
            backlog.wait(back, due_s=now + 1.0)
        else:
            now += number / 10
            backlog.wake(now)
        assert len(backlog) + len(out) == len(added)
    backlog.wake(now + 2.0)
    assert backlog.next_due_s is None
    out |= backlog.take(10_000)
    assert (set(out), len(backlog), backlog.ready) == (added, 0, 0)


def test_attempts_are_remembered_and_stop_counting_at_their_limit() -> None:
    backlog = Backlog(ids_max=1)
    backlog.add([f"{INC}/0", f"{INC}/1"], attempt=1)
    backlog.wait({f"{INC}/2": 3, f"{INC}/3": 1 << 20}, due_s=5.0)
    assert (backlog.ready, backlog.next_due_s) == (2, 5.0)
    backlog.wake(4.9)
    assert backlog.ready == 2
    backlog.wake(5.0)
    assert backlog.take(9) == {f"{INC}/0": 1, f"{INC}/1": 1, f"{INC}/2": 3, f"{INC}/3": ATTEMPT_MAX}


def test_an_outage_costs_eight_bytes_for_each_id() -> None:
    count, backlog = 300_000, Backlog(ids_max=1000)
    tracemalloc.start()
    for at in range(0, count, 1000):
        backlog.add([f"{INC}/{2 * n}" for n in range(at, at + 1000)], attempt=0)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(backlog) == count
    assert size < 12 * count + (1 << 20)


def test_what_was_dropped_while_the_store_failed_is_removed_when_it_heals(stage: Stage) -> None:
    stage.section = msgspec.structs.replace(stage.section, queue_ids_max=3, batch_ids_max=5)
    env, orc = stage.env(), stage.orc()
    stage.store.delete_failures = 6
    held = stage.reply(env, orc, 40)
    for at in range(0, 40, 4):
        orc.drop(held[at : at + 4], "filtered")
    assert orc.flush() == 0
    assert (stage.objects(), orc.counters["done"]) == ([], 40)
    assert orc.counters["retried"] > 0
    orc.close()
    env.close()
    assert stage.audit().verdict is Verdict.PROVED
