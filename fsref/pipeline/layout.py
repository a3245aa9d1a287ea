"""Where a run's files are, which ports it uses and how its roles are started: pure, once the ports are chosen.

Owns the resolved config of a run and the command lines. Refuses to start or write anything.
"""

import datetime as dt
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from fsref.config import Config, EnvSection, StoreSection
from fsref.errors import BadRef, ConfigError
from fsref.parallel import data_parallel
from fsref.pipeline.ports import LOOPBACK
from fsref.pipeline.processes import Command
from fsref.refs import check_run
from fsref.store.open import posix_root

SERVER_FOLDER: Final = "objectserver"
"""In the run's folder: everything of an object server of the run's own."""
KEYS: Final = "credentials"
"""Its keys in AWS's format; readable by the run's user only."""
KEYS_PROFILE: Final = "objectserver"


class Part(Enum):
    """What a process is to the run; ``run.py`` has the table of what its end means."""

    INFERENCE = "inference"
    ENV = "env-server"
    ORCHESTRATOR = "orchestrator"
    TRAINER = "trainer"


@dataclass(frozen=True)
class RoleCommand:
    """A role's process before it is started."""

    part: Part
    command: Command
    env: str = ""
    """Env server: the name of its source."""
    replica: int = -1
    address: Path | None = None
    """Env server: the file that it publishes once it serves."""
    addresses: tuple[Path, ...] = ()
    """A job's step: the files that its nodes publish once they serve."""


def mint_run_id(now: dt.datetime) -> str:
    """A new run id that sorts by time: ``20260131-235959-1a2b3c4d``."""
    return f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"


def resolve(config: Config, *, run_id: str, ports: Sequence[int]) -> Config:
    """The config that the roles get: run id, absolute folders, the inference address and the object server's filled in. ``ports`` are free
    loopback ports: one needed, and a second for an object server. What is filled in already stays.

    Raises ``ConfigError`` for a bad run id, a remote root without a run_dir, an object server of the run's own on another root, a layout
    that ``fsref trainer`` does not train, or a run without sources or with names that cannot be labels.
    """
    try:
        check_run(run_id)
    except BadRef as e:
        raise ConfigError(f"run.id: {e}") from e
    data_parallel(config.trainer.parallel)
    folder = posix_root(config.run.root)
    if folder is None and not config.run.run_dir:
        raise ConfigError(
            f"run.run_dir is empty and run.root {config.run.root!r} is not a folder: name a folder for addresses, logs, weights and metrics"
        )
    root = config.run.root if folder is None else str(folder.absolute())
    run_dir = config.run.run_dir or f"{root}/{run_id}"
    run_dir = str(Path(run_dir.replace("{id}", run_id)).absolute())
    if not any(e.split == "train" for e in config.env):
        raise ConfigError("the config has no [[env]] table with split = 'train': nothing would produce samples")
    return replace(
        config,
        run=replace(config.run, id=run_id, root=root, run_dir=run_dir),
        model=replace(config.model, path=str(Path(config.model.path).absolute()) if config.model.path else f"{run_dir}/model"),
        inference=replace(config.inference, address=config.inference.address or _loopback(config, ports)),
        store=config.store if config.store.server == "none" else own_server(config, Path(run_dir), ports[1:]),
    )


def _loopback(config: Config, ports: Sequence[int]) -> str:
    return "" if config.inference.servers else f"http://{LOOPBACK}:{ports[0]}"


def own_server(config: Config, run_dir: Path, ports: Sequence[int]) -> StoreSection:
    """``[store]`` of a run with an object server of its own: its endpoint, and where its keys are. Raises ``ConfigError``."""
    store, keys = config.store, str(run_dir / SERVER_FOLDER / KEYS)
    if not config.run.root.startswith("s3://"):
        raise ConfigError(f"store.server = {store.server!r} serves an s3:// root, and run.root is {config.run.root!r}")
    if store.endpoint and (store.profile, store.credentials_file) == (KEYS_PROFILE, keys):
        return store  # of the run's config.json
    if given := [key for key in ("endpoint", "profile", "credentials_file") if getattr(store, key)]:
        raise ConfigError(f"store.server = {store.server!r} starts a server of the run's own: leave store.{given[0]} empty")
    if not ports:
        raise ConfigError(f"store.server = {store.server!r}: the launcher starts it; give a role the run's config.json")
    return replace(store, endpoint=f"http://{LOOPBACK}:{ports[0]}", region="us-east-1", profile=KEYS_PROFILE, credentials_file=keys)


def address_file(run_dir: Path, env: EnvSection, node: str) -> Path:
    """``envs/<split>/<name>.<node>.address`` (design.md section 5); on one machine the node is ``local-<replica>``."""
    return run_dir / "envs" / env.split / f"{env.name}.{node}.address"


def env_log(run_dir: Path, env: EnvSection, node: str) -> Path:
    return run_dir / "logs" / "envs" / env.split / f"{env.name}.{node}.log"


def role_commands(config: Config, *, serve: bool, master_port: int, verbose: bool = False) -> list[RoleCommand]:
    """The processes of a resolved config in the order of their start; ``serve``: inference is ours to start."""
    run_dir = Path(config.run.run_dir)
    common = ("--config", str(run_dir / "config.json"), *(("--verbose",) if verbose else ()))
    out: list[RoleCommand] = []
    if serve:
        out.append(
            RoleCommand(
                Part.INFERENCE, fsref_command("inference", ("inference", *common), run_dir / "logs/inference.log", config.inference.env)
            )
        )
    for env in config.env:
        out += [env_server(env, n, f"local-{n}", run_dir, common) for n in range(0 if env.serve_address else env.replicas)]
    out += [RoleCommand(Part.TRAINER, _trainer(config, common, rank, master_port)) for rank in range(config.trainer.parallel.data)]
    out.append(RoleCommand(Part.ORCHESTRATOR, fsref_command("orchestrator", ("orchestrator", *common), run_dir / "logs/orchestrator.log")))
    return out


def env_server(env: EnvSection, replica: int, node: str, run_dir: Path, common: Sequence[str]) -> RoleCommand:
    """One replica of a source."""
    argv = ("env-server", *common, "--env", env.name, "--replica", str(replica), "--node", node)
    command = fsref_command(f"envs/{env.split}/{env.name}.{node}", argv, env_log(run_dir, env, node))
    return RoleCommand(Part.ENV, command, env=env.name, replica=replica, address=address_file(run_dir, env, node))


def _trainer(config: Config, common: Sequence[str], rank: int, master_port: int) -> Command:
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(config.trainer.parallel.data),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(master_port),
        "OMP_NUM_THREADS": str(config.trainer.threads),
    }
    return fsref_command(f"trainer/rank_{rank}", ("trainer", *common), Path(config.run.run_dir) / f"logs/trainer/rank_{rank}.log", env)


def model_command(config: Config) -> Command:
    """Makes the initial model folder."""
    run_dir = Path(config.run.run_dir)
    return fsref_command("model", ("model", "--config", str(run_dir / "config.json")), run_dir / "logs/model.log")


def fsref_command(name: str, argv: Sequence[str], log: Path, env: dict[str, str] | None = None) -> Command:
    """``fsref`` with these arguments, by this interpreter."""
    return Command(name=name, argv=(sys.executable, "-m", "fsref", *argv), log=log, env=env or {})
