"""A run's folder with a store whose failures are set from outside, and short cuts to act the roles."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from fsref.config import LedgerSection
from fsref.errors import StoreError, StoreUnavailable
from fsref.journal import RunInfo, create_run, write_dead
from fsref.journal.place import Ledger
from fsref.ledger.ids import sum_of
from fsref.reaper import Audit, ConsumerHolder, EnvHolder, StepHolder, audit, delete_objects
from fsref.refs import Schema, object_name, top_logprobs
from fsref.steps import StepInfo
from fsref.store import open_root
from fsref.store.base import Deletion, Durability, Entry, Store
from fsref.store.posix import PosixStore

RUN = "r1"


class FaultyStore(PosixStore):
    """Deletions and listings that fail, or wait at a gate, while a test says so."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, create=True)
        self.delete_failures = 0
        self.list_fails = False
        self.gate = threading.Event()
        self.gate.set()
        self.deletes: list[str] = []
        self.lists = 0
        self._happened = threading.Condition()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for something that comes with a listing or a deletion."""
        with self._happened:
            assert self._happened.wait_for(condition, timeout=60)

    def _tell(self) -> None:
        with self._happened:
            self._happened.notify_all()

    def delete(self, names: Sequence[str]) -> dict[str, Deletion | StoreError]:
        assert self.gate.wait(60)
        self.deletes += names
        try:
            if self.delete_failures > 0:
                self.delete_failures -= 1
                return {name: StoreUnavailable(f"{name}: told to fail") for name in names}
            return super().delete(names)
        finally:
            self._tell()

    def list(self, prefix: str):  # type: ignore[no-untyped-def]
        entries: list[Entry] = list(super().list(prefix))
        self.lists += 1
        self._tell()
        if self.list_fails:
            raise StoreUnavailable(f"listing {prefix}: told to fail")
        return iter(entries)


class Stage:
    """One run."""

    _durability: Durability = "process"

    def __init__(self, root: Path, *, strict: bool = False, adopt_poll_s: float = 3600.0, durability: Durability = "process") -> None:
        self.root = root
        self.store = FaultyStore(root / RUN)
        self.ledger = root / RUN / "ledger"
        self.place = Ledger(self.ledger)
        self.run: RunInfo = create_run(self.store, RUN, Schema((top_logprobs(),)))
        self.section = LedgerSection(strict=strict, batch_wait_s=0.01, adopt_poll_s=adopt_poll_s, adopt_drain_s=0.0)
        self.batches: dict[int, list[str]] = {}
        self._requests = 0
        self._durability = durability

    def env(self, label: str = "math-0-0") -> EnvHolder:
        return EnvHolder(self.store, self.ledger, run=self.run, label=label, section=self.section)

    def orc(self, role: str = "orc") -> ConsumerHolder:
        return ConsumerHolder(self.store, self.ledger, run=self.run, role=role, section=self.section)

    def trn(self) -> StepHolder:
        return StepHolder(self.store, self.ledger, run=self.run, section=self.section)

    def other_store(self) -> Store:
        return open_root(str(self.root), run=RUN)

    def put(self, env: EnvHolder, count: int = 1, *, keep: bool = True) -> list[str]:
        """Publishes objects; with ``keep`` records them."""
        out = []
        for _ in range(count):
            seq = env.next_seq()
            self.store.put(object_name(f"{env.inc}/{seq}"), [b"x" * 100], durability=self._durability)
            if keep:
                env.keep(seq, byte_count=100, checksum=7, token_count=10, fields=1)
            out.append(f"{env.inc}/{seq}")
        return out

    def reply(self, env: EnvHolder, orc: ConsumerHolder, count: int = 1) -> list[str]:
        """Puts, sends and takes."""
        found = self.put(env, count)
        self._requests += 1
        env.sent(f"q{self._requests}", found)
        assert orc.take(f"q{self._requests}", dict.fromkeys(found, 100)) == found
        return found

    def ship(self, orc: ConsumerHolder, step: int, found: list[str]) -> StepInfo:
        n, checksum = orc.ship(step, dict.fromkeys(found, 100))
        assert (n, checksum) == (len(found), sum_of(found))
        self.batches[step] = found
        return self.info(step)

    def info(self, step: int) -> StepInfo:
        found = self.batches[step]
        return StepInfo(
            v=1, run=RUN, run_uuid=self.run.run_uuid, step=step, data_ranks=1, micro_batches=1, samples=1, tokens=10,
            n=len(found), bytes=100 * len(found), sum=sum_of(found), version=0, schema=self.run.schema, digests=("0" * 32,),
        )  # fmt: skip

    def commit(self, trn: StepHolder, lo: int, hi: int) -> None:
        """Drops, removes as the leaders do, and records it."""
        trn.drop_steps(lo, hi)
        outcome = delete_objects(self.store, [o for s in range(lo, hi + 1) for o in self.batches[s]])
        assert not outcome.failed
        trn.done_steps(lo, hi, outcome.absent)

    def kill(self, holder: EnvHolder | ConsumerHolder | StepHolder, *, reaped: bool = True) -> None:
        """Ends an incarnation as a kill would: no close, its lock is free; its launcher notes that it reaped the process."""
        watch = getattr(holder, "_watch", None)
        if watch is not None:
            watch.close(deadline_s=60.0)
        holder._deleter.close(deadline_s=0.0)
        holder._journal.close()
        if reaped:
            write_dead(self.place, holder.inc, by="launcher")

    def audit(self) -> Audit:
        return audit(self.store, self.ledger, run=RUN, run_uuid=self.run.run_uuid)

    def objects(self) -> list[str]:
        """A raw look around the store: every file under obj/."""
        return sorted(str(p.relative_to(self.root / RUN)) for p in (self.root / RUN / "obj").rglob("*") if p.is_file())
