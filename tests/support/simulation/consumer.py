"""The orchestrator: asks, takes, cancels, drops, ships, adopts dead workers, and succeeds an orchestrator that died."""

from typing import TYPE_CHECKING, Final

from fsref.errors import Fenced
from fsref.ledger.ids import pack, pack_parts, sum_of
from fsref.ledger.records import Adopt, Close, Ship, Take
from fsref.ledger.recovery import adopt_records, plan_succession, settle
from fsref.ledger.rights import ConsumerRights
from tests.support.simulation.process import FREE, HELD, Message, Op, Process
from tests.support.simulation.reference import Batch
from tests.support.simulation.worker import BYTES_OBJECT

if TYPE_CHECKING:
    from tests.support.simulation.world import World

AHEAD_MAX: Final = 3
"""Steps that may be shipped and not trained."""


class Orchestrator(Process):
    """One orchestrator incarnation. For each request it decides once: ``pending`` becomes ``taken`` or ``nacked``."""

    role = "orc"

    def __init__(self, world: "World", label: str, node: str) -> None:
        super().__init__(world, label, node)
        self.rights = ConsumerRights(self.inc)
        self.requests: dict[str, str] = {}
        self.sent_to: dict[str, str] = {}
        self.foreign: dict[str, set[int]] = {}
        """Producer to what orchestrators before this one took."""
        self.adopting: set[str] = set()
        self.taken = self.shipped = 0
        self.next_step = 0

    def main(self) -> Op:
        yield from self.succeed()
        self.next_step = self.world.steps_end()
        while not self.stopping:
            yield FREE
            yield from getattr(self, self.choose.pick(self.world.scenario.orchestrates))()
        yield from self.close()

    # Requests and replies.

    def ask(self) -> Op:
        workers = self.world.workers(self.inc)
        if not workers or len([r for r in self.requests.values() if r == "pending"]) > 6:
            return
        worker = self.choose.pick(workers)
        request = self.world.next_request()
        self.requests[request] = "pending"
        self.sent_to[request] = worker.inc
        self.world.send(worker.inc, Message("run", request, objects=self.choose.below(3) + 1))
        yield FREE

    def receive(self) -> Op:
        message = self.world.receive(self.inc)
        if message is None:
            return
        request, found = message.request, message.ids
        state = self.requests.get(request)
        if state is None or (state == "nacked" and not self.mutant("take_after_nack")):
            return  # of an orchestrator before this one, or given up: the worker or an adopter settles it
        self.requests[request] = "taken"  # the single point at which it is decided
        yield FREE
        self.world.events["reply came twice"] += state == "taken"
        late = state == "pending" and self.choose.chance(0.08)  # the task was cancelled while it decoded
        yield from self.take(request, found)
        if late:
            yield from self.drop(self.rights.drop([o for o in found if o in self.rights.held]), "late")

    def take(self, request: str, found: tuple[str, ...]) -> Op:
        yield HELD
        self.check()
        refused_before = self.rights.late_refused
        fresh = self.rights.take(dict.fromkeys(found, BYTES_OBJECT))
        if self.mutant("no_dedupe"):
            again = [o for o in found if o not in fresh and o not in self.rights.held and o.split("/")[0] not in self.adopting]
            self.rights.held.update(dict.fromkeys(again, BYTES_OBJECT))
            fresh += again
        if self.mutant("late_reply_taken"):
            refused = [o for o in found if o not in fresh and o not in self.rights.held]
            refused = [o for o in refused if int(o.split("/")[1]) not in self.rights.took(o.split("/")[0])]
            self.rights.held.update(dict.fromkeys(refused, BYTES_OBJECT))
            fresh += refused
        if fresh:
            self.taken += len(fresh)
            self.write(Take(0, request, pack(fresh)))
        self.world.events["reply of an adopted worker refused"] += self.rights.late_refused > refused_before
        yield FREE

    def cancel(self) -> Op:
        pending = [r for r, state in self.requests.items() if state == "pending"]
        if pending:
            request = self.choose.pick(pending)
            self.requests[request] = "nacked"
            yield FREE
            self.world.send(self.sent_to[request], Message("cancel", request), lossy=True)
        yield FREE

    # Decisions.

    def reject(self) -> Op:
        if self.rights.held:
            some = self.choose.some(list(self.rights.held), self.choose.below(3) + 1)
            yield HELD
            self.check()
            yield from self.drop(self.rights.drop(some), self.choose.pick(("filtered", "stale", "pruned")))

    def ship(self) -> Op:
        if len(self.rights.held) < 2 or self.next_step > self.world.trained + AHEAD_MAX:
            return
        yield HELD
        self.check()
        self.fence()
        step, self.next_step = self.next_step, self.next_step + 1
        some = self.choose.some(list(self.rights.held), self.choose.below(4) + 1)
        ids = self.rights.ship(step, some)
        pieces = pack_parts(ids, ids_max=2) if len(ids) > 2 and self.choose.chance(0.3) else [pack(ids)]
        n, checksum, size = len(ids), sum_of(ids), BYTES_OBJECT * len(ids)
        yield from self.append(
            *(Ship(0, step, n, size, checksum, p, (k, len(pieces)) if len(pieces) > 1 else None) for k, p in enumerate(pieces, 1))
        )
        self.shipped += n
        if self.mutant("ship_twice") and self.choose.chance(0.3):
            self.rights.held[ids[0]] = BYTES_OBJECT
        if self.mutant("drop_after_ship") and self.choose.chance(0.3):
            yield from self.drop(ids[:1], "stale")
        if not self.mutant("no_w2"):
            yield from self.durable()
        yield FREE
        first = [i for i in ids if self.choose.chance(0.5)]
        rest = [i for i in ids if i not in first]
        dummies = self.choose.some(ids, 1) if self.choose.chance(0.3) else []
        self.world.events["padding dummy"] += len(dummies)
        self.world.publish_step(Batch(step, (tuple(first), tuple(rest + dummies)), n, checksum, self.inc))
        yield FREE

    # Adoption.

    def adopt(self) -> Op:
        """A worker that died or closed: fence, sync, journal, listing, record, drops, redo."""
        ended = [i for i in self.world.ended_workers() if i not in self.adopting or self.mutant("double_adoption")]
        if not ended:
            return
        h = self.choose.pick(ended)
        self.adopting.add(h)
        disk = self.world.disks[h]
        yield FREE
        try:
            self.world.put_fence(h, by=self.inc, skip=self.mutant("adopt_without_fence"))
        except Fenced:
            return  # somebody else's
        yield FREE
        if not self.mutant("adopted_unsynced"):
            disk.settle()
        fold, end = disk.fold(torn=self.mutant("torn_tail_believed")), disk.end
        yield FREE
        listed = self.world.listed(h)
        if self.mutant("no_listing"):
            listed &= set(fold.kept)
        yield HELD
        self.check()
        dropped = fold.drops.get(h, {})
        spoken_for = set(self.rights.took(h)) | self.foreign.get(h, set())
        found = settle(fold, listed, dropped=dropped, spoken_for=spoken_for, staged=self.world.staged(h))
        self.world.events["worker adopted while the run goes on"] += 1
        self.rights.refuse(h)
        how = self.world.how(h)
        yield from self.append(*adopt_records(h, how=how, end=end, settlement=found, ms=0))
        yield from self.drop([f"{h}/{s}" for s in found.orphans], "orphan")
        yield from self.drop([f"{h}/{s}" for s in found.unjournaled], "unjournaled")
        done = fold.done.get(h, {})
        if not self.mutant("no_redo"):
            self.remove_later([f"{h}/{s}" for s in dropped if s not in done], attempt=1)
        self.world.unstage(h)
        yield FREE

    def succeed(self) -> Op:
        """Everything that orchestrators before this one took and did not hand on is dropped; what they adopted comes along."""
        world = self.world
        run = world.merged()
        before = [i for i in run.journals if i[:3] == "orc" and i != self.inc and not run.adopted(i)]
        for h in before:
            yield FREE
            world.put_fence(h, by=self.inc, skip=False)
            yield FREE
            world.disks[h].settle()
        yield FREE
        run = world.merged()
        for fold in run.journals.values():
            if fold.role == "orc" and fold.inc != self.inc and not self.mutant("old_takes_forgotten"):
                for inc, seqs in fold.taken.items():
                    self.foreign.setdefault(inc, set()).update(seqs)
        yield from self.append(*(Adopt(0, h, world.how(h), world.disks[h].end) for h in before))
        published = {(b.step, b.n, b.checksum) for b in world.files.values()}
        self.world.events["orchestrator succeeded another"] += bool(before)
        plan = plan_succession(run, before, visible=published.__contains__)
        yield from self.drop(plan.recovered, "recovered")
        yield from self.drop(plan.orphans, "orphan")
        yield from self.drop(plan.unjournaled, "unjournaled")
        self.remove_later(plan.redo, attempt=1)
        self.adopting |= {h for h in run.journals if h[:3] == "env" and run.adopted(h)}
        for h in self.adopting:
            self.rights.refuse(h)

    def close(self) -> Op:
        """Driven by the ledger: what is held, no queue can be forgotten."""
        yield HELD
        self.check()
        yield from self.drop(self.rights.drop(list(self.rights.held)), "shutdown")
        yield from self.drain()
        counters = {"taken": self.taken, "dropped": self.dropped, "shipped": self.shipped, "shipped_bytes": BYTES_OBJECT * self.shipped}
        yield from self.finish(Close(0, counters={k: v for k, v in counters.items() if v}))
