"""Random valid histories audit clean, whatever crashes; each broken rule of the protocol is noticed; the fold has no order."""

import random

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsref.errors import LedgerError
from fsref.ledger.merge import RunFold
from fsref.ledger.predicates import Evidence, StoreView
from fsref.ledger.report import Verdict, conclude
from tests.support.journals import Book
from tests.support.world import World, play

SEEDS = 250
"""A sample for every run of the suite; ``--slow`` plays 5,000."""


def check(seed: int) -> None:
    world = play(seed, steps=120)
    assert world.audit().violations == (), f"seed {seed}, while it runs"
    found = world.end()
    assert (found.verdict, found.violations) == (Verdict.PROVED, ()), f"seed {seed}, closed"
    totals = found.totals
    assert totals.kept + totals.extra + totals.unreceipted == totals.dropped == totals.done


def test_random_histories_with_crashes_and_power_losses_end_proved() -> None:
    for seed in range(SEEDS):
        check(seed)


@pytest.mark.slow
def test_many_random_histories_end_proved() -> None:
    for seed in range(SEEDS, 5_000 + SEEDS):
        check(seed)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1 << 32),
    ops=st.lists(
        st.sampled_from(
            [
                "put",
                "send",
                "deliver",
                "nack",
                "discard",
                "drop",
                "ship",
                "train",
                "commit",
                "lead",
                "remove",
                "rotate",
                "kill_env",
                "adopt",
                "crash_all",
            ]
        ),
        max_size=60,
    ),
)
def test_any_order_of_events_audits_clean_after_each_of_them(seed: int, ops: list[str]) -> None:
    world = World(seed)
    for op in ops:
        getattr(world, op)()
        found = world.audit()
        assert found.verdict in (Verdict.BALANCED, Verdict.PROVED)
        assert found.violations == ()
    assert world.end().verdict is Verdict.PROVED


MUTANTS = {
    "delete_before_drop": "an object is removed before its drop is recorded",
    "drop_without_nack": "a worker drops after the reply without a nack",
    "take_after_nack": "an orchestrator takes what it has nacked",
    "no_redo": "an adopter forgets what its predecessor dropped and did not remove",
    "no_listing": "an adopter trusts the journal and does not list",
    "no_dedupe": "a doubled reply is taken twice",
    "keep_before_publish": "the receipt is written before the object",
    "commit_before_checkpoint": "steps are released before the checkpoint covers them",
    "no_w1": "drops are not synced before the first removal",
    "no_w2": "ships are not synced before the batch is visible",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_broken_rule_is_noticed(mutant: str) -> None:
    for seed in range(200):
        try:
            world = play(seed, steps=150, mutant=mutant, crash_p=0.02)
            if world.end().verdict is Verdict.VIOLATED:
                return
        except LedgerError:
            return  # the protocol itself refused
    pytest.fail(f"nobody noticed that {MUTANTS[mutant]}")


def test_the_fold_does_not_depend_on_the_order_of_journals() -> None:
    for seed in range(20):
        world = play(seed, steps=150)
        present: dict[str, set[int]] = {}
        for object_id in world.store:
            inc, seq = object_id.split("/")
            present.setdefault(inc, set()).add(int(seq))
        outcomes = []
        for shuffle in range(3):
            books = list(world.books)
            random.Random(shuffle).shuffle(books)
            run = RunFold({b.inc: b.fold() for b in books})
            outcomes.append(conclude("r", Evidence(run, StoreView(present))).to_json())
        assert outcomes[0] == outcomes[1] == outcomes[2]


def test_clocks_change_nothing() -> None:
    """``ms`` is in no fact of the fold: records of any time give the same conclusion."""
    world = play(7, steps=150)

    def moved(book: Book, rng: random.Random) -> Book:
        out = Book(book.inc)
        out.records = [(at, msgspec.structs.replace(r, ms=rng.randrange(1 << 40))) for at, r in book.records]
        return out

    rng = random.Random(1)
    plain = conclude("r", Evidence(RunFold({b.inc: b.fold() for b in world.books}), None, complete=False))
    other = conclude("r", Evidence(RunFold({b.inc: moved(b, rng).fold() for b in world.books}), None, complete=False))
    assert plain.to_json() == other.to_json()
