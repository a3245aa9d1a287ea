"""Evaluation: episodes whose arrays are removed as soon as they arrive, because nothing of them trains.

Owns the eval sink for the orchestrator and for the standalone command. Refuses to keep anything but numbers.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from fsref.orchestrator.attempts import Attempts, EpisodeFailed
from fsref.orchestrator.custody import Custody
from fsref.orchestrator.filters import Reason
from fsref.orchestrator.groups import Source
from fsref.orchestrator.waiting import settle

if TYPE_CHECKING:
    from fsref.episodes import Episode, Task


@dataclass
class Tally:
    """Results of one source."""

    rewards: list[float] = field(default_factory=list)
    """Of every trainable trace that ended well."""
    episodes: int = 0
    failed: int = 0
    """Episodes with errors, and ones that could not finish."""
    objects: int = 0
    """Removed."""
    bytes: int = 0
    last_error: str = ""

    @property
    def mean(self) -> float:
        """NaN without any reward."""
        return fmean(self.rewards) if self.rewards else float("nan")

    @property
    def standard_error(self) -> float:
        """NaN below two rewards."""
        return stdev(self.rewards) / len(self.rewards) ** 0.5 if len(self.rewards) > 1 else float("nan")


async def evaluate(
    tasks: "Iterator[tuple[Source, Task]]", custody: Custody, attempts: Attempts, *, episodes: int, key: str
) -> dict[str, Tally]:
    """Runs that many episodes and returns a tally per source. On any way out every episode is cancelled and settled.

    An episode that cannot finish is counted; errors that end a run pass through.
    """
    tallies: dict[str, Tally] = {}
    slots: dict[str, asyncio.Semaphore] = {}

    async def one(source: Source, task: "Task", number: int) -> None:
        tally = tallies.setdefault(source.name, Tally())
        async with slots.setdefault(source.name, asyncio.Semaphore(source.slots)):
            try:
                await attempts.run(source, task, f"{key}/{number}", lambda episode: _accept(episode, tally, custody))
            except EpisodeFailed as e:
                tally.episodes += 1
                tally.failed += 1
                tally.last_error = str(e)

    running = [asyncio.create_task(one(*next(tasks), n)) for n in range(episodes)]
    try:
        if running:
            await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await settle(running)
    for episode in running:
        if not episode.cancelled():
            episode.result()
    return tallies


def _accept(episode: "Episode", tally: Tally, custody: Custody) -> None:
    fresh = custody.take(episode.request_id, episode.objects)
    custody.drop(fresh, Reason.EVAL)
    tally.objects += len(fresh)
    tally.bytes += sum(fresh.values())
    tally.episodes += 1
    if not episode.ok:
        tally.failed += 1
        tally.last_error = "; ".join(episode.errors)
    tally.rewards += [t.reward for t in episode.traces if episode.ok and t.ok and t.trainable]


def tally_metrics(tallies: dict[str, Tally]) -> dict[str, float]:
    """For metrics.jsonl; sources without a reward have no mean."""
    out: dict[str, float] = {}
    for name, tally in tallies.items():
        out |= {f"eval/{name}/episodes": float(tally.episodes), f"eval/{name}/failed": float(tally.failed)}
        if tally.rewards:
            out[f"eval/{name}/reward_mean"] = tally.mean
    return out


def report(tallies: dict[str, Tally]) -> list[str]:
    """One line per source, for people."""
    lines = []
    for name, t in sorted(tallies.items()):
        error = f" +- {t.standard_error:.4f}" if len(t.rewards) > 1 else ""
        last = f"; the last error: {t.last_error}" if t.last_error else ""
        lines.append(
            f"{name}: reward {t.mean:.4f}{error} over {len(t.rewards)} traces, {t.episodes} episodes, {t.failed} failed,"
            f" {t.objects} objects ({t.bytes} bytes) removed{last}"
        )
    return lines
