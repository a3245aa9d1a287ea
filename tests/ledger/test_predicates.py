"""Each invariant fails on a history that breaks it, and only on such a one."""

import itertools

import pytest

from fsref.ledger.predicates import PREDICATES, Evidence, StoreView, violations
from fsref.ledger.records import Close
from fsref.ledger.report import Verdict, conclude
from tests.support.journals import Book, broken, env, ids, judged, merged, orc, rec, trn


def shipped(*seqs: int, step: int = 0) -> tuple[Book, Book, Book, list[str]]:
    """An env, an orchestrator and a trainer with one shipped and taken step."""
    e, o, t = env(), orc(), trn()
    e.keep(*seqs)
    those = ids(e, *seqs)
    o.take(*those)
    o.ship(step, *those)
    t.step(step, *those)
    return e, o, t, those


def close_all(e: Book, o: Book, t: Book, *, kept: int, shipped_count: int, steps: int = 1) -> None:
    e.close(n=kept, kept=kept, kept_bytes=100 * kept)
    o.close(taken=kept, shipped=shipped_count, shipped_bytes=100 * shipped_count)
    t.close(steps_taken=steps, steps_dropped=steps)


def test_a_clean_run_is_proved() -> None:
    e, o, t, _ = shipped(0, 1)
    t.drop_steps(0, 0)
    t.done_steps(0, 0)
    close_all(e, o, t, kept=2, shipped_count=2)
    found = judged(e, o, t)
    assert (found.verdict, found.exit_code, found.violations) == (Verdict.PROVED, 0, ())


def test_an_open_run_without_a_violation_is_balanced() -> None:
    e, o, t, those = shipped(0, 1)
    found = judged(e, o, t, present=those)
    assert (found.verdict, found.exit_code, found.totals.live) == (Verdict.BALANCED, 10, 2)


def test_i1_fails_for_a_second_keep_of_an_id() -> None:
    e = env()
    e.keep(0, 0)
    assert broken(e, present=ids(e, 0)) == {"I1"}


def test_i1_fails_for_a_hole_that_nobody_explains() -> None:
    e = env()
    e.keep(0, 2)
    e.close(n=3, kept=2, kept_bytes=200)
    assert broken(e, present=ids(e, 0, 2)) == {"I1"}


def test_i1_accepts_a_hole_that_is_declared_void() -> None:
    e = env()
    e.keep(0, 2)
    e.close(n=3, void="1", kept=2, kept_bytes=200)
    assert broken(e, present=ids(e, 0, 2)) == set()


@pytest.mark.fault(26)
def test_i2_fails_for_a_worker_and_an_orchestrator_that_both_drop_and_names_both_offsets() -> None:
    e, o = env(), orc()
    e.keep(0)
    o.take(*ids(e, 0))
    first = e.drop("abandoned", *ids(e, 0))
    second = o.drop("filtered", *ids(e, 0))
    found = [v for v in judged(e, o, present=ids(e, 0)).violations if v.predicate == "I2"]
    assert [set(v.places) for v in found] == [{(e.inc, first), (o.inc, second)}]
    assert judged(e, o).exit_code == 1


@pytest.mark.fault(25)
def test_i2_fails_for_one_holder_that_drops_twice() -> None:
    e, o = env(), orc()
    e.keep(0)
    o.take(*ids(e, 0))
    o.drop("filtered", *ids(e, 0))
    o.drop("stale", *ids(e, 0))
    assert broken(e, o, present=ids(e, 0)) == {"I2"}


@pytest.mark.fault(26)
def test_i2_fails_for_two_trainers_that_drop_the_same_step() -> None:
    e, o, t, those = shipped(0)
    t.drop_steps(0, 0)
    second = trn(30)
    second.adopt(t)
    second.step(0, *those)
    second.drop_steps(0, 0)
    assert "I2" in broken(e, o, t, second, present=those)


def test_i3_fails_for_an_orchestrator_that_never_took_the_object() -> None:
    e, o = env(), orc()
    e.keep(0)
    o.drop("filtered", *ids(e, 0))
    assert broken(e, o, present=ids(e, 0)) == {"I3"}


def test_i3_fails_for_an_orchestrator_that_shipped_the_object_before() -> None:
    e, o, _, those = shipped(0)
    o.drop("stale", *those)
    assert broken(e, o, present=those) == {"I3"}


