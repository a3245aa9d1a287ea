"""A cancel that crosses its reply: every order of events, also with lost and doubled messages, over the rights that the processes use.

The worker gives up what it has not sent yet, or takes a cancel that comes later for a nack; the client surfaces a reply or cancels, once.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest

from fsref.ledger.recovery import adopt_records, settle
from fsref.ledger.report import Verdict
from fsref.ledger.rights import ConsumerRights, EnvRights
from tests.support import journals
from tests.support.journals import Book, judged

IDS = 2
Event = Callable[["World"], None]


@dataclass
class World:
    """One request between one worker and one client."""

    env: EnvRights = field(default_factory=lambda: EnvRights(journals.env().inc))
    orc: ConsumerRights = field(default_factory=lambda: ConsumerRights(journals.orc().inc))
    env_book: Book = field(default_factory=journals.env)
    orc_book: Book = field(default_factory=journals.orc)
    kept: list[str] = field(default_factory=list)
    phase: str = "working"
    replies: int = 0
    """In flight."""
    cancels: int = 0
    pending: bool = True
    """The client's future, which is popped once: by the reply, or by the cancel."""
    spare: int = 1
    """Messages that may still be lost or doubled."""
    outcomes: list[str] = field(default_factory=list)

    def enabled(self) -> dict[str, Event]:
        """What can happen next."""
        out: dict[str, Event] = {}
        if self.phase == "working" and len(self.kept) < IDS:
            out["keep"] = World.keep
        if self.phase == "working" and len(self.kept) == IDS:
            out["send"] = World.send
        if self.pending:
            out["cancel"] = World.cancel
        if self.replies:
            out["reply arrives"] = World.reply_arrives
        if self.cancels:
            out["cancel arrives"] = World.cancel_arrives
        for name in ("replies", "cancels"):
            if self.spare and getattr(self, name):
                out[f"lose one of {name}"] = partial(World.lose, name=name, change=-1)
                out[f"double one of {name}"] = partial(World.lose, name=name, change=1)
        return out

    def keep(self) -> None:
        seq = self.env.mint()
        self.env.keep(seq, byte_count=100)
        self.env_book.keep(seq)
        self.kept.append(f"{self.env.inc}/{seq}")

    def send(self) -> None:
        self.env.sent("q", self.kept)
        self.phase = "sent"
        self.replies += 1

    def cancel(self) -> None:
        self.pending = False
        self.cancels += 1

    def reply_arrives(self) -> None:
        self.replies -= 1
        if not self.pending:
            return  # cancelled, or here already: the future is gone
        self.pending = False
        fresh = self.orc.take(dict.fromkeys(self.kept, 100))
        assert fresh == self.kept
        self.orc_book.take(*fresh)
        self.outcomes.append("taken")

    def cancel_arrives(self) -> None:
        self.cancels -= 1
        if self.phase == "sent":
            dropped, reason = self.env.nack("q"), "abandoned"
        else:
            dropped, reason = self.env.discard(self.kept) if self.phase == "working" else [], "never_sent"
            self.phase = "given up"
        if dropped:
            self.env_book.drop(reason, *dropped)
            self.env_book.done(*dropped)
            self.outcomes.append(reason)

    def lose(self, name: str, change: int) -> None:
        self.spare -= 1
        setattr(self, name, getattr(self, name) + change)


def ends(world: World, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], World]]:
    """Every order of events to its end."""
    events = world.enabled()
    if not events:
        yield path, world
    for name, event in events.items():
        after = copy.deepcopy(world)
        event(after)
        yield from ends(after, (*path, name))


def close(world: World) -> None:
    """Everyone ends; the orchestrator removes what it holds and adopts what the closed worker left."""
    rest = world.env.discard([f"{world.env.inc}/{s}" for s in list(world.env.unsent)])
    if rest:
        world.env_book.drop("never_sent", *rest)
        world.env_book.done(*rest)
    kept = len(world.env.kept)
    world.env_book.close(n=world.env.minted, kept=kept, kept_bytes=100 * kept, dropped=len(world.env.dropped))
    fold = world.env_book.fold()
    gone = fold.drops.get(world.env.inc, {})
    listed = [s for s in fold.kept if s not in gone]
    found = settle(fold, listed, dropped=gone, spoken_for=world.orc.took(world.env.inc))
    for record in adopt_records(world.env.inc, how="closed", end=world.env_book.end, settlement=found, ms=0):
        world.orc_book.add(record)
    orphans = [f"{world.env.inc}/{s}" for s in found.orphans]
    held = world.orc.drop(list(world.orc.held))
    for reason, ids in (("orphan", orphans), ("shutdown", held)):
        if ids:
            world.orc_book.drop(reason, *ids)
            world.orc_book.done(*ids)
    world.orc_book.close(taken=len(held), dropped=len(held) + len(orphans))


@pytest.mark.fault(20)
def test_in_every_order_a_reply_is_taken_or_given_up_and_never_both() -> None:
    seen: dict[tuple[str, ...], int] = {}
    for path, world in ends(World()):
        outcomes = tuple(world.outcomes)
        seen[outcomes] = seen.get(outcomes, 0) + 1
        assert len(outcomes) <= 1, (path, outcomes)
        if world.spare and world.pending is False:
            assert len(outcomes) == 1 or not world.kept, path  # nothing was lost, so somebody has decided
        close(world)
        found = judged(world.env_book, world.orc_book, final=True)
        assert found.verdict is Verdict.PROVED, (path, found.render())
        assert sum(found.totals.dropped_by.values()) == len(world.kept)
    assert set(seen) == {("taken",), ("abandoned",), ("never_sent",), ()}
    assert sum(seen.values()) > 100


@pytest.mark.fault(20)
def test_a_client_that_takes_after_its_cancel_would_be_noticed() -> None:
    def late(world: World) -> None:
        world.pending = True
        world.reply_arrives()

    world = World()
    for event in (World.keep, World.keep, World.send, World.cancel, World.cancel_arrives, late):
        event(world)
    assert world.outcomes == ["abandoned", "taken"]
    close(world)
    found = judged(world.env_book, world.orc_book, final=True)
    assert found.verdict is Verdict.VIOLATED
    assert found.violation_counts["double"] == IDS
