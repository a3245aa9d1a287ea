"""The role: one replica of an env server.

Binds a free port, publishes its address file once it listens, serves until SIGTERM, and takes the file back. Refuses to outlive a
worker: a replica with a dead worker stops with an error, so that its launcher restarts the whole of it.
"""

import functools
import logging
import math
import socket
from collections.abc import Callable
from pathlib import Path

from verifiers.v1.serve.pool import serve_env

from fsref.addresses import Address, address_path, here, publish, withdraw
from fsref.config import Config, dump
from fsref.envserver.broker import KeepingPool
from fsref.envserver.install import install
from fsref.envserver.resources import Settings, open_store, section
from fsref.episodes.seams import check_seams
from fsref.episodes.source import env_config
from fsref.errors import RoleFailed
from fsref.journal.run import RunInfo, read_run

logger = logging.getLogger(__name__)


def main(config: Config, *, env: str, replica: int, node: str = "") -> None:
    """Serves ``[[env]]`` table ``env`` as replica number ``replica`` of a run that exists, until SIGTERM.

    ``node``: the name that its address file carries; empty: ``local-<replica>``, of a run on one machine.

    Raises ``ConfigError`` (bad settings, unfit verifiers), ``StoreError`` or ``LedgerError`` (the run cannot be opened),
    ``RoleFailed`` (a worker died).
    """
    serve(config, env=env, replica=replica, setup=install, node=node)


def serve(config: Config, *, env: str, replica: int, setup: Callable[[Settings], None], node: str = "") -> None:
    """``main`` with another ``setup``, a picklable function that must call ``install``; it runs first in every process of the replica."""
    check_seams()
    table = section(config, env)
    with open_store(config) as store:
        run = read_run(store)
    settings = Settings(config_json=dump(config), env=env, replica=replica)
    node = node or f"local-{replica}"
    path = address_path(Path(config.run.run_dir) / "envs", split=table.split, name=env, node=node)
    publisher = _Publisher(path, run, label=settings.label, node=node, attempt=config.run.attempt)
    try:
        serve_env(
            max_workers=table.workers,
            address=f"tcp://{table.bind}:0",
            address_queue=publisher,
            log_setup=functools.partial(setup, settings),
            elastic=False,
            config=env_config(table),
            max_concurrent=math.ceil(table.concurrent_max / table.workers),
        )
    finally:
        publisher.withdraw()
    if KeepingPool.dead:
        raise RoleFailed(f"env server {settings.label}: {KeepingPool.dead}; the reason is above it in this log")


class _Publisher:
    """Stands in the place of the queue that ``serve_env`` puts its bound address into."""

    def __init__(self, path: Path, run: RunInfo, *, label: str, node: str, attempt: str) -> None:
        self._path, self._run, self._label, self._node, self._attempt = path, run, label, node, attempt
        self._record: Address | None = None

    def put(self, address: str) -> None:
        self._record = here(
            run=self._run.run,
            run_uuid=self._run.run_uuid,
            address=reachable(address),
            label=self._label,
            node=self._node,
            attempt=self._attempt,
        )
        publish(self._path, self._record)
        logger.info("env server %s listens on %s", self._label, self._record.address)

    def withdraw(self) -> None:
        if self._record is not None:
            withdraw(self._path, self._record)


def reachable(address: str) -> str:
    """``address`` as other nodes reach it: a wildcard host becomes this node's own address."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if host.strip("[]") in ("0.0.0.0", "::", "*"):  # noqa: S104  # compared, not bound
        host = socket.gethostbyname(socket.gethostname())
    return f"tcp://{host}:{port}"
