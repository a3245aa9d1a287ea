"""What the orchestrator reports for a step. Pure.

Names are listed in docs/orchestrator.md. Sizes of arrays come from the references' statistics; no array is read.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from fsref.orchestrator.filters import Selection
from fsref.orchestrator.groups import Group, rewards_of
from fsref.orchestrator.samples import Sample
from fsref.plan import State, missing_ranges, states
from fsref.refs import Lint, Schema

if TYPE_CHECKING:
    from fsref.episodes import ReplicaCounts


def batch_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Of the episodes that came in, before any filter."""
    episodes = [t.episode for g in groups for t in g.taken]
    traces = [trace for e in episodes for trace in e.traces if trace.trainable]
    rewards = rewards_of(groups)
    out = {
        "episodes/count": float(len(episodes)),
        "episodes/errors": float(sum(not e.ok for e in episodes)),
        "traces/count": float(len(traces)),
        "traces/truncated": float(sum(t.truncated for t in traces)),
    }
    if rewards:
        out |= {"reward/mean": fmean(rewards), "reward/std": pstdev(rewards)}
    if traces:
        out |= {"traces/turns_mean": fmean(t.turns for t in traces), "traces/sampled_tokens_mean": fmean(t.sampled_tokens for t in traces)}
    return out


def replica_metrics(counts: "Mapping[str, ReplicaCounts]") -> dict[str, float]:
    """What each env-server replica did since the orchestrator started, by its label."""
    out = {"replicas/alive": float(sum(c.alive for c in counts.values()))} if counts else {}
    for label, c in counts.items():
        out |= {f"replicas/{label}/finished": float(c.finished), f"replicas/{label}/deaths": float(c.deaths)}
    return out


def selection_metrics(selection: Selection, schema: Schema, *, step: int) -> dict[str, float]:
    """Of the samples that train."""
    samples = selection.samples
    out = {
        "samples/count": float(len(samples)),
        "samples/dropped": float(len(selection.dropped)),
        "samples/truncated": float(selection.truncated),
        "samples/incomplete": float(selection.incomplete),
        "samples/without_arrays": float(sum(s.ref is None for s in samples)),
        "samples/tokens": float(sum(s.token_count for s in samples)),
        "samples/tokens_trained": float(sum(int(s.loss_mask.sum()) for s in samples)),
        "payload/refs": float(sum(s.ref is not None for s in samples)),
        "payload/bytes_shipped": float(sum(sum(s.objects.values()) for s in samples)),
    }
    if samples:
        out["off_policy/mean"] = fmean(step - s.version for s in samples)
        out["off_policy/max"] = float(max(step - s.version for s in samples))
    return out | support_sizes(samples, schema) | coverage_counts(samples, schema) | lint_counts(samples)


def coverage_counts(samples: Sequence[Sample], schema: Schema) -> dict[str, float]:
    """Per field: samples whose engine was asked and sent nothing, samples that lack rows, and the missing rows of both."""
    out: dict[str, float] = {}
    for sample in samples:
        if sample.ref is None:
            continue
        gaps = missing_ranges(sample.ref, schema)
        for name, state in states(sample.ref, schema).items():
            if state in (State.ABSENT, State.PARTIAL):
                key = f"coverage/{name}/{state.value}"
                out[key] = out.get(key, 0.0) + 1
                rows = f"coverage/{name}/rows_missing"
                out[rows] = out.get(rows, 0.0) + sum(map(len, gaps.get(name, ())))
    return out


def lint_counts(samples: Sequence[Sample]) -> dict[str, float]:
    """Per lint: what it counted in all samples, and in how many."""
    out: dict[str, float] = {}
    for n, lint in enumerate(Lint):
        found = [s.ref.lints[n] for s in samples if s.ref is not None and n < len(s.ref.lints) and s.ref.lints[n]]
        if found:
            out |= {f"lints/{lint}": float(sum(found)), f"lints/{lint}_samples": float(len(found))}
    return out


def support_sizes(samples: Sequence[Sample], schema: Schema) -> dict[str, float]:
    """Mean values per row that has any, for each ragged field; the mask's goes by its reference name ``sampling_support/size``."""
    ragged = [f.name for f in schema.fields if f.ragged]
    out = {}
    for n, name in enumerate(ragged):
        stats = [s.ref.stats[n] for s in samples if s.ref is not None and n < len(s.ref.stats)]
        rows = sum(r for r, _ in stats)
        if rows:
            out["sampling_support/size" if name == "sampling_mask" else f"{name}/size"] = sum(v for _, v in stats) / rows
    return out
