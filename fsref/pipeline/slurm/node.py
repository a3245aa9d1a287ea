"""The launcher of one inference node, a task of a job's step: inference, and one replica of every source, bound to the node's address.

Restarts replicas and declares them dead as the launcher of one machine does; what ends here ends the step, and with it the job. Owns the
node's published addresses. Refuses to settle the run: the job's launcher does.
"""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from fsref.addresses import here, inference_path, publish
from fsref.config import Config
from fsref.errors import RoleFailed
from fsref.journal import read_run
from fsref.pipeline.board import PlainBoard
from fsref.pipeline.layout import Part, RoleCommand, env_server, fsref_command
from fsref.pipeline.metrics import Follower
from fsref.pipeline.ports import free_ports
from fsref.pipeline.processes import Family
from fsref.pipeline.run import Watcher
from fsref.pipeline.slurm.allocation import interface_address
from fsref.pipeline.slurm.attempts import read_attempt
from fsref.pipeline.slurm.plan import section
from fsref.pipeline.slurm.steps import node_log
from fsref.pipeline.slurm.streams import send_output_to
from fsref.pipeline.supervise import Signals, Stopped, Supervisor
from fsref.store import open_root


def main(config: Config, *, verbose: bool = False) -> int:
    """Serves until a signal; returns 0 then. Raises ``RoleFailed`` for whatever must end the job."""
    run_dir = Path(config.run.run_dir)
    try:
        name, number = os.environ["SLURMD_NODENAME"], int(os.environ["SLURM_PROCID"])
    except (KeyError, ValueError) as e:
        raise RoleFailed(f"{e} is not set: a node's launcher is started by srun inside a job") from e
    send_output_to(node_log(run_dir, name))
    address = node_address(config, name)
    local = replace(
        config, inference=replace(config.inference, address=config.inference.address or f"http://{address}:{free_port(address)}")
    )
    roles = tuple(_roles(local, name, number, address, verbose=verbose))
    board = PlainBoard(sys.stdout)
    board.say(f"node {name} ({address}), number {number} of job {config.run.attempt}")
    with Signals() as signals, Family(grace_s=config.launcher.stop_s) as family:
        watcher = Watcher(config, board, Follower(Path(os.devnull)))
        supervisor = Supervisor(
            config=local, family=family, signals=signals, watcher=watcher, elsewhere=config.orchestrator.env_server_replicas > 1
        )
        try:
            supervisor.start(roles)
            if config.inference.servers:
                _publish(local, name, number)
            supervisor.serve()
        except Stopped as e:
            board.say(f"stopped by signal {e.number}")
        finally:
            inference_path(run_dir, name).unlink(missing_ok=True)
            supervisor.stop()
    return 0


def node_address(config: Config, name: str) -> str:
    """Where this node listens: the interface that the config names, else what Slurm knows it by. Raises ``ConfigError``, ``RoleFailed``."""
    if interface := section(config).interface:
        return interface_address(interface)
    return read_attempt(Path(config.run.run_dir), config.run.attempt).node(name).address


def free_port(address: str) -> int:
    """A free TCP port of this node. Raises ``RoleFailed`` if the address is not its own."""
    try:
        return free_ports(1, address=address)[0]
    except OSError as e:
        raise RoleFailed(
            f"{address} is not an address of {socket.gethostname()} ({e.strerror}): name the interface, as in slurm.interface = 'ib0'"
        ) from e


def _roles(config: Config, node: str, number: int, address: str, *, verbose: bool) -> Iterator[RoleCommand]:
    run_dir = Path(config.run.run_dir)
    common = ("--config", str(run_dir / "config.json"), *(("--verbose",) if verbose else ()))
    if config.inference.servers:
        argv = ("inference", *common, "--inference.address", config.inference.address)
        yield RoleCommand(Part.INFERENCE, fsref_command("inference", argv, run_dir / f"logs/inference.{node}.log", config.inference.env))
    for index, env in enumerate(config.env):
        if not env.serve_address:
            yield env_server(env, number, node, run_dir, (*common, f"--env.{index}.bind", address))


def _publish(config: Config, node: str, number: int) -> None:
    with open_root(config.run.root, run=config.run.id, settings=config.store) as store:
        run = read_run(store)
    record = here(
        run=run.run,
        run_uuid=run.run_uuid,
        address=config.inference.address,
        label=f"inference-{number}",
        node=node,
        attempt=config.run.attempt,
    )
    publish(inference_path(Path(config.run.run_dir), node), record)
