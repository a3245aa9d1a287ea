"""What the orchestrator and the standalone evaluation open before they work, and close after: store, ledger, replicas.

Owns the order of closing (episodes first, so that each is taken or refused, then the ledger, which drops what is held, then the store)
and the signals that ask for it. Refuses to decide anything about episodes.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from fsref.config import Config, EnvSection
from fsref.episodes import Episode, EpisodeClient, ReplicaCounts, Target, Task, check_seams, load_tasks, sampling_values
from fsref.errors import ConfigError
from fsref.journal import RunInfo, read_run
from fsref.orchestrator.attempts import Attempts
from fsref.orchestrator.custody import Custody
from fsref.orchestrator.filters import Reason
from fsref.orchestrator.groups import Source
from fsref.orchestrator.servers import Servers, find_servers
from fsref.orchestrator.waiting import together
from fsref.reaper import ConsumerHolder
from fsref.store import Store, open_root

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
TASKS_MAX: Final = 65_536
"""Tasks of one source that are held; longer tasksets are cut off there."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """Open while its context is."""

    info: RunInfo
    store: Store
    ledger_dir: Path
    custody: Custody
    sources: Mapping[str, Sequence[Source]]
    """By split."""
    attempts: Attempts
    wire_bytes: Callable[[], int]
    """Bytes that env servers sent since the start."""
    inference: Servers
    replicas: "Callable[[], Mapping[str, ReplicaCounts]]"
    """What each replica did, by label."""


@contextlib.asynccontextmanager
async def open_session(config: Config, *, role: Literal["orc", "evl"], splits: Sequence[str]) -> AsyncIterator[Session]:
    """Opens everything and waits for the replicas of the sources in ``splits``.

    On the way out, whatever happened, episodes in flight are cancelled and what is held is dropped. Raises ``ConfigError``,
    ``StoreError``, ``LedgerError``, ``ReplicaDown``.
    """
    check_seams()
    envs = [e for e in config.env if e.split in splits]
    run_dir = Path(config.run.run_dir)
    with open_root(config.run.root, run=config.run.id, settings=config.store) as store:
        info = read_run(store)
        _check_fields(config, info)
        ledger_dir = run_dir / "ledger"
        holder = ConsumerHolder(store, ledger_dir, run=info, role=role, section=config.ledger)
        try:
            custody = Custody(holder)
            async with contextlib.AsyncExitStack() as clients:
                servers = await find_servers(config, info)
                started = [await clients.enter_async_context(_client(e, config, info, custody, holder.inc)) for e in envs]
                await _start(started, deadline_s=config.orchestrator.replica_wait_s)
                tasks = [await asyncio.to_thread(_tasks, e) for e in envs]
                sources = [_source(config, servers, e, c, t) for e, c, t in zip(envs, started, tasks, strict=True)]
                yield Session(
                    info=info,
                    store=store,
                    ledger_dir=ledger_dir,
                    custody=custody,
                    sources={split: [s for s, e in zip(sources, envs, strict=True) if e.split == split] for split in splits},
                    attempts=Attempts(
                        deadline_s=config.orchestrator.run_deadline_s, retries_max=config.orchestrator.retries_max, seed=config.run.seed
                    ),
                    wire_bytes=lambda: sum(c.bytes_received for c in started),
                    inference=servers,
                    replicas=lambda: {label: counts for c in started for label, counts in c.counts().items()},
                )
        finally:
            pending = holder.close(discard=True)
            if pending:
                _log.warning("%d removals are not done yet: fsref close %s finishes them", pending, config.run.id)


def _check_fields(config: Config, info: RunInfo) -> None:
    known = [f.name for f in info.schema.fields]
    lacking = [name for name in config.run.fields if name not in known]
    if lacking:
        raise ConfigError(f"run.fields names {lacking[0]!r}, the run was created with {', '.join(known)}: give a new run its own run.id")


def _tasks(env: EnvSection) -> list[Task]:
    return list(load_tasks(env, limit=TASKS_MAX))


def _client(env: EnvSection, config: Config, info: RunInfo, custody: Custody, session: str) -> EpisodeClient:
    def abandoned(request_id: str, objects: Mapping[str, int]) -> None:
        custody.drop(custody.take(request_id, objects), Reason.LATE)

    return EpisodeClient(
        env=env,
        envs_dir=Path(config.run.run_dir) / "envs",
        run=info.run,
        run_uuid=info.run_uuid,
        session=session,
        abandoned=abandoned,
        attempt=config.run.attempt,
    )


async def _start(clients: Sequence[EpisodeClient], *, deadline_s: float) -> None:
    async with together() as tasks:
        for client in clients:
            tasks.create_task(client.start(deadline_s=deadline_s))


def _source(config: Config, servers: Servers, env: EnvSection, client: EpisodeClient, tasks: Sequence[Task]) -> Source:
    targets = cycle(
        Target(
            base_url=address,
            model=config.model.name,
            tokenizer=config.model.path or str(Path(config.run.run_dir) / "model"),
            by_node=servers.by_node,
        )
        for address in servers.addresses
    )  # in turn, for env servers that have no inference on their own node

    async def run(task: Task, seed: int) -> Episode:
        return await client.run(task, target=next(targets), sampling=sampling_values(config.sampling, config.run.fields, seed=seed))

    return Source(
        name=env.name,
        tasks=tasks,
        run=run,
        slots=env.replicas * env.concurrent_max,
        weight=env.weight,
        serve_address=env.serve_address,
    )


def run_role(work: Callable[[], Coroutine[Any, Any, _T]]) -> _T | None:
    """Runs a role's coroutine to its end. SIGTERM, SIGINT and SIGUSR1 (which srun passes on) cancel it, which is a clean end: the result is
    None then."""
    return asyncio.run(_guarded(work))


async def _guarded(work: Callable[[], Coroutine[Any, Any, _T]]) -> _T | None:
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(work())
    stopped: list[str] = []

    def stop(number: signal.Signals) -> None:
        if not stopped:
            _log.info("stopping: %s", number.name)
            task.cancel()
        stopped.append(number.name)

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    for number in signals:
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not stopped:
            raise
        return None
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
