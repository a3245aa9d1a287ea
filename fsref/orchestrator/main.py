"""The orchestrator role: opens what it needs, runs the steps, closes with nothing held.

Owns the wiring. Needs the extra ``verifiers``.
"""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from fsref import steps
from fsref.config import Config
from fsref.errors import ConfigError
from fsref.events import Hook, open_backends
from fsref.orchestrator.dispatcher import Dispatcher
from fsref.orchestrator.groups import Source
from fsref.orchestrator.loop import Identity, Loop
from fsref.orchestrator.session import Session, open_session, run_role
from fsref.orchestrator.tasks import stream
from fsref.orchestrator.waiting import together
from fsref.orchestrator.weights import InferenceControl, Version, everywhere, newest, watch
from fsref.store import Store

if TYPE_CHECKING:
    from fsref.episodes import Task

_log = logging.getLogger(__name__)


def main(config: Config) -> None:
    """Runs the orchestrator of a run until its last step is published, or SIGTERM or SIGINT.

    A run that has published steps goes on behind them; what an orchestrator before this one left is adopted (``fsref.reaper``). Either
    way, and after an error, episodes in flight are cancelled and every array that it still holds is removed. Raises ``ConfigError``,
    ``MissingArrays``, ``RoleFailed``, ``StoreError``, ``LedgerError``.
    """
    _check(config)
    run_role(lambda: _run(config))


def _check(config: Config) -> None:
    settings = config.orchestrator
    if settings.sequence_tokens_max > settings.tokens_per_micro_batch:
        raise ConfigError(
            f"orchestrator.sequence_tokens_max {settings.sequence_tokens_max} exceeds tokens_per_micro_batch"
            f" {settings.tokens_per_micro_batch}: a micro batch must hold the longest sample"
        )
    if settings.eval_every and not any(e.split == "eval" for e in config.env):
        raise ConfigError("orchestrator.eval_every is set, and no [[env]] has split = 'eval': add one, or set it to 0")
    if not any(e.split == "train" for e in config.env):
        raise ConfigError("no [[env]] has split = 'train': add one")


async def _run(config: Config) -> None:
    folder = Path(config.run.run_dir)
    splits = ("train", "eval") if config.orchestrator.eval_every else ("train",)
    async with open_session(config, role="orc", splits=splits) as session:
        start = await asyncio.to_thread(_start, session.store)
        hook = await asyncio.to_thread(open_backends, config.metrics, folder, run=session.info.run, role="orchestrator")
        try:
            version = Version()
            load = everywhere([InferenceControl(a) for a in session.inference.addresses])
            loop = _loop(config, session, version, hook, start)
            async with together() as tasks:
                poll_s = config.orchestrator.weights_poll_s
                there = newest(folder / "weights")
                watcher = tasks.create_task(watch(folder / "weights", load, version, poll_s=poll_s))
                if there is not None and start.step:  # inference may have been started anew, with the initial model
                    await version.at_least(there.version, deadline_s=config.orchestrator.weights_wait_s)
                await loop.run()
                watcher.cancel()
        finally:
            await asyncio.to_thread(hook.close)
    _log.info("the last step is published: the orchestrator is done")


@dataclass(frozen=True)
class Start:
    """Where a run goes on; a new one at 0, 0."""

    step: int
    groups: int
    """Groups that were dispatched before."""


def _start(store: Store) -> Start:
    """Behind the last published step. What a publication that was cut off left of the next one is removed: its objects were settled when
    the orchestrator before was adopted."""
    there = steps.published(store)
    start = Start(there[-1] + 1, steps.read_info(store, there[-1]).groups) if there else Start(0, 0)
    if left := steps.remove(store, start.step):
        _log.info("step %d had been published in part: %d files are removed", start.step, left)
    if start.step:
        _log.info("the run goes on with step %d, group %d", start.step, start.groups)
    return start


def _loop(config: Config, session: Session, version: Version, hook: Hook, start: Start) -> Loop:
    settings = config.orchestrator
    dispatcher = Dispatcher(
        islice(stream(session.sources["train"], seed=config.run.seed, shuffle=True), start.groups, None),
        session.custody,
        session.attempts,
        version,
        group_size=settings.group_size,
        failures_max=settings.groups_failed_max,
        first=start.groups,
    )
    return Loop(
        config=config,
        identity=Identity(run=session.info.run, run_uuid=session.info.run_uuid, schema=session.info.schema),
        store=session.store,
        custody=session.custody,
        dispatcher=dispatcher,
        attempts=session.attempts,
        version=version,
        eval_tasks=_eval_tasks(config, session, start) if settings.eval_every else None,
        hook=hook,
        wire_bytes=session.wire_bytes,
        first=start.step,
        replicas=session.replicas,
    )


def _eval_tasks(config: Config, session: Session, start: Start) -> "Iterator[tuple[Source, Task]]":
    """Behind the tasks of the evaluations that came with the steps before."""
    settings = config.orchestrator
    before = -(-start.step // settings.eval_every) * settings.eval_episodes
    return islice(stream(session.sources["eval"], seed=config.run.seed, shuffle=False), before, None)
