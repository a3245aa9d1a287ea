"""The orchestrator role: opens what it needs, runs the steps, closes with nothing held.

Owns the wiring. Needs the extra ``verifiers``.
"""

import logging
from pathlib import Path

from fsref import steps
from fsref.config import Config
from fsref.errors import ConfigError, ObjectMissing
from fsref.events import JsonLines
from fsref.orchestrator.dispatcher import Dispatcher
from fsref.orchestrator.loop import Identity, Loop
from fsref.orchestrator.session import Session, open_session, run_role
from fsref.orchestrator.tasks import stream
from fsref.orchestrator.waiting import together
from fsref.orchestrator.weights import InferenceControl, Version, watch

_log = logging.getLogger(__name__)


def main(config: Config) -> None:
    """Runs the orchestrator of a run until its last step is published, or SIGTERM or SIGINT.

    Either way, and after an error, episodes in flight are cancelled and every array that it still holds is removed. Raises
    ``ConfigError``, ``MissingArrays``, ``RoleFailed``, ``StoreError``, ``LedgerError``.
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
        _check_fresh(session)
        hook = JsonLines(folder / "metrics.jsonl")
        try:
            version = Version()
            control = InferenceControl(config.inference.address)
            loop = _loop(config, session, version, hook)
            async with together() as tasks:
                poll_s = config.orchestrator.weights_poll_s
                watcher = tasks.create_task(watch(folder / "weights", control.load, version, poll_s=poll_s))
                await loop.run()
                watcher.cancel()
        finally:
            hook.close()
    _log.info("the last step is published: the orchestrator is done")


def _loop(config: Config, session: Session, version: Version, hook: JsonLines) -> Loop:
    settings = config.orchestrator
    dispatcher = Dispatcher(
        stream(session.sources["train"], seed=config.run.seed, shuffle=True),
        session.custody,
        session.attempts,
        version,
        group_size=settings.group_size,
        failures_max=settings.groups_failed_max,
    )
    return Loop(
        config=config,
        identity=Identity(run=session.info.run, run_uuid=session.info.run_uuid, schema=session.info.schema),
        store=session.store,
        custody=session.custody,
        dispatcher=dispatcher,
        attempts=session.attempts,
        version=version,
        eval_tasks=stream(session.sources["eval"], seed=config.run.seed, shuffle=False) if settings.eval_every else None,
        hook=hook,
        wire_bytes=session.wire_bytes,
    )


def _check_fresh(session: Session) -> None:
    """A run starts at step 0; its step files are written once."""
    try:
        steps.read_info(session.store, 0)
    except ObjectMissing:
        return
    raise ConfigError(f"run {session.info.run!r} has published steps already: start a new run with its own run.id")
