"""The files of a step: counts, owners, dummies."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsref import steps
from fsref.orchestrator.batch import DUMMY_TOKENS_MAX, Batch, build
from fsref.orchestrator.samples import Sample
from fsref.refs import Schema


def built(samples: list[Sample], schema: Schema, *, data_ranks: int = 2, tokens: int = 64) -> tuple[Batch, list[steps.RankFile]]:
    batch = build(
        samples,
        schema,
        run="r-1",
        run_uuid="0" * 32,
        step=3,
        data_ranks=data_ranks,
        tokens_per_micro_batch=tokens,
        groups=9,
        metrics={"reward/mean": 0.5},
        ms=7,
    )
    return batch, [msgspec.msgpack.decode(f, type=steps.RankFile) for f in batch.files]


def test_a_sequence_carries_its_sample_byte_for_byte(make: Any, schema: Schema) -> None:
    sample = make.sample("a/0", reward=1.0, version=2)
    object.__setattr__(sample, "advantage", 0.25)
    _, (rank,) = built([sample], schema, data_ranks=1)
    (sequence,) = rank.micro_batches[0].sequences
    assert sequence.tokens().tolist() == [5, 6, 7, 8]
    assert list(sequence.loss_mask) == [0, 0, 1, 1]
    assert np.frombuffer(sequence.logprobs, "<f4").tolist() == [0, 0, -0.5, -0.5]
    assert np.frombuffer(sequence.advantages, "<f4").tolist() == [0, 0, 0.25, 0.25]
    assert (sequence.sample, sequence.reward, sequence.version, sequence.padding, sequence.ref) == ("a/0", 1.0, 2, False, sample.ref)


def test_the_counts_are_those_of_the_shipped_objects(make: Any, schema: Schema) -> None:
    samples = [make.sample(f"t{n}/0", version=n) for n in range(3)] + [make.sample("bare/0", ref=None)]
    batch, ranks = built(samples, schema)
    ids = [o for s in samples for o in s.objects]
    assert (batch.info.n, batch.info.bytes, batch.info.sum) == (3, 300_000, steps.sum_of(ids))
    assert batch.shipped == dict.fromkeys(ids, 100_000)
    assert (batch.info.samples, batch.info.tokens, batch.info.version) == (4, 16, 2)
    assert sorted(o for r in ranks for o in r.owned) == sorted(ids)


def test_a_dummy_reads_a_short_slice_of_a_real_samples_routing(make: Any, schema: Schema) -> None:
    sample = make.sample("a/0", token_ids=list(range(40)), trained=[39])
    batch, ranks = built([sample], schema)
    (dummy,) = ranks[1].micro_batches[0].sequences
    assert batch.dummies == 1
    assert (dummy.sample, dummy.padding, dummy.token_count) == ("a/0", True, DUMMY_TOKENS_MAX)
    assert dummy.ref == sample.ref.truncated(DUMMY_TOKENS_MAX)
    assert not any(dummy.loss_mask)
    assert not any(dummy.advantages)


@pytest.mark.payload("D13")
def test_an_object_that_a_dummy_names_too_is_shipped_once_and_owned_by_its_sample(make: Any, schema: Schema) -> None:
    sample = make.sample("a/0")
    batch, ranks = built([sample], schema, data_ranks=3)
    assert [r.owned for r in ranks] == [tuple(sample.objects), (), ()]
    assert batch.info.n == 1


def test_a_dummy_without_routing_has_no_reference(make: Any, schema: Schema) -> None:
    sample = make.sample("a/0", ref=make.ref([5, 6, 7, 8], fields=["top_logprobs"]))
    _, ranks = built([sample], schema)
    assert ranks[1].micro_batches[0].sequences[0].ref is None


def test_a_dummy_prefers_a_sample_that_its_rank_fetches_anyway(make: Any, schema: Schema) -> None:
    # Budget 40: rank 1 gets 38 and 10, which do not fit one micro batch; rank 0 gets 40 alone and needs a dummy.
    samples = [make.sample(f"t{n}/0", token_ids=list(range(n)), trained=[n - 1]) for n in (40, 38, 10)]
    _, ranks = built(samples, schema, tokens=40)
    real = {s.sample for b in ranks[0].micro_batches for s in b.sequences if not s.padding}
    dummies = [s.sample for b in ranks[0].micro_batches for s in b.sequences if s.padding]
    assert (real, dummies) == ({"t40/0"}, ["t40/0"])


def test_samples_with_and_without_arrays_pack_together_and_routing_stays_apart(make: Any, schema: Schema) -> None:
    heads = make.ref([5, 6, 7, 8], fields=["top_logprobs"])
    samples = [make.sample("routed/0"), make.sample("heads/0", ref=heads), make.sample("bare/0", ref=None)]
    _, (rank,) = built(samples, schema, data_ranks=1)
    assert [[s.sample for s in b.sequences] for b in rank.micro_batches] == [["routed/0"], ["heads/0", "bare/0"]]


@given(st.lists(st.tuples(st.integers(1, 30), st.sampled_from(["all", "heads", "none"])), min_size=1, max_size=20), st.integers(1, 4))
def test_files_of_any_batch_add_up(make: Any, schema: Schema, rows: list[tuple[int, str]], data_ranks: int) -> None:
    samples = []
    for n, (length, kind) in enumerate(rows):
        tokens = list(range(length))
        ref = None if kind == "none" else make.ref(tokens, fields=["top_logprobs", "routed_experts"][: 2 if kind == "all" else 1])
        samples.append(make.sample(f"t{n}/0", token_ids=tokens, trained=[length - 1], ref=ref))
    batch, ranks = built(samples, schema, data_ranks=data_ranks, tokens=32)
    steps.check_counts(batch.info, ranks)
    assert batch.info.digests == tuple(map(steps.digest, batch.files))
    assert {len(r.micro_batches) for r in ranks} == {batch.info.micro_batches}
    real = [s.sample for r in ranks for b in r.micro_batches for s in b.sequences if not s.padding]
    assert sorted(real) == sorted(s.name for s in samples)
    for sequences in (b.sequences for r in ranks for b in r.micro_batches):
        assert sequences
        assert sum(s.token_count for s in sequences) <= 32
