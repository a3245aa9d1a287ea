"""A stage whose root is no folder: objects in memory (or in a bucket), journals in a folder of this node."""

import itertools
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsref.config import LedgerSection
from fsref.journal import create_run
from fsref.journal.place import Ledger
from fsref.reaper import Audit, ConsumerHolder, EnvHolder, StepHolder, audit
from fsref.refs import Schema, top_logprobs
from fsref.store import Store
from fsref.store.filesystem import FilesystemStore
from tests.reaper.stage import RUN, Stage
from tests.support.faultystore import FaultyStore

_numbers = itertools.count()


class RootStage(Stage):
    """One run. ``node`` is the folder with the live journals; ``lose_node`` is what the loss of that node does."""

    def __init__(self, node: Path, *, store: Store | None = None, **section: float) -> None:
        self.root = node
        self.faulty = FaultyStore(store or FilesystemStore(f"memory://stage{next(_numbers)}/{RUN}"))
        self.store = self.faulty  # type: ignore[assignment]
        self.ledger = node / "ledger"
        self.place = Ledger.of(self.faulty, self.ledger)
        self.run = create_run(self.faulty, RUN, Schema((top_logprobs(),)))
        values = {"batch_wait_s": 0.01, "adopt_poll_s": 3600.0, "adopt_drain_s": 0.0, "seal_wait_s": 3600.0, "seal_retry_s": 0.5}
        self.section = LedgerSection(**(values | section))  # type: ignore[arg-type]
        self.batches: dict[int, list[str]] = {}
        self._requests = 0

    def lose_node(self) -> None:
        """Every journal of this node is gone; what was sealed stays."""
        shutil.rmtree(self.ledger)

    def kill(self, holder: EnvHolder | ConsumerHolder | StepHolder, *, reaped: bool = True) -> None:
        """As a kill: drops that wait for a seal are neither sealed nor removed."""
        holder._journal.close()
        super().kill(holder, reaped=reaped)

    def objects(self) -> list[str]:
        return sorted(entry.name for entry in self.faulty.inner.list("obj"))

    def segments(self, inc: str) -> list[str]:
        return sorted(entry.name for entry in self.faulty.inner.list(f"ledger/{inc}"))

    def sealed(self, inc: str) -> bytes:
        """What the root has of a journal."""
        return b"".join(self.faulty.inner.read(name, bytes_max=1 << 30) for name in self.segments(inc))

    def audit_elsewhere(self) -> Audit:
        """The audit on a machine that has no journal of the run."""
        return audit(self.faulty, None, run=RUN, run_uuid=self.run.run_uuid)

    def counted(self) -> Counter[str]:
        """Store operations since the last call."""
        out = Counter(self.faulty.calls)
        self.faulty.calls.clear()
        return out


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[RootStage]:
    made = RootStage(tmp_path)
    yield made
    made.faulty.close()
