"""One history from a seed, judged; and the mutants, each a rule of the protocol that is broken on purpose."""

import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Final

from fsref.errors import FsrefError
from fsref.ledger.report import Verdict
from tests.support.simulation.chooser import Chooser
from tests.support.simulation.surroundings import Scenario
from tests.support.simulation.world import World

MUTANTS: Final[dict[str, str]] = {
    "delete_before_drop": "an object is removed before its drop is recorded",
    "no_w1": "drops are not synced before the first removal",
    "no_w2": "ships are not synced before the batch is visible",
    "drop_without_nack": "a worker drops after the reply without a nack",
    "take_after_nack": "an orchestrator takes what it has nacked",
    "no_redo": "an adopter forgets what its predecessor dropped and did not remove",
    "no_listing": "an adopter trusts the journal and does not list",
    "commit_before_checkpoint": "steps are released before the checkpoint covers them",
    "no_dedupe": "a doubled reply is taken twice",
    "keep_before_publish": "the receipt is written before the object",
    "adopt_without_fence": "an adopter reads on without putting up its fence",
    "adopted_unsynced": "an adopter does not sync the journal that it adopts",
    "ship_twice": "an object is shipped in two steps",
    "drop_after_ship": "an orchestrator drops what it has shipped",
    "done_before_delete": "a removal is called done before it happened",
    "done_after_failure": "rank 0 calls steps done although a leader failed",
    "torn_tail_believed": "a recovery believes a record of which only a part was written",
    "adopt_the_living": "a worker is adopted without proof of its death",
    "double_adoption": "a worker is adopted a second time",
    "parked_without_file": "a step is parked for replay although its file never appeared",
    "leader_before_drop": "leaders remove before rank 0's drop is durable",
    "step_dropped_twice": "rank 0 drops a step twice",
    "used_without_taken": "a trainer uses a step that it did not take",
    "released_forgotten": "a new trainer does not know what was released before it",
    "late_reply_taken": "a reply of an adopted worker is taken",
    "old_takes_forgotten": "a new orchestrator does not know what the one before it took",
    "no_fence_check": "a process that was declared dead does not look at its fence",
    "lost_is_silent": "a recovery drops what is lost, and so hides it",
    "seal_skipped": "segments are not uploaded at W1 and W2",
    "segment_gap": "a failed segment is skipped",
}
NEEDS: Final[dict[str, dict[str, object]]] = {
    "no_fence_check": {"zombies": True},
    "adopt_without_fence": {"zombies": True},
    "seal_skipped": {"segments": True},
    "segment_gap": {"segments": True},
    "lost_is_silent": {"stranger": True},
    "commit_before_checkpoint": {"policy": "checkpoint"},
}
"""What a mutant's scenario must allow, for the rule to matter."""


@dataclass
class Outcome:
    """What came of one history."""

    seed: int
    verdict: str
    faults: list[str] = field(default_factory=list)
    """Everything that should not be, in words; empty for a correct run."""
    ops: int = 0
    crashes: int = 0
    objects: int = 0
    events: Counter[str] = field(default_factory=Counter)


def scenario_of(seed: int) -> Scenario:
    """What a seed's history allows."""
    choose = Chooser(seed ^ 0x5EED)
    zombies = choose.chance(0.08)
    return Scenario(
        ops=choose.pick((200, 400, 800, 1200)),
        workers=choose.pick((1, 2, 2, 3)),
        crash_p=choose.pick((0.0, 0.004, 0.008, 0.02)),
        delete_fails_p=choose.pick((0.0, 0.05, 0.3)),
        full_p=choose.pick((0.0, 0.0, 0.002)),
        segments=choose.chance(0.3),
        policy=choose.pick(("checkpoint", "checkpoint", "fetched", "keep_last")),
        keep_last=choose.below(3) + 1,
        zombies=zombies,
        stranger=not zombies and choose.chance(0.05),
        audits=choose.chance(0.3),
        clean_end=choose.chance(0.5),
    )


def play(seed: int, *, mutant: str = "", scenario: Scenario | None = None) -> Outcome:
    """The history of a seed, to its end: faults off, recovery, audit, reference model."""
    scenario = scenario or scenario_of(seed)
    if mutant:
        scenario = replace(scenario, **NEEDS.get(mutant, {}))  # type: ignore[arg-type]
    world = World(Chooser(seed), scenario, mutant)
    return judge(world, seed)


def judge(world: World, seed: int) -> Outcome:
    """Plays a world to its end."""
    try:
        world.run(world.scenario.ops)
        audit = world.end()
    except (FsrefError, AssertionError, ValueError, KeyError) as e:
        where = traceback.extract_tb(e.__traceback__)[-1]
        return Outcome(seed, "REFUSED", [f"{type(e).__name__}: {e} ({where.name}:{where.lineno})"], world.steps, world.crashes)
    run = world.merged()
    ends = {i: found[1].end for i in world.disks if (found := run.adoption_of(i))}
    reference = world.reference
    reference.finish(world.disks, world.objects, ends)
    faults = list(reference.complaints)
    told = {v.subject for v in audit.violations}
    kept = {f"{inc}/{s}" for inc in run.producers for s in run.journals[inc].kept}
    stolen = [o for o, undecided in reference.strangers.items() if undecided and o in kept]
    faults += [f"{o} was stolen, and the audit does not say so" for o in stolen if o not in told]
    for v in audit.violations:
        if not (_by_zombie(world, v.predicate, v.subject) or _by_stranger(world, v.predicate, v.subject)):
            faults.append(f"{v.predicate} {v.subject}: {v.detail}")
    if audit.verdict is not Verdict.PROVED and not reference.zombies and not reference.strangers:
        faults.append(f"{audit.verdict}: {audit.problems[:2]}")
    t = audit.totals
    if audit.verdict is Verdict.PROVED and not t.kept + t.extra + t.unreceipted == t.dropped == t.done:
        faults.append(f"kept {t.kept} + found {t.extra} + unreceipted {t.unreceipted}, dropped {t.dropped}, done {t.done}")
    return Outcome(seed, str(audit.verdict), faults, world.steps, world.crashes, len(reference.created), world.events)


def _by_zombie(world: World, predicate: str, subject: str) -> bool:
    """A process that lived on after it was declared dead shows: it wrote on, or published what nobody will remove. Never a foreign id."""
    zombies = world.reference.zombies
    if not zombies:
        return False
    if predicate == "I8":
        return subject in zombies
    if predicate == "I10":
        return subject.partition("/")[0] in zombies
    return predicate == "I7" and any(b.by in zombies and subject == f"step {b.step}" for b in world.files.values())


def _by_stranger(world: World, predicate: str, subject: str) -> bool:
    return predicate in ("I10", "I11") and subject in world.reference.strangers