def test_i3_fails_for_a_worker_whose_reply_was_taken() -> None:
    e, o = env(), orc()
    e.keep(0)
    o.take(*ids(e, 0))
    e.drop("never_sent", *ids(e, 0))
    assert broken(e, o, present=ids(e, 0)) == {"I3"}


def test_i3_fails_for_a_drop_of_steps_that_were_not_taken() -> None:
    e, o, t, those = shipped(0)
    t.drop_steps(0, 1)
    assert broken(e, o, t, present=those) == {"I3"}


def test_i3_accepts_an_adopter_of_the_holder() -> None:
    e, o = env(), orc()
    e.keep(0)
    o.adopt(e, n=1)
    o.drop("orphan", *ids(e, 0))
    o.done(*ids(e, 0))
    assert broken(e, o) == set()


def test_i3_fails_for_an_adopter_of_somebody_else() -> None:
    e, o, r = env(), orc(), rec()
    e.keep(0)
    o.take(*ids(e, 0))
    r.adopt(e, n=1)
    r.drop("recovered", *ids(e, 0))
    assert broken(e, o, r, present=ids(e, 0)) == {"I3"}


def test_i3_accepts_an_adopter_of_an_adopter() -> None:
    e, o, r = env(), orc(), rec()
    e.keep(0)
    o.adopt(e, n=1)
    r.adopt(o)
    r.drop("recovered", *ids(e, 0))
    r.done(*ids(e, 0))
    assert broken(e, o, r) == set()


def test_i4_fails_for_done_without_a_drop() -> None:
    e, o = env(), orc()
    e.keep(0)
    o.take(*ids(e, 0))
    o.done(*ids(e, 0))
    assert "I4" in broken(e, o)


def test_i4_fails_for_done_before_its_drop() -> None:
    e, o = env(), orc()
    e.keep(0)
    o.take(*ids(e, 0))
    o.done(*ids(e, 0))
    o.drop("filtered", *ids(e, 0))
    assert broken(e, o) == {"I4"}


def test_i4_fails_for_steps_that_are_done_before_their_drop() -> None:
    e, o, t, _ = shipped(0)
    t.done_steps(0, 0)
    t.drop_steps(0, 0)
    assert broken(e, o, t) == {"I4"}


def test_i4_accepts_the_redo_of_an_adopted_drop() -> None:
    e, r = env(), rec()
    e.keep(0)
    e.drop("abandoned", *ids(e, 0))
    r.adopt(e, n=1)
    r.done(*ids(e, 0), attempt=2)
    assert broken(e, r) == set()


def test_i5_fails_for_a_trainer_that_takes_a_released_step() -> None:
    e, o, t, those = shipped(0)
    t.drop_steps(0, 0)
    t.done_steps(0, 0)
    late = trn(30)
    late.adopt(t)
    late.step(0, *those)
    assert broken(e, o, t, late) == {"I5"}


def test_i5_fails_for_a_take_after_the_own_drop() -> None:
    e, o, t, those = shipped(0)
    t.drop_steps(0, 0)
    t.step(0, *those)
    assert broken(e, o, t, present=those) == {"I5"}


def test_i5_accepts_a_replay_by_the_next_trainer() -> None:
    e, o, t, those = shipped(0)
    second = trn(30)
    second.adopt(t)
    second.step(0, *those)
    second.drop_steps(0, 0)
    second.done_steps(0, 0)
    assert broken(e, o, t, second) == set()


def test_i6_fails_for_a_take_without_a_keep() -> None:
    e, o = env(), orc()
    e.close(n=0)
    o.take(*ids(e, 0))
    assert broken(e, o) == {"I6"}


def test_i6_is_not_judged_while_the_producer_may_still_write_or_lost_its_node() -> None:
    e, o = env(), orc()
    o.take(*ids(e, 0))
    assert broken(e, o) == set()
    lost, o, r = Book("env.a.0000000000000009", boot="another boot"), orc(), rec()
    o.take(*ids(lost, 0))
    r.adopt(lost, n=0)
    assert broken(lost, o, r) == set()


