"""What the loader's tensors are made of: the form of expert ids, and memory on the way to a GPU."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fsref.buffers import BufferPool, pageable
from fsref.config import StoreSection
from fsref.errors import ConfigError
from fsref.loader import loader as module
from fsref.loader.batch import copied_to
from fsref.loader.fetch import StepFetcher
from fsref.loader.loader import StepLoader
from fsref.loader.standin import StandIns
from fsref.refs import Dense, Payload, PayloadRef, Schema, routed_experts
from fsref.steps import MicroBatch, RankFile, SampleSequence
from fsref.store import Store, open_root
from fsref.tensors import DenseTensor, ExpertIds, PackedMicroBatch, memory_for, pinned
from fsref.writer import Writer
from tests.support.payloads import Numbers, payload, schema

SCHEMA = schema()
TOKENS = 300


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_root(str(tmp_path), run="run", create=True) as store:
        yield store


def put(store: Store, count: int) -> list[PayloadRef]:
    writer, rng = Writer(store, SCHEMA, Numbers(), durability="process"), np.random.default_rng(0)
    return [writer.put(payload(rng, SCHEMA, TOKENS)) for _ in range(count)]


def step_of(number: int, refs: Sequence[PayloadRef], *, run_schema: Schema = SCHEMA) -> RankFile:
    def sequence(ref: PayloadRef) -> SampleSequence:
        tokens = ref.token_count
        return SampleSequence(
            sample="s",
            token_ids=bytes(4 * tokens),
            loss_mask=bytes(tokens),
            logprobs=bytes(4 * tokens),
            advantages=bytes(4 * tokens),
            ref=ref,
        )

    batches = tuple(MicroBatch((sequence(ref),)) for ref in refs)
    return RankFile(v=1, run="run", step=number, data_rank=0, schema=run_schema, micro_batches=batches, owned=())


def rows_of(batch: object) -> torch.Tensor:
    assert isinstance(batch, PackedMicroBatch)
    data = batch.fields["routed_experts"]
    assert isinstance(data, DenseTensor)
    return data.rows


def test_what_is_copied_from_is_kept_until_the_next_step_and_the_copies_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of things, with a stand-in for a GPU's event."""
    told: list[str] = []
    loader = StepLoader.__new__(StepLoader)
    loader._copying, loader._ranks = None, SimpleNamespace(device=torch.device("cuda"))  # type: ignore[assignment]
    loader._closing = loader._outer = ExitStack()
    numbers = iter(range(3))

    def begun(device: torch.device) -> Callable[[], None]:
        assert device.type == "cuda"
        number = next(numbers)
        return lambda: told.append(f"waited for {number}")

    monkeypatch.setattr(module, "copied_to", begun)
    kept = []
    for number in range(3):
        memory = np.zeros(1)
        kept.append(weakref.ref(memory))
        loader._keep_while_copied([memory])  # type: ignore[list-item]
        del memory
        assert [ref() is not None for ref in kept] == [False] * number + [True]
        assert told == [f"waited for {n}" for n in range(number)]
    loader.close()
    assert told == ["waited for 0", "waited for 1", "waited for 2"]
    assert kept[2]() is None


def test_a_rank_on_a_cpu_copies_nothing_and_takes_ordinary_memory() -> None:
    assert memory_for(torch.device("cpu")) is pageable
    assert copied_to(torch.device("cpu")) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and a torch that is built for it")
def test_a_rank_on_a_gpu_copies_out_of_page_locked_memory() -> None:
    device = torch.device("cuda")
    assert memory_for(device) is pinned
    tensor = torch.from_numpy(BufferPool(allocate=pinned).empty((1 << 20, 3), "int32"))
    assert tensor.is_pinned()
    tensor.zero_()
    moved = tensor.to(device, non_blocking=True)
    wait = copied_to(device)
    assert wait is not None
    wait()
    assert not moved.any()


@pytest.mark.payload("B5")
@pytest.mark.parametrize(("form", "dtype"), [("int64", torch.int64), ("uint8", torch.uint8), ("bytes", torch.uint8)])
def test_the_loader_hands_out_expert_ids_in_the_form_asked_for_stand_ins_too(store: Store, form: ExpertIds, dtype: torch.dtype) -> None:
    (ref,) = put(store, 1)
    with (
        StepFetcher(store, SCHEMA, config=StoreSection(), expert_ids=form) as fetcher,
        StepFetcher(store, SCHEMA, config=StoreSection()) as plain,
    ):
        (got,), (wanted,) = fetcher.take(step_of(0, [ref])), plain.take(step_of(0, [ref]))
    assert rows_of(got).dtype == dtype
    assert torch.equal(rows_of(got).int(), rows_of(wanted))
    assert isinstance(got, PackedMicroBatch)
    stand_in = StandIns(SCHEMA.field("routed_experts"), expert_ids=form).build(got)
    assert stand_in.generated
    assert (rows_of(stand_in.batch).dtype, rows_of(stand_in.batch).shape) == (dtype, rows_of(got).shape)


def test_two_bytes_of_an_id_and_a_form_that_does_not_hold_the_experts(store: Store) -> None:
    wide = Schema((routed_experts(layer_ids=[0, 1], top_k=2, expert_count=512),))
    rows = np.asarray([[[0, 511], [256, 255]]] * 3)
    ref = Writer(store, wide, Numbers(), durability="process").put(Payload(np.arange(3), {"routed_experts": Dense(rows)}))
    with StepFetcher(store, wide, config=StoreSection(), expert_ids="bytes") as fetcher:
        (got,) = fetcher.take(step_of(0, [ref], run_schema=wide))
    assert rows_of(got).numpy().view("<u2").tolist() == rows.tolist()
    assert isinstance(got, PackedMicroBatch)
    stand_in = StandIns(wide.field("routed_experts"), expert_ids="bytes").build(got)
    assert rows_of(stand_in.batch).shape == rows_of(got).shape
    with pytest.raises(ConfigError, match="512 experts do not fit uint8"):
        StepFetcher(store, wide, config=StoreSection(), expert_ids="uint8")
