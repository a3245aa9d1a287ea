"""Recovery of a stopped run, operation by operation; it can die at each of them and is then adopted by the next one."""

from dataclasses import replace
from typing import TYPE_CHECKING

from fsref.ledger.ids import pack
from fsref.ledger.predicates import StoreView
from fsref.ledger.records import Close, Done
from fsref.ledger.recovery import adopt_records, plan_recovery
from tests.support.simulation.process import FREE, Op, Process

if TYPE_CHECKING:
    from tests.support.simulation.world import World


class Recoverer(Process):
    """One ``fsref recover`` (or, without a checkpoint, ``fsref close``)."""

    role = "rec"

    def __init__(self, world: "World", label: str, node: str, *, resume_step: int | None, replay: bool) -> None:
        self.resume_step, self.replay = resume_step, replay
        super().__init__(world, label, node)
        self.tasks = [self.main()]

    def main(self) -> Op:
        world = self.world
        yield FREE
        world.lock(self)
        for disk in list(world.disks.values()):
            yield FREE
            if disk.inc != self.inc and not self.mutant("adopted_unsynced"):
                disk.settle()
        yield FREE
        run = world.merged(torn=self.mutant("torn_tail_believed"))
        ends = {i: d.end for i, d in world.disks.items()}
        yield FREE
        view = StoreView(world.listing(), world.staging_names())
        files = [b for b in world.files.values() if not b.doomed]
        published = {(b.step, b.n, b.checksum) for b in files} if self.replay else set()
        if self.mutant("parked_without_file") and self.replay:
            published = set(run.ships)
        sealed = [p for p in run.producers if run.adopted(p)]
        plan = plan_recovery(run, view, resume_step=self.resume_step, replay=self.replay, published=published, sealed=sealed)
        world.events["objects parked for replay"] += len(plan.parked)
        world.events["removals redone"] += len(plan.redo)
        to_adopt = [h for h in run.journals if h != self.inc and not run.adopted(h)]
        for h in to_adopt:
            yield FREE
            world.put_fence(h, by=self.inc, skip=False)
            yield FREE
            how = world.how(h)
            found = plan.settlements.get(h)
            if found is not None and self.mutant("lost_is_silent"):
                found = replace(found, lost=())
            yield from self.append(*adopt_records(h, how=how, end=ends[h], settlement=found, ms=0))
        self.doom()
        hidden: tuple[str, ...] = ()
        if self.mutant("lost_is_silent"):
            hidden = tuple(f"{h}/{s}" for h, found in plan.settlements.items() for s in found.lost)
        yield from self.drop(plan.recovered + hidden, "recovered")
        yield from self.drop(plan.unjournaled, "unjournaled")
        if not self.mutant("no_w1"):
            yield from self.durable()
        redo: tuple[str, ...] = () if self.mutant("no_redo") else plan.redo
        pending = 0
        for ids, attempt in ((redo + hidden, 2), (plan.recovered + plan.unjournaled, 1)):
            for object_id in ids:
                outcome: bool | None = None
                for again in range(3):
                    yield FREE
                    outcome = self.delete(object_id, again)
                    yield FREE
                    if outcome is not None:
                        yield from self.append(Done(0, pack([object_id]), a=pack([object_id] if outcome and not again else []), k=attempt))
                        break
                pending += outcome is None
        world.staging.clear()
        final = self.resume_step is None and not pending
        counters = {"final": int(final), "incarnations": len(world.disks) if final else 0, "dropped": self.dropped}
        self.result = not pending
        world.unlock(self)
        yield from self.finish(Close(0, counters={k: v for k, v in counters.items() if v}))
        world.recovered(self)

    def doom(self) -> None:
        """The operator's decision takes effect: what is not parked will not be trained."""
        for batch in self.world.files.values():
            if not self.replay or self.resume_step is None or batch.step <= self.resume_step:
                batch.doomed = True
