"""What becomes a trainer rank: a task of a job's step that learns its place and where the ranks meet, and then is the trainer.

Under ``launch = "srun"`` each task is one rank. Under ``"torchrun"`` each task is a node, runs torchrun and passes the request to end on;
torchrun starts this again for each rank. Owns the meeting point: the first task takes a free port of its node and publishes it.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fsref.addresses import here, publish, read
from fsref.config import Config
from fsref.errors import RoleFailed
from fsref.journal import RunInfo, read_run
from fsref.pipeline.processes import shielded
from fsref.pipeline.slurm.attempts import read_attempt
from fsref.pipeline.slurm.node import free_port
from fsref.pipeline.slurm.plan import section
from fsref.pipeline.slurm.steps import rank_log
from fsref.pipeline.slurm.streams import send_output_to
from fsref.store import open_root

POLL_S: Final = 0.1


@dataclass(frozen=True)
class Task:
    """A task of the step, as srun numbers it."""

    number: int
    count: int
    local: int
    node: str

    @classmethod
    def read(cls, env: Mapping[str, str]) -> "Task":
        """Raises ``RoleFailed`` outside of a step."""
        try:
            return cls(int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"]), int(env["SLURM_LOCALID"]), env["SLURMD_NODENAME"])
        except (KeyError, ValueError) as e:
            raise RoleFailed(f"{e} is not set: ranks are started by srun inside a job") from e


def main(config: Config, *, config_path: Path, verbose: bool = False) -> int:
    """Does not return under srun; under torchrun returns its exit code. Raises ``RoleFailed`` if the ranks do not find each other."""
    run_dir = Path(config.run.run_dir)
    common = ["--config", str(config_path), *(["--verbose"] if verbose else [])]
    if "RANK" in os.environ:  # torchrun has given this process its place
        become_rank(int(os.environ["RANK"]), run_dir, common, os.environ)
    task = Task.read(os.environ)
    host, port = meet(config, task)
    if section(config).trainer.launch == "torchrun":
        return under_torchrun(torchrun(config, task, host, port, common))
    place = {"RANK": task.number, "WORLD_SIZE": task.count, "LOCAL_RANK": task.local, "MASTER_ADDR": host, "MASTER_PORT": port}
    threads = {"OMP_NUM_THREADS": str(config.trainer.threads)}
    become_rank(task.number, run_dir, common, {**os.environ, **threads, **{k: str(v) for k, v in place.items()}})
    raise AssertionError("exec returned")


def become_rank(rank: int, run_dir: Path, common: Sequence[str], env: Mapping[str, str]) -> None:
    """This process is the trainer from here on, with its own log."""
    send_output_to(rank_log(run_dir, rank))
    os.execve(sys.executable, [sys.executable, "-m", "fsref", "trainer", *common], dict(env))  # noqa: S606  (no shell is meant)


def meet(config: Config, task: Task) -> tuple[str, int]:
    """Host and port where the ranks of this start meet. Raises ``RoleFailed`` if nobody says within ``slurm.trainer.rendezvous_s``."""
    run_dir, attempt = Path(config.run.run_dir), config.run.attempt
    path = run_dir / "slurm" / f"rendezvous.{attempt}.address"
    with open_root(config.run.root, run=config.run.id, settings=config.store) as store:
        run = read_run(store)
    if task.number == 0:
        _publish(config, run, task, path)
    wait_s = section(config).trainer.rendezvous_s
    end = time.monotonic() + wait_s
    while (found := read(path)) is None or found.run_uuid != run.run_uuid:
        if time.monotonic() >= end:
            raise RoleFailed(f"trainer task {task.number} on {task.node}: {path} did not appear within {wait_s:g} s; see the log of rank 0")
        time.sleep(POLL_S)
    host, _, port = found.address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def _publish(config: Config, run: RunInfo, task: Task, path: Path) -> None:
    address = read_attempt(Path(config.run.run_dir), config.run.attempt).node(task.node).address
    where = f"tcp://{address}:{free_port(address)}"
    publish(path, here(run=run.run, run_uuid=run.run_uuid, address=where, label="rank-0", node=task.node, attempt=config.run.attempt))


def torchrun(config: Config, task: Task, host: str, port: int, common: Sequence[str]) -> list[str]:
    """The command line of a node's torchrun."""
    slurm = section(config)
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(slurm.trainer.nodes), "--node-rank", str(task.number), "--nproc-per-node", str(slurm.trainer.ranks_per_node)),
        *("--master-addr", host, "--master-port", str(port)),
        *("--module", "fsref", "rank", *common),
    ]


def under_torchrun(argv: Sequence[str]) -> int:
    """Runs it; asked to end (SIGUSR1, SIGTERM) it is sent SIGTERM, which it hands to its ranks, and whatever it says then is a good end."""
    asked = False
    with shielded():  # srun hands SIGUSR1 to all of them, and torchrun would die of it
        process = subprocess.Popen(argv)

    def stop(number: int, frame: object) -> None:
        nonlocal asked
        del number, frame
        asked = True
        process.send_signal(signal.SIGTERM)

    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, stop)
    code = process.wait()
    return 0 if asked and code in {0, 1, -signal.SIGTERM} else code
