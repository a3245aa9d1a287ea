"""What trains and what does not, and why.

Pure. Owns the rules between a batch of samples and the ones that are packed; every sample comes out exactly once, kept or dropped with
the ledger reason that its arrays are removed under (ledger.md section 10). Refuses to remove anything itself.
"""

import enum
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fsref.errors import PayloadError
from fsref.orchestrator.advantages import group_advantages, has_spread, shuffled
from fsref.orchestrator.samples import MissingPolicy, Sample, check_fields, check_hash
from fsref.refs import Schema


class Reason(enum.StrEnum):
    """The ledger's reasons that an orchestrator drops for."""

    FILTERED = "filtered"
    """The episode or trace failed, or the sample is too long."""
    GROUP_DROPPED = "group_dropped"
    """Another member of its group could not finish."""
    UNTRAINED = "untrained"
    """No token of the branch trains."""
    PRUNED = "pruned"
    """All rewards of its group are equal."""
    STALE = "stale"
    """Its weights lag too far behind."""
    LATE = "late"
    """It came back after its group was dropped."""
    EVAL = "eval"
    """Evaluation never trains."""
    SHUTDOWN = "shutdown"
    """It was still held when the orchestrator closed."""


@dataclass(frozen=True)
class Dropped:
    """Something that will not train, with the objects that go with it (none, if it had no arrays)."""

    name: str
    reason: Reason
    why: str
    """For people and metrics, with the numbers."""
    objects: Mapping[str, int]
    """Object id to bytes."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The limits that samples are held to."""

    fields: tuple[str, ...]
    missing: MissingPolicy
    tokens_max: int
    overlong: Literal["truncate", "drop"]
    off_policy_max: int
    prune: bool
    """Drop groups without spread."""
    normalise: bool
    """Divide advantages by the group's standard deviation."""
    shuffle_seed: int | None
    """Permute advantages over the batch, as a control; None: do not."""


@dataclass(frozen=True)
class Selection:
    """The outcome for one batch."""

    samples: tuple[Sample, ...]
    """They train, with their advantages, in the order they came."""
    dropped: tuple[Dropped, ...]
    truncated: int
    """Kept samples that lost tokens."""
    incomplete: int
    """Kept samples that lack a row of a needed field (``run.missing = "fallback"``)."""


def drop(sample: Sample, reason: Reason, why: str) -> Dropped:
    """The record of a sample that will not train."""
    return Dropped(sample.name, reason, why, sample.objects)


def select(samples: Sequence[Sample], schema: Schema, rules: Rules, *, step: int) -> Selection:
    """Decides over all samples of a batch.

    Advantages compare all traces of a group, also those that a later rule drops: their rewards are as true as the others'. Raises
    ``PayloadError`` if tokens and arrays do not belong together or two samples name one object, ``MissingArrays`` if a sample lacks a
    field that the run needs.
    """
    _check_distinct(samples)
    advantages, flat = _compare(samples, normalise=rules.normalise)
    kept: list[Sample] = []
    dropped: list[Dropped] = []
    truncated = incomplete = 0
    for sample in samples:
        fitted = _fit(sample, rules)
        if isinstance(fitted, Dropped):
            dropped.append(fitted)
            continue
        complete = check_fields(fitted, schema, fields=rules.fields, missing=rules.missing)
        lag = step - sample.version
        if lag > rules.off_policy_max:
            dropped.append(drop(sample, Reason.STALE, f"weights {lag} versions behind, at most {rules.off_policy_max} are allowed"))
        elif rules.prune and (sample.group, sample.agent) in flat:
            dropped.append(drop(sample, Reason.PRUNED, "all rewards of its group are equal"))
        else:
            kept.append(replace(fitted, advantage=advantages[sample.group, sample.agent, sample.trace]))
            truncated += fitted is not sample
            incomplete += not complete
    if rules.shuffle_seed is not None:
        order = shuffled([s.advantage for s in kept], seed=rules.shuffle_seed, step=step)
        kept = [replace(s, advantage=a) for s, a in zip(kept, order, strict=True)]
    return Selection(tuple(kept), tuple(dropped), truncated, incomplete)


def _fit(sample: Sample, rules: Rules) -> Sample | Dropped:
    """The sample within the length limit, checked against its arrays before it is cut."""
    if not sample.trains:
        return drop(sample, Reason.UNTRAINED, "no token trains")
    check_hash(sample)
    if sample.token_count <= rules.tokens_max:
        return sample
    if rules.overlong == "drop":
        return drop(sample, Reason.FILTERED, f"{sample.token_count} tokens, at most {rules.tokens_max} are allowed")
    cut = sample.truncated(rules.tokens_max)
    return cut if cut.trains else drop(sample, Reason.UNTRAINED, f"no token of the first {rules.tokens_max} trains")


def _compare(samples: Iterable[Sample], *, normalise: bool) -> tuple[dict[tuple[int, str, str], float], set[tuple[int, str]]]:
    """Advantage per (group, agent, trace), and the (group, agent) pairs whose rewards are all equal. A trace counts once."""
    rewards: dict[tuple[int, str], dict[str, float]] = defaultdict(dict)
    for s in samples:
        rewards[s.group, s.agent][s.trace] = s.reward
    advantages = {}
    flat = set()
    for key, by_trace in rewards.items():
        values = list(by_trace.values())
        if not has_spread(values):
            flat.add(key)
        for trace, advantage in zip(by_trace, group_advantages(values, normalise=normalise), strict=True):
            advantages[*key, trace] = advantage
    return advantages, flat


def _check_distinct(samples: Iterable[Sample]) -> None:
    """One object belongs to one sample: removed with one, it would be missing for the other."""
    seen: dict[str, str] = {}
    for s in samples:
        for object_id in s.objects:
            if object_id in seen:
                raise PayloadError(f"samples {seen[object_id]} and {s.name} both name the object {object_id}; each needs its own")
            seen[object_id] = s.name
