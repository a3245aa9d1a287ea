"""From placed samples to the files of a step.

Pure. Owns the rank files and the counts of ``STEP.json``: sequences in packing order, padding dummies, which data rank owns which object.
Refuses to ship or publish.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fsref import steps
from fsref.orchestrator.packing import place
from fsref.orchestrator.samples import Sample, is_routed
from fsref.refs import Schema

DUMMY_TOKENS_MAX: Final = 16
"""A padding dummy is a short slice: enough for the forward to route like real data, little to fetch."""


@dataclass(frozen=True)
class Batch:
    """Everything that is published for one step, and what has to be shipped before."""

    info: steps.StepInfo
    files: tuple[bytes, ...]
    """Encoded rank files, by data rank."""
    shipped: Mapping[str, int]
    """Object id to bytes."""
    dummies: int
    """Padding dummies over all data ranks."""


def build(
    samples: Sequence[Sample],
    schema: Schema,
    *,
    run: str,
    run_uuid: str,
    step: int,
    data_ranks: int,
    tokens_per_micro_batch: int,
    groups: int,
    metrics: Mapping[str, float],
    ms: int,
) -> Batch:
    """Packs at least one sample. Raises ``ConfigError`` if one exceeds the micro batch's budget.

    A dummy names its real sample, keeps a prefix of its tokens and has no loss. It reads routing rows only, so its reference is left
    out where the sample has none. An object counts once, for the first data rank that trains it, also where dummies of others name it.
    """
    assert samples
    routed = [is_routed(s.ref, schema) for s in samples]
    placed = place([s.token_count for s in samples], routed, data_ranks=data_ranks, tokens_max=tokens_per_micro_batch)
    ranks = []
    owned_by: dict[str, int] = {}
    for data_rank, batches in enumerate(placed):
        source = _dummy_source(samples, routed, [i for b in batches for i in b])
        dummy = _dummy(samples[source], with_ref=routed[source])
        mine = [o for b in batches for i in b for o in samples[i].objects]
        for object_id in mine:
            owned_by.setdefault(object_id, data_rank)
        ranks.append(
            steps.RankFile(
                v=steps.VERSION,
                run=run,
                step=step,
                data_rank=data_rank,
                schema=schema,
                micro_batches=tuple(steps.MicroBatch(tuple(_sequence(samples[i]) for i in b) or (dummy,)) for b in batches),
                owned=tuple(dict.fromkeys(o for o in mine if owned_by[o] == data_rank)),
            )
        )
    files = tuple(steps.encode_rank_files(ranks))
    shipped = {o: size for s in samples for o, size in s.objects.items()}
    info = steps.StepInfo(
        v=steps.VERSION,
        run=run,
        run_uuid=run_uuid,
        step=step,
        data_ranks=data_ranks,
        micro_batches=len(placed[0]),
        samples=len(samples),
        tokens=sum(s.token_count for s in samples),
        n=len(shipped),
        bytes=sum(shipped.values()),
        sum=steps.sum_of(shipped),
        version=max(s.version for s in samples),
        groups=groups,
        schema=schema,
        digests=tuple(map(steps.digest, files)),
        metrics=dict(metrics),
        ms=ms,
    )
    steps.check_counts(info, ranks)
    return Batch(info, files, shipped, sum(not b for batches in placed for b in batches))


def _dummy_source(samples: Sequence[Sample], routed: Sequence[bool], mine: Sequence[int]) -> int:
    """A sample of this rank, whose arrays it fetches anyway, with routing if the step has any; else the step's shortest such."""
    wanted = [i for i in range(len(samples)) if routed[i]] or list(range(len(samples)))
    local = [i for i in mine if i in set(wanted)]
    return min(local or wanted, key=lambda i: (samples[i].token_count, i))


def _sequence(sample: Sample) -> steps.SampleSequence:
    return steps.SampleSequence(
        sample=sample.name,
        token_ids=sample.token_ids.astype("<i4").tobytes(),
        loss_mask=sample.loss_mask.astype(np.uint8).tobytes(),
        logprobs=sample.logprobs.astype("<f4").tobytes(),
        advantages=np.where(sample.loss_mask, sample.advantage, 0).astype("<f4").tobytes(),
        ref=sample.ref,
        reward=sample.reward,
        version=sample.version,
        temperature=sample.temperature,
    )


def _dummy(sample: Sample, *, with_ref: bool) -> steps.SampleSequence:
    short = sample.truncated(DUMMY_TOKENS_MAX)
    blank = np.zeros(short.token_count, "<f4").tobytes()
    return steps.SampleSequence(
        sample=sample.name,
        token_ids=short.token_ids.astype("<i4").tobytes(),
        loss_mask=bytes(short.token_count),
        logprobs=blank,
        advantages=blank,
        ref=short.ref if with_ref else None,
        version=sample.version,
        temperature=sample.temperature,
        padding=True,
    )
