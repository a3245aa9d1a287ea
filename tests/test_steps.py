"""Step files: complete, checked, published in order."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from fsref import steps
from fsref.errors import ObjectMissing, StepError, StoreUnavailable
from fsref.refs import PayloadRef
from fsref.steps import MicroBatch, RankFile, SampleSequence, StepInfo
from fsref.store import Store, open_root
from fsref.writer import Writer
from tests.support.payloads import Numbers, payload, schema


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_root(str(tmp_path), run="run", create=True)


def sequence(sample: str, tokens: int, ref: PayloadRef | None) -> SampleSequence:
    ids = np.arange(tokens, dtype=np.int32)
    return SampleSequence(
        sample, ids.tobytes(), np.ones(tokens, np.uint8).tobytes(), np.zeros(tokens, np.float32).tobytes(),
        np.ones(tokens, np.float32).tobytes(), ref,
    )  # fmt: skip


def step(store: Store, number: int = 42) -> tuple[StepInfo, list[RankFile]]:
    run_schema = schema()
    writer = Writer(store, run_schema, Numbers())
    refs = [writer.put(payload(np.random.default_rng(n), run_schema, 5)) for n in range(4)]
    ranks = [
        RankFile(
            v=1, run="run", step=number, data_rank=r, schema=run_schema, owned=tuple(i for ref in refs[r::2] for i in ref.object_ids),
            micro_batches=(MicroBatch(tuple(sequence(f"t{n}/0", 5, ref) for n, ref in enumerate(refs[r::2]))),),
        )
        for r in range(2)
    ]  # fmt: skip
    ids = [i for ref in refs for i in ref.object_ids]
    info = StepInfo(
        v=1, run="run", run_uuid="0" * 32, step=number, data_ranks=2, micro_batches=1, samples=4, tokens=20, n=4,
        bytes=sum(r.byte_count for r in refs), sum=steps.sum_of(ids), version=0, schema=run_schema,
        digests=tuple(steps.digest(d) for d in steps.encode_rank_files(ranks)),
    )  # fmt: skip
    return info, ranks


def test_a_published_step_reads_back_and_adds_up(store: Store) -> None:
    info, ranks = step(store)
    steps.publish(store, info, steps.encode_rank_files(ranks))
    got = steps.wait(store, 42, deadline_s=1)
    assert got == info
    read = [steps.read_rank(store, got, r) for r in range(2)]
    assert read == ranks
    steps.check_counts(got, read)
    assert [e.name for e in store.list("steps")] == [
        "steps/step_000042/STEP.json",
        "steps/step_000042/data_rank_00000.msgpack",
        "steps/step_000042/data_rank_00001.msgpack",
    ]


@pytest.mark.fault(23)
@pytest.mark.payload("F21")
def test_a_step_without_its_marker_is_not_there(store: Store) -> None:
    _, ranks = step(store)
    store.put(steps.rank_file_name(42, 0), [steps.encode_rank_files(ranks)[0]])
    with pytest.raises(ObjectMissing):
        steps.read_info(store, 42)
    with pytest.raises(StoreUnavailable, match="step_000042 was not published within"):
        steps.wait(store, 42, deadline_s=0)


@pytest.mark.fault(23)
def test_a_rank_file_of_another_attempt_is_refused(store: Store) -> None:
    info, ranks = step(store)
    steps.publish(store, info, steps.encode_rank_files(ranks))
    store.replace(steps.rank_file_name(42, 1), steps.encode_rank_files([msgspec.structs.replace(ranks[1], owned=())])[0])
    with pytest.raises(StepError, match="differs from the digest"):
        steps.read_rank(store, info, 1)
    with pytest.raises(StepError, match=r"trainer\.parallel\.data"):
        steps.read_rank(store, info, 2)


@pytest.mark.fault(24)
def test_owned_ids_that_do_not_match_what_was_shipped_are_refused(store: Store) -> None:
    info, ranks = step(store)
    steps.check_counts(info, ranks)
    more = msgspec.structs.replace(ranks[1], owned=(*ranks[1].owned, "env.a.0123456789abcdef/77"))
    for bad in ([ranks[0]], [ranks[0], ranks[0]], [ranks[0], more]):
        with pytest.raises(StepError, match="do not match"):
            steps.check_counts(info, bad)


@pytest.mark.fault(66)
def test_another_format_version_is_refused_with_both_numbers(store: Store) -> None:
    info, _ = step(store)
    store.replace(steps.info_name(42), msgspec.json.encode(msgspec.structs.replace(info, v=2)))
    with pytest.raises(StepError, match="has format 2, this version reads 1"):
        steps.read_info(store, 42)
    store.replace(steps.info_name(42), b"{]")
    with pytest.raises(StepError, match="cannot be read"):
        steps.read_info(store, 42)


def test_publishing_other_bytes_than_the_marker_names_is_refused(store: Store) -> None:
    info, ranks = step(store)
    with pytest.raises(StepError, match="do not match the digests"):
        steps.publish(store, info, steps.encode_rank_files(ranks)[:1])
    assert list(store.list("steps")) == []


def test_the_sum_does_not_depend_on_order() -> None:
    ids = [f"env.a.0123456789abcdef/{n}" for n in range(50)]
    assert steps.sum_of(ids) == steps.sum_of(reversed(ids))
    assert steps.sum_of(ids) != steps.sum_of(ids[1:])
    assert 0 <= steps.sum_of(ids) < 1 << 64
