"""From the config that a person wrote to that of a job: what the launcher derives, and what does not fit is refused. Pure."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from fsref.config import Config, EnvSection, SlurmSection
from fsref.errors import ConfigError
from fsref.pipeline.layout import resolve
from fsref.pipeline.slurm.hostlist import expand, tasks

AWKWARD: Final = " \t%\"'\\$`@"
"""What sbatch, srun or the shell of the job's script would take for something else in a path."""


@dataclass(frozen=True)
class Task:
    """One run of a job: the only one, or one per task of its array."""

    config: Config
    """Resolved, without the attempt, which only the job knows."""

    @property
    def folder(self) -> Path:
        """``<run_dir>/slurm``: the job's script, its config, its starts."""
        return Path(self.config.run.run_dir) / "slurm"


def section(config: Config) -> SlurmSection:
    """``[slurm]``, which is there; raises ``ConfigError`` else."""
    if config.slurm is None:
        raise ConfigError("the config has no [slurm] table: it describes no job")
    return config.slurm


def job_tasks(config: Config, *, run_id: str) -> list[Task]:
    """The runs of the job. Raises ``ConfigError`` for settings that do not fit each other or the job."""
    slurm = section(config)
    if slurm.array and is_heterogeneous(slurm):
        raise ConfigError(
            "slurm.array is set and the two kinds of nodes differ: Slurm has no arrays of heterogeneous jobs; submit one each"
        )
    if not slurm.array:
        return [Task(resolve_job(config, run_id=run_id))]
    return [Task(resolve_job(_of_task(config, n), run_id=f"{run_id}-{n}")) for n in tasks(slurm.array)]


def _of_task(config: Config, number: int) -> Config:
    run_dir = f"{config.run.run_dir}-{number}" if config.run.run_dir else ""
    return replace(config, run=replace(config.run, run_dir=run_dir, seed=config.run.seed + number))


def resolve_job(config: Config, *, run_id: str) -> Config:
    """The config that the job's roles get: as ``layout.resolve``, and one replica of every source on each inference node."""
    slurm = section(config)
    nodes = slurm.inference.nodes
    _check_ranks(config, slurm)
    _check_nodelists(slurm)
    if config.orchestrator.env_server_replicas not in {0, nodes}:
        raise ConfigError(
            f"orchestrator.env_server_replicas is {config.orchestrator.env_server_replicas}, the job has {nodes} inference nodes:"
            " leave it out, the launcher derives it"
        )
    if config.store.server != "none":
        raise ConfigError(
            f"store.server = {config.store.server!r} serves one machine: a job's root is a shared folder, a bucket, or a pool of the nodes'"
            " disks (fsref pool)"
        )
    if config.run.attempt or config.inference.servers:
        raise ConfigError("run.attempt and inference.servers are set by the launcher of the job: leave them out")
    derived = replace(
        config,
        env=tuple(_on_nodes(e, nodes) for e in config.env),
        orchestrator=replace(config.orchestrator, env_server_replicas=nodes),
        inference=replace(config.inference, servers=0 if config.inference.address else nodes),
    )
    found = resolve(derived, run_id=run_id, ports=())
    if any(c in found.run.run_dir for c in AWKWARD):
        raise ConfigError(
            f"the run's folder {found.run.run_dir!r} has a blank or one of {AWKWARD.strip()} in it: Slurm or the shell would misread it"
        )
    return found


def _on_nodes(env: EnvSection, nodes: int) -> EnvSection:
    if env.serve_address:
        return env
    if env.replicas not in {1, nodes}:
        raise ConfigError(
            f"env {env.name!r}: replicas is {env.replicas}; in a job each of the {nodes} inference nodes runs one: leave it out, and give"
            " a node more workers instead"
        )
    return replace(env, replicas=nodes)


def rank_count(config: Config) -> int:
    """Trainer ranks: the product of the axes of ``trainer.parallel``."""
    parallel = config.trainer.parallel
    return parallel.data * parallel.context * parallel.tensor * parallel.pipeline


def _check_ranks(config: Config, slurm: SlurmSection) -> None:
    if slurm.trainer.nodes * slurm.trainer.ranks_per_node != rank_count(config):
        raise ConfigError(
            f"slurm.trainer starts {slurm.trainer.nodes} x {slurm.trainer.ranks_per_node} ranks, trainer.parallel has"
            f" {rank_count(config)}: set one to fit the other"
        )


def _check_nodelists(slurm: SlurmSection) -> None:
    lists = {"inference": expand(slurm.inference.nodelist), "trainer": expand(slurm.trainer.nodelist)}
    excluded = set(expand(slurm.exclude))
    for name, nodes in (("inference", slurm.inference.nodes), ("trainer", slurm.trainer.nodes)):
        if len(lists[name]) > nodes:
            raise ConfigError(f"slurm.{name}.nodelist names {len(lists[name])} nodes, slurm.{name}.nodes is {nodes}")
        if both := excluded.intersection(lists[name]):
            raise ConfigError(f"slurm.{name}.nodelist names {sorted(both)[0]}, which slurm.exclude rules out")
    if both := set(lists["inference"]).intersection(lists["trainer"]):
        raise ConfigError(f"{sorted(both)[0]} is in the node list of inference and of the trainer: a node does one of both")


def is_heterogeneous(slurm: SlurmSection) -> bool:
    """Whether the two kinds of nodes must be asked for apart."""
    one, two = slurm.inference, slurm.trainer
    return (one.partition or slurm.partition, one.directives) != (two.partition or slurm.partition, two.directives)
