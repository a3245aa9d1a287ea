"""The steps: collect, select, pack, ship, publish; in this order, one after the other.

Owns the order that the ledger needs (``ship`` is durable before the step is visible), the off-policy bound of dispatch, and the event of
each step. Refuses to open or close anything; ``main`` does.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fsref import steps
from fsref.config import Config
from fsref.errors import RoleFailed, StepError
from fsref.events import Event, Hook, memory_metrics
from fsref.orchestrator.attempts import Attempts
from fsref.orchestrator.batch import Batch, build
from fsref.orchestrator.custody import Custody
from fsref.orchestrator.dispatcher import Dispatcher
from fsref.orchestrator.evaluation import evaluate, tally_metrics
from fsref.orchestrator.filters import Rules, Selection, select
from fsref.orchestrator.groups import Source, samples_of
from fsref.orchestrator.metrics import batch_metrics, replica_metrics, selection_metrics
from fsref.orchestrator.waiting import to_its_end, together
from fsref.orchestrator.weights import Version
from fsref.refs import Schema
from fsref.store import Store

if TYPE_CHECKING:
    from fsref.episodes import ReplicaCounts, Task


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Which run this is, as ``run.json`` says."""

    run: str
    run_uuid: str
    schema: Schema


@dataclass(eq=False, kw_only=True)
class Loop:
    """The orchestrator between its start and its end. ``run`` it once, on one event loop."""

    config: Config
    identity: Identity
    store: Store
    custody: Custody
    dispatcher: Dispatcher
    attempts: Attempts
    version: Version
    eval_tasks: "Iterator[tuple[Source, Task]] | None"
    """None: no evaluation."""
    hook: Hook
    wire_bytes: Callable[[], int]
    """Bytes that env servers sent since the start."""
    first: int = 0
    """The step to begin with."""
    replicas: "Callable[[], Mapping[str, ReplicaCounts]]" = dict
    """What each env-server replica did, by label."""
    _wire_before: int = field(default=0, init=False)

    async def run(self) -> None:
        """The steps from ``first`` on, evaluations beside them. What is still held at the end, or at an error, the closing ledger drops."""
        evaluation: asyncio.Task[None] | None = None
        async with together() as tasks:
            for step in range(self.first, self.config.run.steps):
                settings = self.config.orchestrator
                clock = _Clock()
                await self.version.at_least(step - settings.ahead_max, deadline_s=settings.weights_wait_s)
                clock.lap("time/wait_weights")
                if self.eval_tasks is not None and settings.eval_every and step % settings.eval_every == 0:
                    if evaluation is not None:
                        await evaluation
                    evaluation = tasks.create_task(self._evaluate(self.eval_tasks, step))
                await self._step(step, clock)

    async def _step(self, step: int, clock: "_Clock") -> None:
        metrics, selection = await self._collect(step)
        clock.lap("time/collect")
        batch = await asyncio.to_thread(self._pack, step, selection, metrics)
        clock.lap("time/pack")
        await to_its_end(lambda: self._hand_over(batch))
        self.custody.shipped(batch.shipped)
        clock.lap("time/publish")
        self._report(step, metrics, batch, clock.laps)

    async def _collect(self, step: int) -> tuple[dict[str, float], Selection]:
        """Episodes until something of them trains; what does not is dropped."""
        settings = self.config.orchestrator
        for empty in range(settings.batches_empty_max):
            groups = await self.dispatcher.collect(settings.batch_size // settings.group_size)
            samples, rest = samples_of(groups, temperature=self.config.sampling.temperature)
            self.custody.drop_samples(rest)
            selection = select(samples, self.identity.schema, self._rules(), step=step)
            self.custody.drop_samples(selection.dropped)
            if selection.samples:
                metrics = batch_metrics(groups) | selection_metrics(selection, self.identity.schema, step=step)
                return metrics | {"batches/empty": float(empty)}, selection
        raise RoleFailed(
            f"step {step}: nothing trains in {settings.batches_empty_max} batches in a row ({_shares(selection)}):"
            " look at the rewards, or at orchestrator.filter_zero_advantage, off_policy_max and overlong"
        )

    def _rules(self) -> Rules:
        settings = self.config.orchestrator
        return Rules(
            fields=self.config.run.fields,
            missing=self.config.run.missing,
            tokens_max=settings.sequence_tokens_max,
            overlong=settings.overlong,
            off_policy_max=settings.off_policy_max,
            prune=settings.filter_zero_advantage,
            normalise=settings.normalise_advantages,
            shuffle_seed=self.config.run.seed if settings.shuffle_advantages else None,
        )

    def _pack(self, step: int, selection: Selection, metrics: Mapping[str, float]) -> Batch:
        return build(
            selection.samples,
            self.identity.schema,
            run=self.identity.run,
            run_uuid=self.identity.run_uuid,
            step=step,
            data_ranks=self.config.trainer.parallel.data,
            tokens_per_micro_batch=self.config.orchestrator.tokens_per_micro_batch,
            groups=self.dispatcher.dispatched,
            metrics=metrics,
            ms=time.time_ns() // 1_000_000,
        )

    def _hand_over(self, batch: Batch) -> None:
        """Blocks. The right passes first, durably; only then the step becomes visible (W2)."""
        info = batch.info
        shipped = self.custody.ship(info.step, batch.shipped)
        if shipped != (info.n, info.sum):
            raise StepError(f"step {info.step}: the ledger shipped n, sum = {shipped}, the step file says {(info.n, info.sum)}")
        steps.publish(self.store, info, batch.files)

    def _report(self, step: int, metrics: Mapping[str, float], batch: Batch, laps: Mapping[str, float]) -> None:
        wire = self.wire_bytes()
        self.hook(
            Event(
                role="orchestrator",
                step=step,
                metrics={
                    **metrics,
                    **self.custody.flush(),
                    **laps,
                    **memory_metrics(),
                    **replica_metrics(self.replicas()),
                    "wire/bytes_received": float(wire - self._wire_before),
                    "steps/file_bytes": float(sum(map(len, batch.files))),
                    "steps/micro_batches": float(batch.info.micro_batches),
                    "steps/dummies": float(batch.dummies),
                    "episodes/unfinished": float(self.dispatcher.failed),
                    "weights/version": float(self.version.current),
                },
            )
        )
        self._wire_before = wire

    async def _evaluate(self, tasks: "Iterator[tuple[Source, Task]]", step: int) -> None:
        """Beside the training episodes, so that training does not wait for it."""
        version = self.version.current
        tallies = await evaluate(tasks, self.custody, self.attempts, episodes=self.config.orchestrator.eval_episodes, key=f"eval/{step}")
        self.hook(Event(role="orchestrator", step=step, metrics={**tally_metrics(tallies), "eval/version": float(version)}))


class _Clock:
    """Wall seconds between laps."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = now - self._last
        self._last = now


def _shares(selection: Selection) -> str:
    counts = Counter(d.reason for d in selection.dropped)
    shown = [f"{n} {reason}" for reason, n in counts.items()]
    return f"the last one: {', '.join(shown)}" if shown else "the last one had no samples"
