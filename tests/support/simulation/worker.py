"""The env worker: puts objects, replies, hears cancels, rotates when a new orchestrator comes."""

from typing import TYPE_CHECKING

from fsref.ledger.ids import pack_seqs
from fsref.ledger.records import Close, Keep
from fsref.ledger.rights import EnvRights
from tests.support.simulation.process import FREE, HELD, IDLE, Message, Op, Process

if TYPE_CHECKING:
    from tests.support.simulation.world import World

BYTES_OBJECT = 100


class Worker(Process):
    """One env incarnation; it serves the orchestrator that was there when it opened."""

    role = "env"

    def __init__(self, world: "World", label: str, node: str) -> None:
        super().__init__(world, label, node)
        self.rights = EnvRights(self.inc)
        self.session = world.session
        self.running: set[str] = set()
        self.cancelled: set[str] = set()

    def main(self) -> Op:
        while not self.stopping and self.session == self.world.session:
            message = self.world.receive(self.inc)
            if message is None:
                yield IDLE
                continue
            yield FREE
            if message.kind == "run":
                self.running.add(message.request)
                self.spawn(self.put(message.request, message.objects))
            else:
                yield from self.nack(message.request)
        while self.running:
            yield IDLE
        yield from self.close()
        if not self.stopping:
            self.world.replace(self)

    def put(self, request: str, count: int) -> Op:
        """A rollout: objects, receipts, reply."""
        found: list[str] = []
        for _ in range(count):
            if request in self.cancelled:
                break
            seq = self.rights.mint()
            object_id = f"{self.inc}/{seq}"
            if self.choose.chance(self.world.scenario.put_fails_p):
                continue
            early = self.mutant("keep_before_publish")
            if early:
                yield from self.keep(seq)
            yield FREE
            self.world.staging.add(object_id)
            yield FREE
            self.world.publish(object_id, by=self.inc)
            if not early:
                yield from self.keep(seq)
            found.append(object_id)
        if request in self.cancelled or (found and self.choose.chance(self.world.scenario.encode_fails_p)):
            fresh = self.rights.discard(found)
            yield from self.drop(fresh, "never_sent" if request in self.cancelled else "encode_error")
        else:
            self.rights.sent(request, found)
            yield FREE
            self.world.send(self.session, Message("reply", request, tuple(found)), lossy=True)
            if self.mutant("drop_without_nack") and self.choose.chance(0.1):
                yield from self.drop(found, "abandoned")
        self.running.discard(request)
        yield FREE

    def keep(self, seq: int) -> Op:
        yield HELD
        self.check()
        self.rights.keep(seq, byte_count=BYTES_OBJECT)
        self.write(Keep(0, seq, BYTES_OBJECT, 1, 10, 1))
        yield FREE

    def nack(self, request: str) -> Op:
        """The client gave up: what is still at work is stopped, what was sent comes back."""
        if request in self.running:
            self.cancelled.add(request)
        yield from self.drop(self.rights.nack(request), "abandoned")

    def close(self) -> Op:
        fresh = self.rights.discard([f"{self.inc}/{s}" for s in list(self.rights.unsent)])
        yield from self.drop(fresh, "never_sent")
        yield from self.drain()
        counters = {"kept": len(self.rights.kept), "kept_bytes": BYTES_OBJECT * len(self.rights.kept), "dropped": self.dropped}
        yield from self.finish(Close(0, self.rights.minted, {k: v for k, v in counters.items() if v}, pack_seqs(self.rights.void())))
