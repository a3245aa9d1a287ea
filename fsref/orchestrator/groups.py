"""A group: several episodes of one task, whose rewards are compared.

Pure. Owns the nouns between dispatch and selection, and the step from finished episodes to samples. Refuses to run or remove anything.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fsref.errors import MissingArrays
from fsref.orchestrator.filters import Dropped, Reason
from fsref.orchestrator.samples import Sample

if TYPE_CHECKING:
    from fsref.episodes import Episode, Task


@dataclass(frozen=True, eq=False)
class Source:
    """One ``[[env]]`` as the orchestrator uses it."""

    name: str
    tasks: "Sequence[Task]"
    run: "Callable[[Task, int], Awaitable[Episode]]"
    """Runs one episode of a task with a sampling seed on the replica with the fewest in flight. Whoever awaits it takes the episode's
    objects before its next await."""
    slots: int
    """Runs in flight over all of its replicas."""
    weight: float = 1.0
    serve_address: str = ""
    """Where someone else serves it; empty: the launcher does."""


@dataclass(frozen=True, eq=False)
class Taken:
    """An episode whose objects are held."""

    episode: "Episode"
    dispatched: int
    """The weights when it was dispatched, so the oldest that may have sampled it."""
    offered: int
    """The newest that inference may have had when it came back."""

    def version_of(self, labels: "Sequence[str]") -> int:
        """The oldest weights that sampled a branch: by the engine's labels, where all of them are versions that can be, else as dispatched.

        An engine may number its weights by its own count; a number outside what the trainer had made by then is such a one.
        """
        versions = [int(label) for label in labels if label.isascii() and label.isdigit()]
        if not versions or len(versions) != len(labels):
            return self.dispatched
        oldest, newest = min(versions), max(versions)
        return oldest if self.dispatched <= oldest and newest <= self.offered else self.dispatched


@dataclass(eq=False)
class Group:
    """One group in flight or finished."""

    number: int
    source: Source
    task: "Task"
    taken: list[Taken] = field(default_factory=list)
    failure: str = ""
    """Why it was dropped; empty while it was not."""

    @property
    def what(self) -> str:
        """For messages."""
        return f"group {self.number} (source {self.source.name!r}, task {self.task.key!r})"


def samples_of(groups: Iterable[Group], *, temperature: float) -> tuple[list[Sample], list[Dropped]]:
    """Samples of finished groups, in order, and what of their episodes is none: failed episodes, objects that no sample names.

    Raises ``MissingArrays`` for a source that is served elsewhere and delivers no references.
    """
    samples: list[Sample] = []
    dropped: list[Dropped] = []
    for group in groups:
        _check_served(group)
        for taken in group.taken:
            episode = taken.episode
            if not episode.ok:
                why = f"the episode failed: {'; '.join(episode.errors) or 'no reason given'}"
                dropped.append(Dropped(episode.request_id, Reason.FILTERED, why, episode.objects))
                continue
            mine = [_sample(group, taken, n, temperature) for n in range(len(episode.samples))]
            named = {o for s in mine for o in s.objects}
            rest = {o: size for o, size in episode.objects.items() if o not in named}
            if rest:
                dropped.append(Dropped(episode.request_id, Reason.UNTRAINED, "no sample names it", rest))
            samples += mine
    return samples, dropped


def rewards_of(groups: Iterable[Group]) -> list[float]:
    """Rewards of every trainable trace that ended well."""
    episodes = (t.episode for g in groups for t in g.taken if t.episode.ok)
    return [trace.reward for episode in episodes for trace in episode.traces if trace.ok and trace.trainable]


def _sample(group: Group, taken: Taken, number: int, temperature: float) -> Sample:
    branch = taken.episode.samples[number]
    return Sample(
        name=branch.name,
        group=group.number,
        agent=branch.agent,
        trace=branch.trace_id,
        token_ids=np.asarray(branch.token_ids, np.int32),
        loss_mask=np.asarray(branch.loss_mask, np.bool_),
        logprobs=np.asarray(branch.logprobs, np.float32),
        ref=branch.ref,
        reward=branch.reward,
        version=taken.version_of(branch.versions),
        temperature=temperature,
    )


def _check_served(group: Group) -> None:
    branches = [b for t in group.taken if t.episode.ok for b in t.episode.samples]
    if group.source.serve_address and branches and all(b.ref is None for b in branches):
        raise MissingArrays(
            f"source {group.source.name!r} at {group.source.serve_address}: none of the {len(branches)} samples of {group.what} came with"
            " a reference, so it is served by a plain verifiers server, which keeps no arrays: serve it with `fsref env-server`"
        )
