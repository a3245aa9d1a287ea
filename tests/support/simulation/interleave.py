"""Every order in which one request's reply and its cancel can cross: all schedules, all fates of the messages, all places of a crash."""

import inspect
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Final

from tests.support.simulation.chooser import Tree
from tests.support.simulation.consumer import Orchestrator
from tests.support.simulation.process import FREE, IDLE, Message, Op, Process
from tests.support.simulation.surroundings import Scenario
from tests.support.simulation.worker import Worker
from tests.support.simulation.world import World

QUIET: Final = Scenario(
    workers=1,
    crash_p=0.0,
    delete_fails_p=0.0,
    put_fails_p=0.0,
    encode_fails_p=0.0,
    full_p=0.0,
    seal_fails_p=0.0,
    recovery_crash_p=0.0,
    audits=False,
)
"""Nothing breaks by itself."""


class Client(Orchestrator):
    """Asks once, and gives up at some moment."""

    def main(self) -> Op:
        self.requests["q1"] = "pending"
        for worker in self.world.workers(self.inc):
            self.sent_to["q1"] = worker.inc
            self.world.send(worker.inc, Message("run", "q1", objects=1))
            self.spawn(self.cancel())
        yield FREE
        while True:
            if self.world.mail.get(self.inc):
                yield from self.receive()
            else:
                yield IDLE


class Crossing(World):
    """One worker and one client; the scheduler's choices are the tree's."""

    def start(self) -> None:
        client = Client(self, "main", "head")
        self.session = client.inc
        self.processes += [client, Worker(self, "w0", "head")]
        for process in self.processes:
            process.remove_later = lambda *_, **__: None  # type: ignore[method-assign]  # removals are the recovery's

    def explore(self, crash: str, seen: set[Hashable]) -> bool:
        """Runs until nobody can do anything; who is told to may die at any operation. False where what follows was played before."""
        idle: set[int] = set()
        while waiting := [(p, t) for p in self.processes for t in p.tasks if id(t) not in idle and p.locked in (None, t)]:
            process, task = self.choose.pick(waiting)
            if process.role == crash and not self.dead and self.choose.below(2):
                self.kill(process)
                self.dead.add(process.inc)
            elif self.go_on(process, task) == IDLE:
                idle.add(id(task))
            else:
                idle.clear()
            assert isinstance(self.choose, Tree)
            if self.choose.fresh:
                state = (self.state(), tuple(t in idle for p in self.processes for t in map(id, p.tasks)))
                if state in seen:
                    return False
                seen.add(state)
        return True

    def state(self) -> Hashable:
        """Everything that the future depends on."""
        mail = tuple((inc, tuple(sorted(map(repr, box)))) for inc, box in sorted(self.mail.items()))
        return mail, repr(sorted(self.objects)), repr(sorted(self.staging)), tuple(map(_process_state, self.processes))


def _process_state(process: Process) -> Hashable:
    where = tuple(sorted(map(repr, map(_places, process.tasks))))
    records = repr([r for _, r in process.disk.records])
    if isinstance(process, Client):
        return process.inc, where, records, repr(process.requests), repr(process.rights.held)
    assert isinstance(process, Worker)
    rights = process.rights
    return process.inc, where, records, repr(rights.unsent), repr(rights._replies), repr((process.running, process.cancelled))


def _places(task: Op | None) -> tuple[object, ...]:
    """Where a task stands, in itself and in what it waits for, with what it knows there."""
    out: list[object] = []
    while inspect.isgenerator(task) and task.gi_frame is not None:
        known = {k: v for k, v in task.gi_frame.f_locals.items() if isinstance(v, bool | int | str | tuple | list)}
        out += [task.gi_frame.f_lasti, repr(sorted(known.items()))]
        task = task.gi_yieldfrom  # type: ignore[assignment]
    return tuple(out)


@dataclass
class Explored:
    """What all paths came to."""

    paths: int = 0
    states: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def explore(*, crash: str = "", lossy: bool = True, mutant: str = "") -> Explored:
    """Plays every path; a state that was met before is not played on again."""
    tree, seen, out = Tree(), set[Hashable](), Explored()
    scenario = QUIET if lossy else replace(QUIET, mail_lost_p=0.0, mail_twice_p=0.0)
    while True:
        world = Crossing(tree, scenario, mutant)
        if world.explore(crash, seen):
            out.paths += 1
            _judge(world, out)
        if not tree.advance():
            out.states = len(seen)
            return out


def _judge(world: World, out: Explored) -> None:
    world.calm = True
    audit = world.end()
    reference = world.reference
    reference.finish(world.disks, world.objects, {})
    taken = any(f.taken for f in world.merged().journals.values())
    reasons = ",".join(sorted(audit.totals.dropped_by)) or "nothing"
    out.outcomes[("taken, " if taken else "") + reasons] += 1
    if audit.exit_code or reference.complaints or audit.totals.dropped > 1 or (taken and "abandoned" in reasons):
        out.wrong.append(f"{audit.verdict} {audit.violations[:1]} {reference.complaints[:1]} {reasons}")