def test_i6_is_not_judged_where_the_producers_journal_is_missing() -> None:
    e, o = env(), orc()
    o.take(*ids(e, 0))
    run = merged(o)
    assert run.missing_journals() == [e.inc]
    assert violations(Evidence(run, StoreView(), complete=False)) == []


def test_i7_fails_for_a_ship_of_what_was_not_taken() -> None:
    e, o = env(), orc()
    e.keep(0)
    o.ship(0, *ids(e, 0))
    assert broken(e, o, present=ids(e, 0)) == {"I7"}


@pytest.mark.payload("F24")
def test_i7_fails_for_an_id_in_two_steps() -> None:
    e, o = env(), orc()
    e.keep(0)
    o.take(*ids(e, 0))
    o.ship(0, *ids(e, 0))
    o.ship(1, *ids(e, 0))
    assert broken(e, o, present=ids(e, 0)) == {"I7"}


def test_i7_fails_for_a_trainer_that_took_another_batch_than_was_shipped() -> None:
    e, o, t = env(), orc(), trn()
    e.keep(0, 1)
    o.take(*ids(e, 0, 1))
    o.ship(0, *ids(e, 0, 1))
    t.step(0, *ids(e, 0))
    assert broken(e, o, t, present=ids(e, 0, 1)) == {"I7"}


def test_i7_fails_for_a_step_that_is_used_and_was_not_taken() -> None:
    e, o, t = env(), orc(), trn()
    e.keep(0)
    o.take(*ids(e, 0))
    o.ship(0, *ids(e, 0))
    t.step(0, *ids(e, 0), st="used")
    assert broken(e, o, t, present=ids(e, 0)) == {"I7"}


def test_i8_fails_for_a_write_beyond_the_adoption() -> None:
    e, o = env(), orc()
    e.keep(0)
    o.adopt(e, n=1)
    o.drop("orphan", *ids(e, 0))
    o.done(*ids(e, 0))
    e.drop("never_sent", *ids(e, 0))
    assert broken(e, o) == {"I8"}


def test_i9_fails_for_a_drop_of_what_was_never_kept() -> None:
    e, o = env(), orc()
    o.adopt(e, n=0)
    o.drop("orphan", *ids(e, 0))
    o.done(*ids(e, 0))
    assert broken(e, o) == {"I9"}


def test_i9_fails_where_a_close_counts_more_than_its_journal_has() -> None:
    e = env()
    e.keep(0)
    e.close(n=1, kept=2, kept_bytes=200)
    assert broken(e, present=ids(e, 0)) == {"I9"}


def test_i10_fails_for_an_object_that_is_done_and_present() -> None:
    e = env()
    e.keep(0)
    e.drop("never_sent", *ids(e, 0))
    e.done(*ids(e, 0))
    assert broken(e, present=ids(e, 0)) == {"I10"}


def test_i10_counts_a_kept_object_that_is_absent_as_lost() -> None:
    e = env()
    e.keep(0)
    found = judged(e)
    assert (found.verdict, found.violation_counts) == (Verdict.VIOLATED, {"lost": 1})


def test_i10_counts_an_absence_at_the_first_attempt_as_lost_and_at_a_redo_not() -> None:
    for attempt, lost in ((1, {"lost": 1}), (2, {})):
        e, r = env(), rec()
        e.keep(0)
        e.drop("never_sent", *ids(e, 0))
        r.adopt(e, n=1)
        r.done(*ids(e, 0), attempt=attempt, absent=ids(e, 0))
        assert judged(e, r).violation_counts == lost


def test_i10_counts_an_unknown_object_as_unexpected() -> None:
    e = env()
    found = judged(e, present=ids(e, 5))
    assert (found.verdict, found.violation_counts) == (Verdict.VIOLATED, {"unexpected": 1})


def test_i11_fails_for_a_closed_run_with_a_live_object() -> None:
    e, r = env(), rec()
    e.keep(0)
    e.close(n=1, kept=1, kept_bytes=100)
    r.close(final=1, incarnations=2)
    assert broken(e, r, present=ids(e, 0), final=True) == {"I11"}


def test_i11_fails_for_a_closed_run_with_a_removal_that_never_happened() -> None:
    e, r = env(), rec()
    e.keep(0)
    e.drop("never_sent", *ids(e, 0))
    r.adopt(e, n=1)
    r.close(final=1, incarnations=2)
    assert broken(e, r, present=ids(e, 0), final=True) == {"I11"}


