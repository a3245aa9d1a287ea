"""The fold has no order and no clock: shuffled journals and shuffled times give the same conclusion."""

import random

import msgspec
import pytest

from fsref.ledger.merge import RunFold
from fsref.ledger.predicates import Evidence, StoreView
from fsref.ledger.report import conclude
from tests.support.journals import Book
from tests.support.simulation.chooser import Chooser
from tests.support.simulation.play import scenario_of
from tests.support.simulation.world import World


def world_of(seed: int, ops: int) -> World:
    """A run in the middle, with crashes and recoveries behind it."""
    world = World(Chooser(seed), scenario_of(seed))
    world.run(ops)
    return world


def fresh(book: Book) -> Book:
    """A copy, because a merge cuts the folds that it gets."""
    out = Book(book.inc)
    out.records = list(book.records)
    return out


@pytest.mark.parametrize("seed", range(20))
def test_the_fold_does_not_depend_on_the_order_of_journals(seed: int) -> None:
    world = world_of(seed, 600)
    outcomes = []
    for shuffle in range(3):
        books = [fresh(d) for d in world.disks.values()]
        random.Random(shuffle).shuffle(books)
        run = RunFold({b.inc: b.fold() for b in books})
        outcomes.append(conclude("r", Evidence(run, StoreView(world.listing()))).to_json())
    assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.payload("F14")
def test_clocks_change_nothing() -> None:
    """``ms`` is in no fact of the fold: records of any time give the same conclusion (a clock that jumps a day, each node its own)."""
    world, rng = world_of(7, 600), random.Random(1)
    plain, moved = {}, {}
    for disk in world.disks.values():
        book = fresh(disk)
        plain[book.inc] = book.fold()
        book.records = [(at, msgspec.structs.replace(r, ms=rng.randrange(1 << 40))) for at, r in book.records]
        moved[book.inc] = book.fold()
    said = [conclude("r", Evidence(RunFold(folds), StoreView(world.listing()))).to_json() for folds in (plain, moved)]
    assert said[0] == said[1]
