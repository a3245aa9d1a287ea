"""The steps of a job as commands of the supervisor: ``srun`` for the inference nodes, the trainer ranks and the orchestrator.

Owns their command lines. Pure. A step is asked to end by SIGUSR1, which srun hands to its tasks; SIGTERM would have it kill them at once.
"""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fsref.config import Config
from fsref.pipeline.layout import Part, RoleCommand, address_file
from fsref.pipeline.processes import Command
from fsref.pipeline.slurm.allocation import Allocation, Node
from fsref.pipeline.slurm.plan import rank_count, section

NAMES: Final = {Part.INFERENCE: "fsref-nodes", Part.TRAINER: "fsref-trainer", Part.ORCHESTRATOR: "fsref-orchestrator"}
"""What Slurm calls the step of each part."""
JOURNALS: Final = {Part.INFERENCE: ("env",), Part.TRAINER: ("trn",), Part.ORCHESTRATOR: ("orc",)}
"""Whose journals the processes of each step write."""


def node_log(run_dir: Path, node: str) -> Path:
    """Of the launcher of an inference node."""
    return run_dir / "logs" / "nodes" / f"{node}.log"


def rank_log(run_dir: Path, rank: int) -> Path:
    """Of a trainer rank."""
    return run_dir / "logs" / "trainer" / f"rank_{rank}.log"


def steps(config: Config, allocation: Allocation, *, verbose: bool = False) -> list[RoleCommand]:
    """In the order of their start."""
    run_dir = Path(config.run.run_dir)
    slurm = section(config)
    common = ("--config", str(run_dir / "config.json"), *(("--verbose",) if verbose else ()))
    managed = [e for e in config.env if not e.serve_address]
    out = []
    if managed or config.inference.servers:
        nodes = _srun(Part.INFERENCE, allocation.inference, allocation, group=0)
        command = _command(
            Part.INFERENCE,
            (*nodes, *_fsref("node", common)),
            run_dir,
            {**slurm.env, **slurm.inference.env},
            reports=[node_log(run_dir, n.name) for n in allocation.inference],
        )
        files = tuple(address_file(run_dir, e, n.name) for e in managed for n in allocation.inference)
        out.append(RoleCommand(Part.INFERENCE, command, addresses=files))
    per_node = slurm.trainer.ranks_per_node
    tasks = per_node if slurm.trainer.launch == "srun" else 1
    ranks = _srun(Part.TRAINER, allocation.trainer, allocation, group=1, tasks_per_node=tasks)
    command = _command(
        Part.TRAINER,
        (*ranks, *_fsref("rank", common)),
        run_dir,
        {**slurm.env, **slurm.trainer.env},
        reports=[rank_log(run_dir, r) for r in range(rank_count(config))],
    )
    out.append(RoleCommand(Part.TRAINER, command))
    log = run_dir / "logs" / "orchestrator.log"
    orchestrator = (*_srun(Part.ORCHESTRATOR, allocation.trainer[:1], allocation, group=1), f"--output={log}")
    command = _command(
        Part.ORCHESTRATOR,
        (*orchestrator, *_fsref("orchestrator", common)),
        run_dir,
        {**slurm.env, **slurm.orchestrator.env},
        reports=[log],
    )
    out.append(RoleCommand(Part.ORCHESTRATOR, command))
    return out


def _srun(part: Part, nodes: Sequence[Node], allocation: Allocation, *, group: int, tasks_per_node: int = 1) -> tuple[str, ...]:
    het = (f"--het-group={group}",) if allocation.heterogeneous else ()
    return (
        "srun",
        *het,
        f"--job-name={NAMES[part]}",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes) * tasks_per_node}",
        f"--ntasks-per-node={tasks_per_node}",
        f"--nodelist={','.join(n.name for n in nodes)}",
        "--overlap",  # the orchestrator shares the first trainer node
        "--cpu-bind=none",
        "--kill-on-bad-exit=1",
        "--open-mode=append",
    )


def _fsref(role: str, common: Sequence[str]) -> tuple[str, ...]:
    return (sys.executable, "-m", "fsref", role, *common)


def _command(part: Part, argv: Sequence[str], run_dir: Path, env: dict[str, str], *, reports: Sequence[Path]) -> Command:
    name = NAMES[part].removeprefix("fsref-")
    return Command(
        name=name,
        argv=tuple(argv),
        log=run_dir / "logs" / "slurm" / f"{name}.log",
        env=env,
        stop_signal=signal.SIGUSR1,
        reports=tuple(reports),
    )
