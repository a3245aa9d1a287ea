"""What one rank of a failure test does in its process: loads every step through a store of its own that may be broken, and reports.

Imports no model; every micro batch's forward is an all-reduce over all ranks, as parameters gathered in a forward would be.
"""

import os
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from fsref.config import Config
from fsref.errors import FsrefError, ObjectMissing, StoreUnavailable
from fsref.journal import read_run
from fsref.loader import ROUTING, Parallel, Ranks, Step, StepLoader
from fsref.store import ObjectFile, Store, open_root
from fsref.tensors import DenseTensor
from tests.support.faultystore import FaultyFile, FaultyStore

Kind = Literal["404", "corrupt", "refused", "slow", "hanging", "hanging step file", "hanging removal"]
SLOW_S = 0.2
"""Of each read; far below the deadline."""


@dataclass(frozen=True)
class Breakage:
    """What one rank's store does wrong."""

    rank: int
    kind: Kind
    names: tuple[str, ...] = ("obj/",)
    """Regular expressions; an object of whose name one is found is concerned."""


@dataclass
class Report:
    """What one rank did."""

    rank: int
    place: tuple[int, ...] = ()
    steps: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0
    """From the first step's wait to the end."""
    removed_failed: int = 0


class _Broken(FaultyFile):
    """A file whose reads are slow, or come back with one bit flipped."""

    def __init__(self, store: FaultyStore, inner: ObjectFile, kind: Kind) -> None:
        super().__init__(store, inner)
        self._kind = kind

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        if self._kind == "slow":
            threading.Event().wait(SLOW_S)
        super().read_into(offset, out)
        if self._kind == "corrupt":
            out[len(out) // 2] ^= 1


class BrokenStore(FaultyStore):
    """Hangs are for ever, as those of a dead mount are: nobody lets them go."""

    def __init__(self, inner: Store, breakage: Breakage) -> None:
        super().__init__(inner)
        self._breakage = breakage
        for name in breakage.names:
            match breakage.kind:
                case "404":
                    self.fail("open", ObjectMissing("404"), name=name, times=1 << 30)
                case "refused":
                    self.fail("open", StoreUnavailable("503"), name=name, times=1 << 30)
                case "hanging" | "hanging step file":
                    self.hang("open", name=name, times=1 << 30)
                case "hanging removal":
                    self.hang("delete", name=name, times=1 << 30)

    def open(self, name: str, *, byte_count: int | None = None) -> FaultyFile:
        file = super().open(name, byte_count=byte_count)
        concerned = self._breakage.kind in ("slow", "corrupt") and any(n in name for n in self._breakage.names)
        return _Broken(self, file, self._breakage.kind) if concerned else file


def run_rank(config: Config, rank: int, port: int, breakage: Breakage | None, outcome: Any) -> None:
    """The process: trains nothing, reports through ``outcome``."""
    report = Report(rank)
    parallel = Parallel.of(config.trainer.parallel)
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=parallel.world_size)
    started = time.monotonic()
    try:
        with Ranks.over(parallel, collective_s=config.trainer.collective_s) as ranks:
            report.place = tuple(ranks.at)
            with open_root(config.run.root, run=config.run.id, settings=config.store) as inner:
                mine = breakage is not None and breakage.rank == rank
                store = BrokenStore(inner, breakage) if mine and breakage is not None else inner
                _load(config, ranks, store, report)
    except FsrefError as e:
        report.error = f"{type(e).__name__}: {e}"
    report.seconds = time.monotonic() - started
    outcome.send(asdict(report))
    dist.destroy_process_group()


def _load(config: Config, ranks: Ranks, store: Store, report: Report) -> None:
    with StepLoader(store, read_run(store), ranks, config, first=0) as loader:
        for step in loader:
            report.steps.append(_trained(step))
            loader.commit(step.number, durable=True)
        report.removed_failed = loader.finish().failed


def _trained(step: Step) -> dict[str, Any]:
    """A forward of every micro batch, on every rank."""
    batches = []
    for ready in step.micro_batches:
        dist.all_reduce(torch.ones(1))
        routing = ready.tensors.fields[ROUTING]
        assert isinstance(routing, DenseTensor)
        batches.append(
            {
                "dropped": ready.dropped,
                "trained": int(ready.tensors.loss_mask.sum()),
                "fields": sorted(ready.tensors.fields),
                "rows": [r.numpy().tobytes() for r in routing.rows],
                "real": [bool(v) for v in routing.valid & ~ready.tensors.padding],
            }
        )
    return {"batches": batches, "metrics": step.metrics, "shared": step.shared_metrics, "missed": dict(step.agreement.missed)}
