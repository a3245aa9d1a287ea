"""One cluster for the session, and runs on it."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.slurm import Cluster, cluster

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "slurm.toml"
DEADLINE_S = 480.0
OVER = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"})
SMALL = {
    "run.steps": 3,
    "env.0.workers": 1,
    "env.0.concurrent_max": 8,
    "orchestrator.batch_size": 8,
    "orchestrator.group_size": 4,
    "sampling.tokens_max": 8,
    "trainer.checkpoint_every": 1,
    "store.durability": "process",
    "launcher.stop_s": 30.0,
    "slurm.time": "00:10:00",
    "slurm.exclusive": "false",
    "slurm.signal_lead_s": 60,
    "slurm.check_nodes": "false",
    "env.0.health_s": 1.0,
}
"""Runs that take seconds: the point is Slurm."""


@dataclass
class Job:
    """One submitted run."""

    cluster: Cluster
    root: Path
    run_id: str
    model: Path
    number: str = ""

    @property
    def folder(self) -> Path:
        return self.root / self.run_id

    @property
    def log(self) -> str:
        path = self.folder / "logs" / "job.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def logs(self) -> str:
        """The ends of all logs, for a failing test."""
        paths = sorted((self.folder / "logs").rglob("*.log"))
        return "\n".join(f"--- {p.relative_to(self.folder)}\n{p.read_text(errors='replace')[-2500:]}" for p in paths)

    def submit(self, **options: object) -> "Job":
        given = {**SMALL, "run.root": str(self.root), "run.id": self.run_id, "model.path": str(self.model)} | {
            k.replace("__", "."): v for k, v in options.items()
        }
        argv = [sys.executable, "-m", "fsref", "run", str(CONFIG), *(f"--{k}={v}" for k, v in given.items())]
        said = self.cluster.command(*argv)
        self.number = said.split()[1]
        return self

    def until(self, ready: Callable[[], object], what: str) -> None:
        """Waits for something of the run; fails the test with all logs if the job ends before it, or after a generous deadline."""
        end = time.monotonic() + DEADLINE_S
        while not ready():
            state = self.cluster.state(self.number)
            late = time.monotonic() >= end or (state in OVER and not ready())
            assert not late, f"{what}; the job is {state}\n{self.log}\n{self.logs()}"
            time.sleep(0.1)

    def ended(self) -> str:
        """Waits for the job's end; its state."""
        end = time.monotonic() + DEADLINE_S
        while (state := self.cluster.state(self.number)) not in OVER:
            assert time.monotonic() < end, f"the job is {state}\n{self.log}\n{self.logs()}"
            time.sleep(0.1)
        return state

    def fsref(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """A command of the login node on this run."""
        command = [sys.executable, "-m", "fsref", *argv, str(self.folder)]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=self.cluster.env, timeout=DEADLINE_S)

    def proved(self) -> None:
        """The run is closed, every array was removed exactly once, and no process is left."""
        done = self.fsref("audit", "--json")
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{self.log}\n{self.logs()}"
        assert not list((self.folder / "obj").rglob("*.zip"))

    def trained(self) -> set[int]:
        """Steps that the trainer has reported."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        records = [json.loads(line) for line in lines]
        return {r["step"] for r in records if r["role"] == "trainer" and "mismatch_kl/mean" in r}

    def addresses(self) -> list[dict[str, str]]:
        """Records of the replicas that are published now."""
        return [json.loads(p.read_text()) for p in sorted((self.folder / "envs").glob("*/*.address"))]

    def processes(self) -> list[str]:
        """Command lines of live processes, on any node, that work on this run."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                argv = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if entry.name.isdigit() and f"{self.folder}/" in argv and "-m fsref" in argv:
                found.append(argv)
        return found


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model for all runs: making it takes as long as a run."""
    root = tmp_path_factory.mktemp("model")
    argv = [sys.executable, "-m", "fsref", "model", "--config", str(CONFIG), "--run.id=m", f"--run.root={root}"]
    subprocess.run(argv, check=True, timeout=DEADLINE_S)
    return root / "m" / "model"


@pytest.fixture
def job(slurm: Cluster, model: Path, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Makes a run; ``job("r1").submit()``. What a failed test leaves running is ended."""
    jobs: list[Job] = []

    def make(run_id: str = "r1") -> Job:
        jobs.append(Job(slurm, tmp_path / "runs", run_id, model))
        return jobs[-1]

    yield make
    for left in jobs:
        if left.number and slurm.state(left.number) not in OVER:
            slurm.command("scancel", left.number)
            left.ended()