def test_i11_fails_for_a_staging_file_after_the_close() -> None:
    e, r = env(), rec()
    e.close(n=0)
    r.close(final=1, incarnations=2)
    name = f"obj/{e.inc}/.0000000000.tmp"
    found = conclude("r", Evidence(merged(e, r), StoreView(staging=(name,)), final=True))
    assert [(v.predicate, v.subject) for v in found.violations] == [("I11", name)]


def test_a_problem_makes_an_otherwise_clean_run_unprovable() -> None:
    e = env()
    e.close(n=0)
    run = merged(e)
    run.problems.append("the journal of x is missing")
    found = conclude("r", Evidence(run, StoreView(), complete=False))
    assert (found.verdict, found.exit_code, found.problems) == (Verdict.UNPROVABLE, 20, ("the journal of x is missing",))


def test_a_store_that_was_not_listed_is_never_proved() -> None:
    e = env()
    e.close(n=0)
    run = merged(e)
    run.problems.append("obj/ cannot be listed")
    assert conclude("r", Evidence(run, None, complete=False)).verdict is Verdict.UNPROVABLE


def test_a_live_run_is_not_judged_by_what_was_written_during_the_listing() -> None:
    e, o = env(), orc()
    before = e.end
    e.keep(0)
    o.take(*ids(e, 0))
    o.drop("filtered", *ids(e, 0))
    o.done(*ids(e, 0))
    settled = {e.inc: before, o.inc: 0}
    listed = Evidence(merged(e, o), StoreView({e.inc: {0}}), settled=settled)
    assert violations(listed) == []
    assert [v.predicate for v in violations(Evidence(merged(e, o), StoreView({e.inc: {0}}), settled={e.inc: e.end, o.inc: o.end}))] == [
        "I10"
    ]


def test_a_live_producer_may_publish_before_it_records() -> None:
    e = env()
    view = StoreView({e.inc: {0}}, staging=(f"obj/{e.inc}/.0000000001.tmp",))
    assert violations(Evidence(merged(e), view, settled={e.inc: e.end})) == []


def test_every_invariant_of_the_specification_has_a_predicate() -> None:
    assert list(PREDICATES) == [f"I{n}" for n in range(1, 12)]


@pytest.mark.parametrize("cycle", [2, 3])
def test_incarnations_that_adopt_each_other_in_a_circle_end_the_fold(cycle: int) -> None:
    books = [rec(n) for n in range(cycle)]
    for n, book in enumerate(books):
        book.adopt(books[(n + 1) % cycle])
    assert judged(*books).verdict in (Verdict.VIOLATED, Verdict.BALANCED, Verdict.PROVED)


def test_a_close_record_without_counters_is_not_a_failure_of_an_empty_journal() -> None:
    o = orc()
    o.add(Close(0))
    assert broken(o) == set()


def test_an_adoption_beyond_the_adopters_own_end_does_not_count() -> None:
    e, o, r = env(), orc(), rec()
    e.keep(0)
    r.adopt(o)
    o.adopt(e, n=1)
    o.drop("orphan", *ids(e, 0))
    run = merged(e, o, r)
    assert (run.adopted(o.inc), run.adopted(e.inc)) == (True, False)
    assert broken(e, o, r, present=ids(e, 0)) == {"I8"}


def test_a_chain_of_adoptions_passes_all_rights_on() -> None:
    e, books = env(), [rec(n) for n in range(5)]
    e.keep(0)
    books[0].adopt(e, n=1)
    for before, after in itertools.pairwise(books):
        after.adopt(before)
    books[-1].drop("recovered", *ids(e, 0))
    books[-1].done(*ids(e, 0))
    assert broken(e, *books) == set()
    assert set(merged(e, *books).closures[books[-1].inc]) == {e.inc, *(b.inc for b in books[:-1])}


def test_every_predicate_has_a_history_that_fails_it() -> None:
    """An audit that never failed proves nothing."""
    tested = {name.split("_")[1] for name in globals() if name.startswith("test_i") and "_fails_" in name}
    tested |= {"i10"}  # its tests name what it counts
    assert tested >= {name.lower() for name in PREDICATES}
