"""The settings of a job on a Slurm cluster: what ``fsref run`` asks Slurm for, and what surrounds the roles on the nodes."""

from typing import Annotated, Literal

from msgspec import Meta

from fsref.config.base import Count, Natural, Positive, Section

Line = Annotated[str, Meta(pattern=r"^[^\r\n]*\Z")]
"""Ends up on a line of its own in the job's script."""


class SlurmSamplingSection(Section, frozen=True, kw_only=True):
    """``[slurm.inference]``: the nodes that sample. Each runs inference and one replica of every env server that the launcher starts."""

    nodes: Count = 1
    """How many."""
    partition: Line = ""
    """Empty: ``slurm.partition``. Where it or ``directives`` differ from the trainer's, the job is a heterogeneous one."""
    nodelist: Line = ""
    """Nodes that must be among them, as Slurm writes it: ``gpu[01-04,07]``."""
    directives: tuple[Line, ...] = ()
    """Further options of ``sbatch`` for these nodes, for example ``["--gpus-per-node=8"]``."""
    env: dict[str, str] = {}
    """Further environment variables of the roles on these nodes."""


class SlurmTrainingSection(Section, frozen=True, kw_only=True):
    """``[slurm.trainer]``: the nodes that train. The orchestrator runs on the first of them."""

    nodes: Count = 1
    """How many; times ``ranks_per_node`` they must make the ranks of ``trainer.parallel``."""
    ranks_per_node: Count = 1
    """Trainer ranks of each node, usually one per GPU."""
    launch: Literal["srun", "torchrun"] = "srun"
    """Who starts the ranks of a node. Either way they meet at the first trainer node."""
    partition: Line = ""
    """Empty: ``slurm.partition``."""
    nodelist: Line = ""
    """As for inference."""
    directives: tuple[Line, ...] = ()
    """As for inference."""
    env: dict[str, str] = {}
    """Further environment variables of the ranks."""
    rendezvous_s: Positive = 120.0
    """How long a rank waits to be told where the ranks meet."""


class SlurmOrchestratorSection(Section, frozen=True, kw_only=True):
    """``[slurm.orchestrator]``: the orchestrator's process on the first trainer node."""

    env: dict[str, str] = {}
    """Further environment variables of it."""


class SlurmSection(Section, frozen=True, kw_only=True):
    """``[slurm]``: with this table ``fsref run`` submits a job instead of starting the roles here."""

    inference: SlurmSamplingSection = SlurmSamplingSection()
    trainer: SlurmTrainingSection = SlurmTrainingSection()
    orchestrator: SlurmOrchestratorSection = SlurmOrchestratorSection()
    job_name: Line = ""
    """Empty: ``fsref-<run id>``."""
    partition: Line = ""
    """Of all nodes that name no other; empty: the cluster's default."""
    account: Line = ""
    """Who pays."""
    qos: Line = ""
    """Quality of service."""
    time: Line = "24:00:00"
    """Time limit, as ``sbatch --time`` takes it."""
    signal_lead_s: Annotated[int, Meta(ge=1, le=65535)] = 300
    """Seconds before the time limit at which the run stops with a checkpoint: longer than a step and a checkpoint take."""
    requeue: bool = True
    """Slurm may start the job again after a preemption or a node's loss, and the job asks for it at its time limit. The run goes on by
    itself."""
    retries_max: Natural = 0
    """Starts of the job, by itself, after a role failed. 0: it ends with the reason, and a person decides."""
    exclusive: bool = True
    """Whole nodes."""
    exclude: Line = ""
    """Nodes that must not be used, as Slurm writes it."""
    array: Line = ""
    """``0-3``: a job array, one run per task. Their ids are ``<run.id>-<task>``, their seeds ``run.seed`` plus the task's number."""
    directives: tuple[Line, ...] = ()
    """Further options of ``sbatch`` for all nodes, for example ``["--comment=rl", "--mem=0"]``."""
    modules: tuple[Line, ...] = ()
    """Loaded with ``module load``, in order, before anything starts."""
    setup: tuple[Line, ...] = ()
    """Shell lines after the modules: ``source``, ``ulimit``, ``export``. A line that fails ends the job."""
    env: dict[str, str] = {}
    """Environment variables of all roles."""
    python: Line = ""
    """Interpreter on the nodes, with fsref in it; empty: the one that submits."""
    interface: Line = ""
    """Network interface whose address inference and env servers listen on, for example ``ib0``; empty: the address that Slurm knows the
    node by."""
    check_nodes: bool = True
    """Before the roles start, every node shows that it sees the run's folder as the others do (``fsref doctor --nodes``). Not in a
    heterogeneous job."""
    settle_s: Positive = 60.0
    """How long the job waits for Slurm to say that a step of it has ended everywhere."""
