"""A whole run in memory: the real rights, records, fold and recovery plans, driven one step at a time, with crashes between steps.

Every append is one step, every removal another; a crash loses what was decided in memory and never what was appended. Messages may be
lost, doubled or late. The mutants break one rule each; the audit must notice them.
"""

import random
from dataclasses import dataclass, field

from fsref.ledger.ids import sum_of
from fsref.ledger.predicates import Evidence, StoreView
from fsref.ledger.recovery import adopt_records, plan_recovery, settle
from fsref.ledger.report import Audit, conclude
from fsref.ledger.rights import ConsumerRights, EnvRights, StepRights
from tests.support.journals import Book, merged


@dataclass
class Removals:
    """What one holder's deleter has to do: ids with the attempts so far, and ids that are gone but not recorded yet."""

    queue: list[tuple[str, int]] = field(default_factory=list)
    gone: list[tuple[str, int, bool]] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        return not self.queue and not self.gone


@dataclass
class Env:
    rights: EnvRights
    book: Book
    removals: Removals = field(default_factory=Removals)
    ready: list[tuple[str, list[str]]] = field(default_factory=list)
    alive: bool = True


class World:
    """One run. ``mutant`` names a rule to break: see the tests."""

    def __init__(self, seed: int, *, mutant: str = "") -> None:
        self.rng = random.Random(seed)
        self.mutant = mutant
        self.store: set[str] = set()
        self.books: list[Book] = []
        self.boots = 0
        self.power = 0
        self.requests = 0
        self.mail: list[tuple[str, list[str]]] = []
        self.nacked: set[str] = set()
        self.envs: list[Env] = []
        self.closed_envs: list[Env] = []
        self.files: dict[int, list[str]] = {}
        self.checkpoint = -1
        self.acted: dict[str, int] = {}
        self.start()

    def book(self, role: str, label: str = "main") -> Book:
        """Each worker runs on its own node, the rest on one."""
        self.boots += 1
        node = label if role == "env" else "head"
        book = Book(f"{role}.{label}.{self.boots:016x}", boot=f"{node}-{self.power}")
        self.books.append(book)
        return book

    def start(self) -> None:
        """Opens an orchestrator, a trainer and two workers."""
        self.orc_book = self.book("orc")
        self.orc = ConsumerRights(self.orc_book.inc)
        self.orc_removals = Removals()
        self.next_step = self.checkpoint + 1
        self.trn_book = self.book("trn")
        self.trn_removals = Removals()
        run = merged(*self.books)
        for book in [b for b in self.books if b.inc[:3] in ("trn", "rec") and b is not self.trn_book and not run.adopted(b.inc)]:
            self.trn_book.adopt(book, how="closed" if run.journals[book.inc].sealed else "dead")
        self.trn = StepRights(self.trn_book.inc, released=merged(*self.books).released())
        self.trained = self.checkpoint
        self.shares: list[tuple[int, int, list[str]]] = []
        while len(self.envs) < 2:
            self.spawn()

    def spawn(self) -> None:
        book = self.book("env", f"w{len(self.envs)}")
        self.envs.append(Env(EnvRights(book.inc), book))

    # What can happen next. Each method does one thing or nothing.

    def put(self) -> None:
        env = self.rng.choice(self.envs)
        found = []
        for _ in range(self.rng.randint(1, 3)):
            seq = env.rights.mint()
            fate = self.rng.random()
            if fate < 0.1:
                continue  # the put failed before it published
            if self.mutant == "keep_before_publish":
                env.rights.keep(seq, byte_count=100)
                env.book.keep(seq)
                if fate < 0.3:
                    self.crash_env(env)
                    return
            self.store.add(f"{env.book.inc}/{seq}")
            if self.mutant != "keep_before_publish":
                if fate < 0.15:
                    self.crash_env(env)
                    return
                env.rights.keep(seq, byte_count=100)
                env.book.keep(seq)
            found.append(f"{env.book.inc}/{seq}")
        self.requests += 1
        if found:
            env.ready.append((f"q{self.requests}", found))

    def send(self) -> None:
        env = self.rng.choice(self.envs)
        if env.ready:
            request, found = env.ready.pop(0)
            env.rights.sent(request, found)
            fate = self.rng.random()
            if fate > 0.1:
                self.mail.append((request, found))
            if fate > 0.8:
                self.mail.append((request, found))
            if self.mutant == "drop_without_nack" and fate > 0.6:
                env.book.drop("abandoned", *found)
                env.removals.queue += [(o, 0) for o in found]

    def discard(self) -> None:
        env = self.rng.choice(self.envs)
        if env.ready:
            fresh = env.rights.discard(env.ready.pop()[1])
            env.book.drop("never_sent", *fresh)
            env.removals.queue += [(o, 0) for o in fresh]

    def deliver(self) -> None:
        if not self.mail:
            return
        request, found = self.mail.pop(self.rng.randrange(len(self.mail)))
        if request in self.nacked and self.mutant != "take_after_nack":
            return
        self.nacked.discard(request)
        fresh = self.orc.take(dict.fromkeys(found, 100))
        if self.mutant == "no_dedupe":
            again = [o for o in found if o not in fresh and o not in self.orc.held]
            self.orc.held.update(dict.fromkeys(again, 100))
            fresh += again
        if fresh:
            self.orc_book.take(*fresh)

    def nack(self) -> None:
        """The client gives up on a reply that it has not taken: what is in the mail will never be taken."""
        if self.mail:
            request, found = self.rng.choice(self.mail)
            if any(o in self.orc.held or self.seen(o) for o in found):
                return
            self.nacked.add(request)
            for env in self.envs:
                dropped = env.rights.nack(request)
                if dropped:
                    env.book.drop("abandoned", *dropped)
                    env.removals.queue += [(o, 0) for o in dropped]

    def seen(self, object_id: str) -> bool:
        inc, seq = object_id.split("/")
        return int(seq) in self.orc.took(inc)

    def drop(self) -> None:
        if self.orc.held:
            some = self.rng.sample(sorted(self.orc.held), min(len(self.orc.held), self.rng.randint(1, 3)))
            if self.mutant == "delete_before_drop":
                self.store.difference_update(some)
                if self.rng.random() < 0.5:
                    self.crash_all()
                    return
            self.orc.drop(some)
            self.orc_book.drop(self.rng.choice(["filtered", "stale", "late"]), *some)
            self.orc_removals.queue += [(o, 0) for o in some]

    def ship(self) -> None:
        if len(self.orc.held) < 2 or self.next_step > self.trained + 2:
            return
        some = self.rng.sample(sorted(self.orc.held), self.rng.randint(1, len(self.orc.held)))
        self.orc.ship(self.next_step, some)
        self.orc_book.ship(self.next_step, *some)
        if self.mutant != "no_w2":
            self.orc_book.sync()
        if self.rng.random() < 0.05:
            self.crash_all()  # shipped, and the step file never appears
            return
        self.files[self.next_step] = some
        self.next_step += 1

    def train(self) -> None:
        step = self.trained + 1
        if step not in self.files:
            return
        found = self.files[step]
        if self.trn.take(step, n=len(found), checksum=sum_of(found)):
            self.trn_book.step(step, *found)
        if self.rng.random() < 0.05:
            self.crash_all()
            return
        miss = {"missing": found[:1]} if self.rng.random() < 0.1 else None
        self.trn_book.step(step, *found, st="used", miss=miss)
        self.trained = step

    def commit(self) -> None:
        if self.trained > self.checkpoint and self.mutant != "commit_before_checkpoint":
            self.checkpoint = self.trained
        waiting = [s for s in sorted(self.trn.taken) if s <= self.trained]
        if not waiting:
            return
        lo, hi = waiting[0], waiting[-1]
        self.trn.drop(lo, hi)
        self.trn_book.drop_steps(lo, hi)
        if self.mutant != "no_w1":
            self.trn_book.sync()
        self.shares.append((lo, hi, [o for s in range(lo, hi + 1) for o in self.files[s]]))

    def lead(self) -> None:
        """Leaders delete a part of what rank 0 dropped; once all is gone rank 0 says so."""
        if not self.shares:
            return
        lo, hi, left = self.shares[0]
        for object_id in [left.pop() for _ in range(min(len(left), self.rng.randint(1, 4)))]:
            self.store.discard(object_id)
        if not left and self.rng.random() < 0.7:
            self.trn_book.done_steps(lo, hi)
            self.shares.pop(0)

    def remove(self) -> None:
        """One deleter removes a batch, or records one that is gone."""
        every = [(e.book, e.removals) for e in self.envs] + [(self.orc_book, self.orc_removals), (self.trn_book, self.trn_removals)]
        book, todo = self.rng.choice(every)
        if todo.gone:
            for object_id, attempt, absent in todo.gone:
                book.done(object_id, attempt=attempt + 1, absent=[object_id] if absent else [])
            todo.gone = []
        elif todo.queue:
            if self.mutant != "no_w1":
                book.sync()
            some = [todo.queue.pop() for _ in range(min(len(todo.queue), 3))]
            for object_id, attempt in some:
                todo.gone.append((object_id, attempt, object_id not in self.store))
                self.store.discard(object_id)

    def rotate(self) -> None:
        """A worker closes while replies may be out, and another incarnation takes its place."""
        env = self.rng.choice(self.envs)
        self.envs.remove(env)
        rest = env.rights.discard([f"{env.book.inc}/{s}" for s in list(env.rights.unsent)])
        if rest:
            env.book.drop("never_sent", *rest)
        env.book.close(
            n=env.rights.minted,
            void=",".join(map(str, env.rights.void())),
            kept=len(env.rights.kept),
            kept_bytes=100 * len(env.rights.kept),
            dropped=len(env.rights.dropped),
        )
        env.book.sync()
        self.closed_envs.append(env)
        self.spawn()

    def kill_env(self) -> None:
        self.crash_env(self.rng.choice(self.envs))

    def crash_env(self, env: Env) -> None:
        """A replica dies, some with their node: the orchestrator drains its queue, then adopts."""
        if self.rng.random() < 0.4:
            self.power += 1
            env.book.lose_tail(self.rng.random())
        self.envs.remove(env)
        self.closed_envs.append(env)
        self.spawn()

    def adopt(self) -> None:
        if not self.closed_envs:
            return
        env = self.closed_envs.pop(self.rng.randrange(len(self.closed_envs)))
        env.book.sync()
        fold = env.book.fold()
        inc = env.book.inc
        listed = {int(o.split("/")[1]) for o in self.store if o.startswith(f"{inc}/")}
        if self.mutant == "no_listing":
            listed &= set(fold.kept)
        dropped = fold.drops.get(inc, {})
        found = settle(fold, listed, dropped=dropped, spoken_for=self.orc.took(inc))
        self.orc.refuse(inc)
        for record in adopt_records(inc, how="closed" if fold.sealed else "dead", end=env.book.end, settlement=found, ms=0):
            self.orc_book.add(record)
        for reason, seqs in (("orphan", found.orphans), ("unjournaled", found.unjournaled)):
            if seqs:
                self.orc_book.drop(reason, *(f"{inc}/{s}" for s in seqs))
                self.orc_removals.queue += [(f"{inc}/{s}", 0) for s in seqs]
        redo = [s for s in dropped if s not in fold.done.get(inc, {})]
        if self.mutant != "no_redo":
            self.orc_removals.queue += [(f"{inc}/{s}", 1) for s in redo]

    def crash_all(self) -> None:
        """The whole run stops; recovery, which may itself be killed, then a new orchestrator, trainer and workers."""
        replay = self.rng.random() < 0.5
        if self.rng.random() < 0.4:
            self.power += 1
            for book in self.books:
                book.lose_tail(self.rng.random())
        while not self.recover(self.checkpoint, replay=replay, killed_p=0.3):
            pass
        if not replay:
            self.files = {s: f for s, f in self.files.items() if s <= self.checkpoint}
        self.forget()
        self.start()
        if replay:
            self.next_step = max([self.checkpoint, *self.files]) + 1

    def forget(self) -> None:
        self.envs, self.closed_envs, self.mail = [], [], []
        self.nacked = set()

    def recover(self, resume_step: int | None, *, replay: bool, killed_p: float = 0.0) -> bool:
        """One recovery; False if it was killed on the way."""
        book = self.book("rec")
        run = merged(*self.books)
        present: dict[str, set[int]] = {}
        for object_id in self.store:
            inc, seq = object_id.split("/")
            present.setdefault(inc, set()).add(int(seq))
        published = {(s, len(f), sum_of(f)) for s, f in self.files.items()} if replay else set()
        sealed = [p for p in run.producers if run.adopted(p)]
        plan = plan_recovery(run, StoreView(present), resume_step=resume_step, replay=replay, published=published, sealed=sealed)
        ends = {b.inc: b.end for b in self.books}
        for other in [b for b in self.books if b is not book and not run.adopted(b.inc)]:
            how = "closed" if run.journals[other.inc].sealed else "dead"
            other.sync()
            for record in adopt_records(other.inc, how=how, end=ends[other.inc], settlement=plan.settlements.get(other.inc), ms=0):
                book.add(record)
            if self.rng.random() < killed_p / 10:
                return False
        if plan.recovered:
            book.drop("recovered", *plan.recovered)
        if plan.unjournaled:
            book.drop("unjournaled", *plan.unjournaled)
        book.sync()
        redo = () if self.mutant == "no_redo" else plan.redo
        for object_id, attempt in [(o, 2) for o in redo] + [(o, 1) for o in plan.recovered + plan.unjournaled]:
            absent = [] if object_id in self.store else [object_id]
            self.store.discard(object_id)
            if self.rng.random() < killed_p / 10:
                return False
            book.done(object_id, attempt=attempt, absent=absent)
        final = resume_step is None
        book.close(final=int(final), incarnations=len(self.books) if final else 0, dropped=len(plan.recovered) + len(plan.unjournaled))
        book.sync()
        return True

    # Looking at it.

    def audit(self, *, final: bool = False) -> Audit:
        present: dict[str, set[int]] = {}
        for object_id in self.store:
            inc, seq = object_id.split("/")
            present.setdefault(inc, set()).add(int(seq))
        run = merged(*self.books)
        settled = None if final else {b.inc: b.end for b in self.books}
        return conclude("r", Evidence(run, StoreView(present), settled=settled, final=final))

    def end(self) -> Audit:
        """Everything stops; the run is closed."""
        while not self.recover(None, replay=False, killed_p=0.2):
            pass
        return self.audit(final=True)


OPS = (
    ["put"] * 8
    + ["send"] * 8
    + ["deliver"] * 8
    + ["nack", "discard"]
    + ["drop"] * 2
    + ["ship"] * 3
    + ["train"] * 4
    + ["commit"]
    + ["lead"] * 4
    + ["remove"] * 8
    + ["rotate", "kill_env", "adopt", "adopt"]
)
"""What happens, by how often."""


def play(seed: int, *, steps: int, mutant: str = "", crash_p: float = 0.01) -> World:
    """A random history of ``steps`` steps."""
    world = World(seed, mutant=mutant)
    for _ in range(steps):
        op = "crash_all" if world.rng.random() < crash_p else world.rng.choice(OPS)
        world.acted[op] = world.acted.get(op, 0) + 1
        getattr(world, op)()
    return world
