"""The run's surroundings and its scheduler: nodes, disks, markers, objects, step files, the network, and a launcher that restarts.

Owns every choice of who goes next and what breaks when. What the processes do is theirs; what should have come of it is judged by the
product's audit and by the reference model.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from fsref.errors import Fenced, JournalPoisoned
from fsref.ledger.merge import RunFold
from fsref.ledger.predicates import StoreView
from fsref.ledger.records import Close, StepRecord
from fsref.ledger.report import Audit, conclude
from fsref.reaper.auditing import evidence_of
from tests.support.simulation.chooser import Chooser
from tests.support.simulation.consumer import Orchestrator
from tests.support.simulation.disk import Disk
from tests.support.simulation.learner import Trainer
from tests.support.simulation.process import FREE, HELD, IDLE, Message, Op, Process
from tests.support.simulation.recoverer import Recoverer
from tests.support.simulation.reference import Batch, Reference
from tests.support.simulation.worker import Worker

ORCHESTRATES = ("ask",) * 5 + ("receive",) * 8 + ("cancel",) + ("reject",) * 2 + ("ship",) * 3 + ("adopt",) * 2
IDLE_TURNS = 6
MEDDLE_P = 0.004


@dataclass(frozen=True)
class Scenario:
    """What may happen in one history, and how often."""

    ops: int = 300
    """Operations before everything ends."""
    workers: int = 2
    crash_p: float = 0.01
    """Per operation."""
    power_p: float = 0.4
    """Crashes that take the unsynced tails of their node along."""
    mail_lost_p: float = 0.08
    mail_twice_p: float = 0.08
    delete_fails_p: float = 0.05
    put_fails_p: float = 0.05
    encode_fails_p: float = 0.03
    recovery_crash_p: float = 0.008
    """Per operation of the final recovery."""
    full_p: float = 0.001
    """Appends that a full disk tears."""
    seal_fails_p: float = 0.1
    segments: bool = False
    """The object-storage form: journals die with their node, sealed segments stay."""
    policy: str = "checkpoint"
    keep_last: int = 2
    zombies: bool = False
    stranger: bool = False
    """Somebody outside removes an object."""
    audits: bool = True
    clean_end: bool = False
    orchestrates: tuple[str, ...] = ORCHESTRATES


@dataclass
class World:
    """One run."""

    choose: Chooser
    scenario: Scenario
    mutant: str = ""
    crash_at: int = 0
    """The operation before which a process dies, from 1; 0: none is chosen beforehand."""
    crash_kind: str = "process"
    """``process``, ``node`` or ``all``."""
    recovery_crash_at: int = 0
    """The operation of the final recovery before which it dies, from 1."""

    disks: dict[str, Disk] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    objects: set[str] = field(default_factory=set)
    staging: set[str] = field(default_factory=set)
    files: dict[int, Batch] = field(default_factory=dict)
    adopted: dict[str, str] = field(default_factory=dict)
    """Fences: incarnation to who put it up first."""
    dead: set[str] = field(default_factory=set)
    forced: set[str] = field(default_factory=set)
    mail: dict[str, list[Message]] = field(default_factory=dict)
    replies: dict[str, tuple[str, ...]] = field(default_factory=dict)
    power: dict[str, int] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    checkpoint: int = -1
    trained: int = -1
    session: str = ""
    phase: str = "run"
    replay: bool = False
    calm: bool = False
    """Nothing is broken any more."""
    ending: bool = False
    done_recovering: bool = False
    steps: int = 0
    boots: int = 0
    requests: int = 0
    lock_owner: str = ""
    crashes: int = 0
    recovery_ops: int = 0
    events: Counter[str] = field(default_factory=Counter)
    """What happened, by name: a simulation in which something never happens shows nothing about it."""

    def __post_init__(self) -> None:
        self.reference = Reference(self.needed)
        self.places = {f"w{n}": self.choose.pick(("head", f"node{n}")) for n in range(self.scenario.workers)}
        self.start()
        if self.scenario.audits:
            self.processes.append(Auditor(self))

    @property
    def faults(self) -> bool:
        return not self.calm

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
            for node in {"head", *self.places.values()}:
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

    def lock(self, process: Process) -> None:
        assert self.lock_owner in ("", process.inc) or self.lock_owner not in {p.inc for p in self.processes}
        self.lock_owner = process.inc

    def unlock(self, process: Process) -> None:
        assert self.lock_owner == process.inc
        self.lock_owner = ""

    # Names, journals, markers.

    def mint(self, role: str, label: str) -> str:
        self.boots += 1
        return f"{role}.{label}.{self.boots:016x}"

    def boot(self, node: str) -> str:
        return f"{node}-{self.power.get(node, 0)}"

    def open_journal(self, inc: str, node: str) -> Disk:
        disk = self.disks[inc] = Disk(inc, node=node, boot=self.boot(node), segments=self.scenario.segments)
        return disk

    def next_request(self) -> str:
        self.requests += 1
        return f"q{self.requests}"

    def put_fence(self, h: str, *, by: str, skip: bool) -> None:
        """A fence of somebody who has ended comes with the rights of that one."""
        owner = self.adopted.get(h)
        if owner is None:
            if not skip:
                self.adopted[h] = by
        elif owner != by and any(p.inc == owner for p in self.processes if p.inc not in self.forced):
            raise Fenced(f"{h} was adopted by {owner}")

    def how(self, h: str) -> str:
        records = self.disks[h].records
        if records and isinstance(records[-1][1], Close):
            return "closed"
        return "forced" if h in self.forced else "dead"

    # Network.

    def send(self, to: str, message: Message, *, lossy: bool = False) -> None:
        copies = 1
        if message.kind == "reply":
            self.replies[message.request] = message.ids
        if lossy and not self.calm:
            copies = 0 if self.choose.chance(self.scenario.mail_lost_p) else 2 if self.choose.chance(self.scenario.mail_twice_p) else 1
            self.events[f"{message.kind} {('lost', 'sent', 'doubled')[copies]}"] += 1
        self.mail.setdefault(to, []).extend([message] * copies)

    def receive(self, inc: str) -> Message | None:
        """Any of the messages that are there: order means nothing."""
        box = self.mail.get(inc)
        return box.pop(self.choose.below(len(box))) if box else None

    def workers(self, session: str) -> list[Worker]:
        return [p for p in self.processes if isinstance(p, Worker) and p.session == session and p.inc not in self.forced]

    def ended_workers(self) -> list[str]:
        """Workers that closed, or that the launcher waited for."""
        alive = {p.inc for p in self.processes if p.inc not in self.forced}
        living = self.mutant == "adopt_the_living"
        ended = [i for i in self.disks if i.startswith("env.") and (living or (i not in alive and i in self.dead))]
        return [i for i in ended if self.mutant == "double_adoption" or self.adopted.get(i) is None or self.adopted[i] not in alive]

    # Objects and files.

    def publish(self, object_id: str, *, by: str) -> None:
        self.staging.discard(object_id)
        self.objects.add(object_id)
        self.reference.created[object_id] = by

    def remove(self, object_id: str, *, by: str) -> None:
        if object_id in self.objects:
            self.reference.remove(object_id, by)
            self.objects.discard(object_id)

    def staging_names(self) -> tuple[str, ...]:
        return tuple(f"obj/{inc}/.{int(seq):010d}.tmp" for inc, _, seq in (o.partition("/") for o in sorted(self.staging)))

    def staged(self, h: str) -> list[int]:
        return StoreView(staging=self.staging_names()).staged(h)

    def unstage(self, h: str) -> None:
        self.staging = {o for o in self.staging if not o.startswith(f"{h}/")}

    def listing(self, objects: Iterable[str] | None = None) -> dict[str, set[int]]:
        out: dict[str, set[int]] = {}
        for object_id in self.objects if objects is None else objects:
            inc, _, seq = object_id.partition("/")
            out.setdefault(inc, set()).add(int(seq))
        return out

    def listed(self, h: str) -> set[int]:
        return self.listing().get(h, set())

    def steps_end(self) -> int:
        return max([self.checkpoint, *self.files]) + 1

    def ids_of_steps(self, disk: Disk, lo: int, hi: int) -> list[str]:
        """The objects of the batches that a trainer itself took of these steps."""
        taken = {(r.step, r.n, r.sum) for _, r in disk.records if isinstance(r, StepRecord) and r.st == "taken" and lo <= r.step <= hi}
        return [i for b in self.files.values() if (b.step, b.n, b.checksum) in taken for i in b.ids]

    def needed(self, object_id: str) -> str:
        """Who would miss an object if it went now."""
        scenario = self.scenario
        for batch in self.files.values():
            if not batch.doomed and object_id in batch.ids:
                first = {"checkpoint": self.checkpoint + 1, "keep_last": self.trained - scenario.keep_last + 1}
                wanted = not batch.used if scenario.policy == "fetched" else batch.step >= first[scenario.policy]
                return f"step {batch.step}" if wanted else ""
        inc, _, text = object_id.partition("/")
        for process in self.processes:
            if process.inc in self.forced or not process.alive:
                continue
            if isinstance(process, Worker) and process.inc == inc and int(text) in process.rights.unsent and not self.ending:
                return process.inc
            if isinstance(process, Orchestrator):
                pending = [r for r, state in process.requests.items() if state == "pending" and object_id in self.replies.get(r, ())]
                if object_id in process.rights.held or (pending and inc not in process.adopting and not process.stopping):
                    return process.inc
        return ""

    # Looking at it.

    def merged(self, *, torn: bool = False) -> RunFold:
        run = RunFold({i: d.fold(torn=torn) for i, d in self.disks.items()})
        for h, *_ in run.beyond:
            self.disks[h].forget_fold()
        return run

    def audit(self, *, settled: dict[str, int] | None = None, listing: dict[str, set[int]] | None = None) -> Audit:
        run = self.merged()
        view = StoreView(self.listing() if listing is None else listing, self.staging_names())
        read = {i: found for i in self.disks if (found := run.adoption_of(i))}
        run.problems += [f"{i} is shorter than {by} read it" for i, (by, a) in read.items() if a.end > self.disks[i].end]
        return conclude("r", evidence_of(run, view, settled))

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
