"""Trainer rank 0 and the leaders of two data ranks: take, fetch, use, checkpoint, commit under each policy, replay after a restart."""

from typing import TYPE_CHECKING

from fsref.errors import StepReleased
from fsref.ledger.ids import pack
from fsref.ledger.records import Adopt, Close, Done, Drop, StepRecord
from fsref.ledger.rights import StepRights, step_ranges
from tests.support.simulation.process import FREE, HELD, IDLE, Op, Process
from tests.support.simulation.reference import Batch

if TYPE_CHECKING:
    from tests.support.simulation.world import World


class Trainer(Process):
    """One trainer incarnation."""

    role = "trn"

    def __init__(self, world: "World", label: str, node: str) -> None:
        super().__init__(world, label, node)
        self.rights = StepRights(self.inc)
        self.batches: dict[int, Batch] = {}
        self.open: list[int] = []
        """Steps that were used and not dropped."""
        self.next = 0
        self.steps_taken: set[int] = set()
        self.steps_dropped = 0

    def main(self) -> Op:
        yield from self.succeed()
        self.next = self.world.checkpoint + 1
        yield from self.inherit(self.next)
        while not self.stopping:
            batch = self.world.files.get(self.next)
            if batch is None:
                yield IDLE
            else:
                yield from self.train(batch)
        if self.world.ending and self.open:
            for step in self.open:
                self.batches[step].doomed = True  # whatever the policy, nothing will be read again
            yield from self.commit(self.open[-1])
        yield from self.drain()
        counters = {"steps_taken": len(self.steps_taken), "steps_dropped": self.steps_dropped}
        yield from self.finish(Close(0, counters={k: v for k, v in counters.items() if v}))

    def succeed(self) -> Op:
        """Adopts the trainers and recoveries before this one; redoes what they dropped and did not remove."""
        world = self.world
        run = world.merged()
        left = [i for i in run.journals if i[:3] in ("trn", "rec") and i != self.inc and not run.adopted(i)]
        for h in left:
            yield FREE
            world.put_fence(h, by=self.inc, skip=False)
            yield FREE
            if not self.mutant("adopted_unsynced"):
                world.disks[h].settle()
            yield from self.append(Adopt(0, h, world.how(h), world.disks[h].end))
        run = world.merged()
        mine = set(left).union(*(run.closures.get(h, ()) for h in left))
        if not self.mutant("no_redo"):
            self.remove_later([f"{inc}/{s}" for inc, s in run.pending() if run.drops[inc][s].journal in mine], attempt=1)
        released = {} if self.mutant("released_forgotten") else run.released()
        self.rights = StepRights(self.inc, released=released)
        yield FREE

    def inherit(self, version: int) -> Op:
        """Steps below the checkpoint that were trained and not dropped: taken again, and dropped as the policy says."""
        found: list[int] = []
        for step in reversed(range(version)):
            batch = self.world.files.get(step)
            if batch is None:
                break
            try:
                yield from self.take(batch)
            except StepReleased:
                break
            self.world.events["earlier step inherited"] += 1
            found.insert(0, step)
        self.open = found
        if found and self.world.scenario.policy != "keep_last":
            yield from self.commit(version - 1)

    def take(self, batch: Batch) -> Op:
        yield HELD
        self.check()
        if self.rights.take(batch.step, n=batch.n, checksum=batch.checksum):
            self.write(StepRecord(0, batch.step, "taken", batch.n, batch.checksum))
            self.steps_taken.add(batch.step)
        self.batches[batch.step] = batch
        yield FREE

    def train(self, batch: Batch) -> Op:
        world, policy = self.world, self.world.scenario.policy
        try:
            if not self.mutant("used_without_taken"):
                yield from self.take(batch)
            if self.choose.chance(0.1):
                yield from self.take(batch)  # the batch comes twice
        except StepReleased as e:
            world.events["released step refused"] += 1
            if (policy == "checkpoint" or not batch.used) and not world.forced.intersection((batch.by, self.inc)):
                world.reference.say(f"step {batch.step} cannot be trained, and no checkpoint covers it: {e}")
            self.next += 1
            return
        missing = []
        for rank in batch.ranks:
            for object_id in rank:
                yield FREE
                present = object_id in world.objects
                world.reference.read(object_id, batch, by=self.inc, present=present)
                missing += [] if present else [object_id]
        yield HELD
        self.write(StepRecord(0, batch.step, "used", batch.n, batch.checksum, {"missing": pack(missing)} if missing else {}))
        world.events["step replayed" if batch.used else "step trained"] += 1
        batch.used = True
        yield FREE
        self.open.append(batch.step)
        self.next += 1
        world.trained = max(world.trained, batch.step)
        if policy == "fetched":
            yield from self.commit(batch.step)
        if policy == "keep_last":
            yield from self.commit(world.trained - world.scenario.keep_last)
        if self.mutant("commit_before_checkpoint"):
            yield from self.commit(batch.step)
        if self.choose.chance(0.4):
            yield FREE
            world.checkpoint = max(world.checkpoint, batch.step)
            yield FREE
            if policy == "checkpoint":
                yield from self.commit(batch.step)

    def commit(self, hi: int) -> Op:
        """The drop of all open steps up to ``hi``, durable before any leader removes."""
        for lo, end in step_ranges([s for s in sorted(set(self.open)) if s <= hi]):
            self.open = [s for s in self.open if not lo <= s <= end]
            shares = [[i for s in range(lo, end + 1) for i in self.batches[s].owned(rank)] for rank in range(2)]
            if self.mutant("leader_before_drop"):
                self.start_leaders(lo, end, shares)
                yield FREE
            yield HELD
            self.check()
            self.world.events[f"commit by {self.world.scenario.policy}"] += 1
            for a, b in self.rights.drop(lo, end):
                yield HELD
                self.write(Drop(0, "trained", steps=(a, b)))
                if self.mutant("step_dropped_twice") and self.choose.chance(0.5):
                    yield HELD
                    self.write(Drop(0, "trained", steps=(a, b)))
                self.steps_dropped += b - a + 1
            if not self.mutant("no_w1"):
                yield from self.durable()
            self.fence()
            if not self.mutant("leader_before_drop"):
                self.start_leaders(lo, end, shares)

    def start_leaders(self, lo: int, hi: int, shares: list[list[str]]) -> None:
        self.busy += 1
        self.spawn(self.lead(lo, hi, shares))

    def lead(self, lo: int, hi: int, shares: list[list[str]]) -> Op:
        """The leaders' removals side by side; ``done`` once all of them report success."""
        left = [list(share) for share in shares]
        absent: list[str] = []
        failed = False
        while any(left):
            share = self.choose.pick([s for s in left if s])
            object_id = share.pop()
            outcome: bool | None = None
            for attempt in range(self.choose.below(3) + 1):
                yield FREE
                outcome = self.delete(object_id, attempt)
                absent += [object_id] if outcome and not attempt else []
                if outcome is not None:
                    break
            failed = failed or outcome is None
            yield FREE
        if not failed or self.mutant("done_after_failure"):
            yield from self.append(Done(0, steps=(lo, hi), a=pack(absent)))
        self.busy -= 1
