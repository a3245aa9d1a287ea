"""What surrounds the processes of a simulated run: disks, markers, objects, step files and a network that loses.

Owns everything that outlives a process, and the question who still needs an object. Refuses to choose who goes next: that is the world's.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from fsref.errors import Fenced
from fsref.ledger.merge import RunFold
from fsref.ledger.predicates import StoreView
from fsref.ledger.records import Close, StepRecord
from fsref.ledger.report import Audit, conclude
from fsref.reaper.auditing import evidence_of
from tests.support.simulation.chooser import Chooser
from tests.support.simulation.consumer import Orchestrator
from tests.support.simulation.disk import Disk
from tests.support.simulation.process import Message, Process
from tests.support.simulation.reference import Batch, Reference
from tests.support.simulation.worker import Worker

ORCHESTRATES = ("ask",) * 5 + ("receive",) * 8 + ("cancel",) + ("reject",) * 2 + ("ship",) * 3 + ("adopt",) * 2


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
class Surroundings:
    """Of one run."""

    choose: Chooser
    scenario: Scenario
    mutant: str = ""
    disks: dict[str, Disk] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    objects: set[str] = field(default_factory=set)
    staging: set[str] = field(default_factory=set)
    files: dict[int, Batch] = field(default_factory=dict)
    published: dict[tuple[int, int, int], Batch] = field(default_factory=dict)
    """Every batch that ever could be seen, by step, n and sum: an orchestrator that was declared dead and lives on may replace the file of
    a step that a trainer has read."""
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
    calm: bool = False
    """Nothing is broken any more."""
    ending: bool = False
    boots: int = 0
    requests: int = 0
    lock_owner: str = ""
    events: Counter[str] = field(default_factory=Counter)
    """What happened, by name: a simulation in which something never happens shows nothing about it."""

    def __post_init__(self) -> None:
        self.reference = Reference(self.needed)

    @property
    def faults(self) -> bool:
        return not self.calm

    # Names, journals, markers.

    def mint(self, role: str, label: str) -> str:
        self.boots += 1
        return f"{role}.{label}.{self.boots:016x}"

    def boot(self, node: str) -> str:
        return f"{node}-{self.power.get(node, 0)}"

    def open_journal(self, inc: str, node: str) -> Disk:
        scenario = self.scenario
        disk = self.disks[inc] = Disk(inc, node=node, boot=self.boot(node), segments=scenario.segments, frozen=scenario.zombies)
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

    def publish_step(self, batch: Batch) -> None:
        self.files[batch.step] = self.published[batch.step, batch.n, batch.checksum] = batch

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
        return [i for key in taken if key in self.published for i in self.published[key].ids]

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

    def lock(self, process: Process) -> None:
        assert self.lock_owner in ("", process.inc) or self.lock_owner not in {p.inc for p in self.processes}
        self.lock_owner = process.inc

    def unlock(self, process: Process) -> None:
        assert self.lock_owner == process.inc
        self.lock_owner = ""

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
