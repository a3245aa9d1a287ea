"""The scheduler of a simulated run, its accidents, and a launcher that reaps and restarts.

Owns every choice of who goes next and what breaks when. What the processes do is theirs; what should have come of it is judged by the
product's audit and by the reference model.
"""

from dataclasses import dataclass

from fsref.errors import Fenced, JournalPoisoned
from fsref.ledger.report import Audit
from tests.support.simulation.consumer import Orchestrator
from tests.support.simulation.learner import Trainer
from tests.support.simulation.process import FREE, HELD, IDLE, Op, Process
from tests.support.simulation.recoverer import Recoverer
from tests.support.simulation.surroundings import Surroundings
from tests.support.simulation.worker import Worker

IDLE_TURNS = 6
MEDDLE_P = 0.004


@dataclass
class World(Surroundings):
    """One run, played."""

    crash_at: int = 0
    """The operation before which a process dies, from 1; 0: none is chosen beforehand."""
    crash_kind: str = "process"
    """``process``, ``node`` or ``all``."""
    recovery_crash_at: int = 0
    """The operation of the final recovery before which it dies, from 1."""
    phase: str = "run"
    replay: bool = False
    done_recovering: bool = False
    steps: int = 0
    crashes: int = 0
    recovery_ops: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.places = {f"w{n}": self.choose.pick(("head", f"node{n}")) for n in range(self.scenario.workers)}
        self.start()
        if self.scenario.audits:
            self.processes.append(Auditor(self))

    # Time.

    def run(self, ops: int) -> None:
        """So many operations, or until nobody is left."""
        for _ in range(ops):
            if not self.processes and self.ending:
                return
            self.step()

    def step(self) -> None:
        """One operation of one process, unless it dies first; now and then the launcher looks around."""
        self.steps += 1
        if self.scenario.zombies or self.scenario.stranger:
            self.meddle()
        if self.choose.chance(0.08) or not self.processes:
            self.tend()
        runnable = [p for p in self.processes if not p.paused]
        if not runnable:
            return
        process = self.choose.pick(runnable)
        if self.steps == self.crash_at:
            self.crash(process, self.crash_kind)
            return
        if not self.calm and self.choose.chance(self.scenario.crash_p):
            self.crash(process, self.choose.pick(("process", "process", "process", "node", "all")))
            return
        turns = 0
        while self.go_on(process) == IDLE and turns < IDLE_TURNS:
            turns += 1
            process = self.choose.pick(runnable)
            if not process.alive or process.paused:
                return

    def go_on(self, process: Process, task: Op | None = None) -> int:
        """One operation, of this task or any; what the task yielded."""
        task = process.locked or task or self.choose.pick(process.tasks)
        said = FREE
        try:
            said = next(task)
            process.locked = task if said == HELD else None
        except StopIteration:
            process.tasks.remove(task)
            process.locked = None
        except (Fenced, JournalPoisoned):
            process.alive = False  # it stops by itself, without a close
        if not process.alive or not process.tasks:
            process.alive = False
            if process in self.processes:
                self.processes.remove(process)
        return said

    def meddle(self) -> None:
        """A living worker is declared dead; somebody who is no part of the run removes an object."""
        if self.calm or self.phase != "run" or not self.choose.chance(MEDDLE_P):
            return
        workers = self.counted(Worker)
        if self.scenario.zombies and workers and not self.forced:
            self.declare_dead(self.choose.pick(workers))
        if self.scenario.stranger:
            self.steal()

    def steal(self, *, undecided: bool = False) -> None:
        """Somebody outside removes an object; ``undecided``: one that nobody has decided to remove."""
        decisions = self.reference.decisions
        objects = [o for o in sorted(self.objects) if not (undecided and o in decisions)]
        if objects:
            object_id = self.choose.pick(objects)
            self.events["object stolen"] += 1
            self.objects.discard(object_id)
            self.reference.strangers[object_id] = undecided

    def declare_dead(self, process: Process) -> None:
        """It is only slow, and wakes up later."""
        self.events["declared dead and alive"] += 1
        process.paused = True
        self.forced.add(process.inc)
        self.reference.zombies.add(process.inc)

    # Death.

    def crash(self, process: Process, kind: str) -> None:
        self.crashes += 1
        power = self.choose.chance(self.scenario.power_p) and kind != "process"
        if kind == "all" or process.role == "rec":
            self.outage(power=power)
        elif kind == "node" or power:
            self.lose_node(process.node, power=power)
        else:
            self.kill(process)
        if not power and kind == "process" and self.choose.chance(self.scenario.power_p):
            self.lose_node(process.node, power=True)

    def kill(self, process: Process) -> None:
        self.events[f"{process.role or 'audit'} killed"] += 1
        process.alive = False
        if process in self.processes and process.role:
            self.processes.remove(process)

    def lose_node(self, node: str, *, power: bool) -> None:
        for process in [p for p in self.processes if p.node == node and p.inc not in self.forced]:
            self.kill(process)
        if power:
            self.events["power lost"] += 1
            boot = self.boot(node)
            self.power[node] = self.power.get(node, 0) + 1
            for disk in self.disks.values():
                if disk.boot == boot and disk.inc not in self.forced:
                    disk.lose(self.choose.share())
            self.staging = {o for o in self.staging if self.disks[o.split("/")[0]].boot != boot}

    def outage(self, *, power: bool) -> None:
        """The whole run stops; some process may be declared dead that is only slow."""
        counted = [p for p in self.processes if p.role and p.role != "rec" and p.inc not in self.forced]
        if self.scenario.zombies and counted and not self.forced and not power and self.phase == "run":
            self.declare_dead(self.choose.pick(counted))
        for process in [p for p in self.processes if p.role and p.inc not in self.forced]:
            self.kill(process)
        if power:
            for node in sorted({"head", *self.places.values()}):
                self.lose_node(node, power=True)
        if self.phase == "run":
            self.replay = self.choose.chance(0.5)
        self.phase, self.done_recovering = "recover", False
        self.mail.clear()

    # The launcher.

    def start(self) -> None:
        self.phase = "run"
        self.spawn_orchestrator()
        self.processes.append(Trainer(self, "main", "head"))
        for label in self.places:
            self.processes.append(Worker(self, label, self.places[label]))

    def spawn_orchestrator(self) -> None:
        orchestrator = Orchestrator(self, "main", "head")
        self.session = orchestrator.inc
        self.processes.append(orchestrator)

    def counted(self, kind: type[Process]) -> list[Process]:
        """Living processes of a kind, without those that were declared dead."""
        return [p for p in self.processes if isinstance(p, kind) and p.inc not in self.forced]

    def tend(self) -> None:
        """Reaps and restarts."""
        alive = {p.inc for p in self.processes if p.inc not in self.forced}
        self.dead |= {i for i in self.disks if i not in alive}
        if self.phase == "recover":
            self.tend_recovery()
        elif not self.ending:
            self.tend_run()
        for process in self.processes:
            if process.paused and self.phase == "run" and self.choose.chance(0.05):
                process.paused = False  # the zombie wakes up
                self.events["zombie woke"] += 1

    def tend_recovery(self) -> None:
        if self.counted(Recoverer):
            return
        if not self.done_recovering:
            step = None if self.ending else self.checkpoint
            self.processes.append(Recoverer(self, "main", "head", resume_step=step, replay=self.replay and not self.ending))
        elif not self.ending:
            if not self.replay:
                self.files = {s: b for s, b in self.files.items() if s <= self.checkpoint}
                self.trained = self.checkpoint
            self.start()

    def tend_run(self) -> None:
        labels = {p.label for p in self.counted(Worker)}
        for label in self.places:
            if label not in labels:
                self.processes.append(Worker(self, label, self.places[label]))
        if not self.counted(Trainer):
            self.processes.append(Trainer(self, "main", "head"))
        if not self.counted(Orchestrator):
            if self.choose.chance(0.6):
                self.spawn_orchestrator()  # it succeeds the dead one while workers and trainer live on
            else:
                self.outage(power=False)

    def replace(self, worker: Process) -> None:
        """A worker that rotated goes on as another incarnation."""
        self.events["worker rotated"] += 1
        if worker.inc not in self.forced and self.phase == "run" and not self.ending:
            self.processes.append(Worker(self, worker.label, worker.node))

    def recovered(self, recoverer: Recoverer) -> None:
        self.done_recovering = recoverer.result
        if not recoverer.result or self.forced:
            return
        awaited = {i for b in self.files.values() if not b.doomed for i in b.ids}
        for object_id in self.objects - awaited:
            self.reference.say(f"{recoverer.inc} left {object_id} behind, which no step file names")

    def end(self) -> Audit:
        """Everything stops, cleanly or not; the run is closed, and the closing may be killed as well."""
        self.ending = True
        if self.scenario.clean_end and self.phase == "run":
            for process in self.processes:
                process.stopping = True
            self.run(1500)
        self.outage(power=not self.calm and self.choose.chance(0.4))
        if self.scenario.stranger:
            self.steal(undecided=True)
        for process in list(self.processes):
            self.kill(process)
        self.processes.clear()
        while not self.done_recovering:
            self.tend()
            while self.processes:
                process = self.processes[0]
                self.recovery_ops += 1
                if self.recovery_ops == self.recovery_crash_at:
                    self.outage(power=self.choose.chance(self.scenario.power_p))
                elif not self.calm and self.choose.chance(self.scenario.recovery_crash_p):
                    self.outage(power=self.choose.chance(self.scenario.power_p))
                    self.calm = self.choose.chance(0.5)
                else:
                    self.go_on(process)
        return self.audit()


class Auditor(Process):
    """``fsref audit`` beside the running processes: journals, listing, journals again."""

    def __init__(self, world: World) -> None:
        self.world, self.choose, self.inc, self.node = world, world.choose, "audit", "elsewhere"
        self.alive, self.paused, self.locked, self.stopping, self.label = True, False, None, False, "audit"
        self.tasks = [self.main()]

    def main(self) -> Op:
        world = self.world
        for _ in range(2):
            for _ in range(self.choose.below(40) + 1):
                yield FREE
            settled = {i: d.end for i, d in world.disks.items()}
            for _ in range(self.choose.below(6) + 1):
                yield FREE
            listing = world.listing()
            for _ in range(self.choose.below(6) + 1):
                yield FREE
            if world.crashes or world.forced:
                continue  # what a power loss took after it was read is no fault of the audit
            found = world.audit(settled=settled, listing=listing)
            if found.violations and not world.reference.strangers:
                world.reference.say(f"an audit of the live run says {found.violations[0]}")
