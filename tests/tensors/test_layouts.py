"""Layouts: every field stands where its tokens do, byte for byte, whatever the layout, and goes back to what it was."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fsref.errors import ConfigError, PayloadError
from fsref.plan import ContextLayout, Source, balanced_rows, packed, padded_bounds, padded_to, padding_count, rank_rows
from fsref.reader import Reader
from fsref.refs import Payload, Schema, TokenRange
from fsref.slices import read_slice, sources_of
from fsref.steps import MicroBatch, SampleSequence
from fsref.store import open_root
from fsref.tensors import (
    DenseTensor,
    ExpertIds,
    Layout,
    LeftPadded,
    PackedMicroBatch,
    PaddedMicroBatch,
    PaddingCells,
    PromptCompletion,
    RaggedTensor,
    RightPadded,
    arranged,
    in_order,
    pack_tokens,
    padded,
    rank_batch,
)
from fsref.writer import Writer
from tests.support import padded as oracle
from tests.support.layouts import LAYOUTS, room_of
from tests.support.payloads import Numbers, cut, payload, schema

EXPERTS, SHARDS = 16, 4
TOKEN_LEVEL = ("token_ids", "position_ids", "loss_mask", "logprobs", "advantages", "temperature", "padding")


def cells(**changes: int) -> PaddingCells:
    return PaddingCells(**{"token_id": 7, "step": 12, "data_rank": 0, "data_ranks": 1, "expert_shards": SHARDS, **changes})


def raw(tensor: torch.Tensor) -> bytes:
    """The bits, for dtypes that numpy does not have too."""
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def same(one: Any, other: Any) -> None:
    """Two structures hold the same dtypes, shapes and bits."""
    assert type(one) is type(other)
    for name, value in vars(one).items():
        if name == "fields":
            assert list(value) == list(other.fields)
            for field in value:
                same(value[field], other.fields[field])
        elif isinstance(value, dict):
            assert list(value) == list(vars(other)[name])
            for key, tensor in value.items():
                assert (tensor.dtype, tensor.shape, raw(tensor)) == (
                    vars(other)[name][key].dtype,
                    vars(other)[name][key].shape,
                    raw(vars(other)[name][key]),
                ), f"{name}.{key}"
        elif isinstance(value, torch.Tensor):
            twin = vars(other)[name]
            assert (value.dtype, value.shape, raw(value)) == (twin.dtype, twin.shape, raw(twin)), name
        else:
            assert value == vars(other)[name], name


def sequences(rng: np.random.Generator, lengths: Sequence[int], *, dummies: Sequence[int] = ()) -> MicroBatch:
    return MicroBatch(
        tuple(
            SampleSequence(
                sample=f"s{n}",
                token_ids=rng.integers(0, 500, length).astype("<i4").tobytes(),
                loss_mask=rng.integers(0, 2, length).astype(np.uint8).tobytes(),
                logprobs=rng.integers(0, 1 << 32, length).astype("<u4").tobytes(),  # any bits: NaN with their payload too
                advantages=rng.standard_normal(length).astype("<f4").tobytes(),
                ref=None,
                temperature=0.5 + n,
                padding=n in dummies,
            )
            for n, length in enumerate(lengths)
        )
    )


def fields(rng: np.random.Generator, count: int) -> dict[str, DenseTensor | RaggedTensor]:
    """Fields of every kind, of ``count`` packed tokens."""

    def valid() -> torch.Tensor:
        return torch.from_numpy(rng.random(count) < 0.8)

    def bits(dtype: str, *shape: int) -> torch.Tensor:
        size = count * math.prod(shape) * np.dtype(dtype).itemsize
        return torch.from_numpy(rng.integers(0, 256, size).astype(np.uint8).view(dtype).reshape(count, *shape))

    counts = rng.integers(0, 4, count).astype(np.int32)
    total = int(counts.sum())
    columns = {
        "ids": torch.from_numpy(rng.integers(0, 500, total).astype(np.int32)),
        "logprobs": torch.from_numpy(rng.random(total, np.float32)),
    }
    ids = torch.from_numpy(rng.integers(0, EXPERTS, (count, 3, 2)).astype(np.int32))
    return {
        "routed_experts": DenseTensor(ids, valid(), (0, 2, 5), EXPERTS),
        "hidden": DenseTensor(bits("int16", 3).view(torch.bfloat16), valid()),
        "eighth": DenseTensor(bits("uint8", 2).view(torch.float8_e4m3fn), valid()),
        "score": DenseTensor(bits("float32"), valid()),
        "sampling_mask": RaggedTensor(torch.from_numpy(counts), columns, valid(), {"flags": bits("uint8")}),
    }


def random_batch(rng: np.random.Generator, lengths: Sequence[int]) -> PackedMicroBatch:
    tokens = pack_tokens(sequences(rng, lengths, dummies=[n for n in range(1, len(lengths)) if rng.random() < 0.3]))
    labels = torch.from_numpy(rng.integers(0, 100, sum(lengths))) if rng.random() < 0.5 else None
    return PackedMicroBatch(**{**vars(tokens), "fields": fields(rng, sum(lengths)), "bytes_read": 99, "labels": labels})


@st.composite
def cases(draw: st.DrawFn) -> tuple[PackedMicroBatch, list[int], Layout, list[list[oracle.Cell]]]:
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    batch = random_batch(np.random.default_rng(draw(st.integers(0, 1 << 32))), lengths)
    width = max(lengths) + draw(st.integers(0, 4))
    kind = draw(st.sampled_from(["left", "right", "prompt"]))
    if kind == "left":
        return batch, lengths, LeftPadded(width=width), oracle.left(lengths, width)
    if kind == "right":
        return batch, lengths, RightPadded(width=width), oracle.right(lengths, width)
    prompts = [draw(st.integers(0, n)) for n in lengths]
    prompt_width = max(prompts) + draw(st.integers(0, 3))
    completion_width = max(n - p for n, p in zip(lengths, prompts, strict=True)) + draw(st.integers(0, 3))
    layout = PromptCompletion(prompt_lengths=tuple(prompts), prompt_width=prompt_width, completion_width=completion_width)
    return batch, lengths, layout, oracle.prompt_completion(lengths, prompts, prompt_width, completion_width)


def split(tensor: torch.Tensor, lengths: Sequence[int]) -> list[NDArray[Any]]:
    """One array per sequence, as bits where numpy has no such dtype."""
    plain = (
        tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    )
    return np.split(plain.numpy(), np.cumsum(lengths)[:-1])


@settings(max_examples=120, deadline=None)
@given(cases())
@pytest.mark.payload("A17", "D8")
def test_a_rectangle_holds_what_stands_at_each_of_its_cells_and_goes_back_byte_for_byte(
    case: tuple[PackedMicroBatch, list[int], Layout, list[list[oracle.Cell]]],
) -> None:
    batch, lengths, layout, where = case
    got = padded(batch, layout, cells=cells())
    pad = np.asarray([[cell is None for cell in row] for row in where], np.bool_).reshape(len(where), -1)
    assert got.attention_mask.tolist() == (~pad).tolist()
    for name, fill in zip(TOKEN_LEVEL, (7, 0, 0, 0, 0, 1, 1), strict=True):
        expected = oracle.laid(split(getattr(batch, name), lengths), where, fill)
        assert raw(getattr(got, name)) == expected.tobytes(), name
    assert (got.labels is None) == (batch.labels is None)
    if batch.labels is not None and got.labels is not None:
        assert raw(got.labels) == oracle.laid(split(batch.labels, lengths), where, -100).tobytes()
    for name, data in batch.fields.items():
        laid = got.fields[name]
        assert laid.valid.tolist() == oracle.laid(split(data.valid, lengths), where, False).tolist()
        if isinstance(data, RaggedTensor):
            assert isinstance(laid, RaggedTensor)
            counts = split(data.counts, lengths)
            assert raw(laid.counts) == oracle.laid(counts, where, 0).tobytes()
            assert raw(laid.row_columns["flags"]) == oracle.laid(split(data.row_columns["flags"], lengths), where, 0).tobytes()
            for column, values in data.columns.items():
                expected = oracle.laid_values(counts, split(values, [int(c.sum()) for c in counts]), where)
                assert raw(laid.columns[column]) == expected.tobytes()
            continue
        assert isinstance(laid, DenseTensor)
        expected = oracle.laid(split(data.rows, lengths), where, 0)
        if name == "routed_experts":
            expected[pad] = balanced_rows(range(int(pad.sum())), step=12, layer_ids=[0, 2, 5], top_k=2, expert_count=EXPERTS, shards=SHARDS)
        assert raw(laid.rows) == expected.tobytes(), name
        assert laid.layer_ids == data.layer_ids
    assert got.missing("score").tolist() == (~got.fields["score"].valid & ~got.padding).tolist()
    same(got.packed(), batch)


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.payload("D4", "D10")
def test_packed_rows_with_padding_hold_every_token_and_go_back_byte_for_byte(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    batch = random_batch(np.random.default_rng(data.draw(st.integers(0, 1 << 32))), lengths)
    bounds = [0, *accumulate(lengths)]
    step = packed(bounds, padded_bounds(bounds, multiple=data.draw(st.integers(1, 4))))
    rows = padded_to(step, multiple=data.draw(st.sampled_from([1, 5, 64])), first_slot=padding_count(step))
    got = arranged(batch, rows, cells=cells())
    assert got.token_count == rows.row_count
    assert got.cu_seqlens.tolist() == rows.cu_seqlens().tolist()
    assert got.cu_seqlens.dtype == torch.int32
    assert got.padding[torch.from_numpy(rows.padding())].all()
    assert not got.loss_mask[torch.from_numpy(rows.padding())].any()
    same(in_order(got, rows), batch)


def test_the_results_share_no_memory_with_what_they_were_made_of_and_may_be_written() -> None:
    batch = random_batch(np.random.default_rng(0), [3, 5])
    before = random_batch(np.random.default_rng(0), [3, 5])
    got = padded(batch, RightPadded(width=6), cells=cells())
    for name in TOKEN_LEVEL:
        getattr(got, name).zero_()
    for data in got.fields.values():
        data.valid.zero_()
        if isinstance(data, DenseTensor):
            data.rows.view(torch.uint8).zero_()
        else:
            for tensor in (data.counts, *data.columns.values(), *data.row_columns.values()):
                tensor.zero_()
    same(batch, before)


def test_a_rectangle_of_no_sequences_or_of_empty_ones_is_empty() -> None:
    nothing = padded(random_batch(np.random.default_rng(0), []), LeftPadded(width=4), cells=cells())
    assert nothing.token_ids.shape == (0, 4)
    empty = padded(random_batch(np.random.default_rng(0), [0, 0]), LeftPadded(width=2), cells=cells())
    assert empty.token_ids.tolist() == [[7, 7], [7, 7]]
    assert empty.fields["routed_experts"].valid.tolist() == [[False] * 2] * 2
    assert empty.packed().token_count == 0


def test_what_does_not_fit_a_layout_is_refused_with_the_numbers() -> None:
    batch = random_batch(np.random.default_rng(0), [3, 5])
    with pytest.raises(PayloadError, match="sequence 1 has 5 tokens, which do not fit a width of 4"):
        padded(batch, LeftPadded(width=4), cells=cells())
    with pytest.raises(PayloadError, match="1 prompt lengths for 2 sequences"):
        padded(batch, PromptCompletion(prompt_lengths=(1,), prompt_width=4, completion_width=4), cells=cells())
    with pytest.raises(PayloadError, match="do not fit 4 \\+ 3"):
        padded(batch, PromptCompletion(prompt_lengths=(1, 1), prompt_width=4, completion_width=3), cells=cells())
    with pytest.raises(PayloadError, match="sequence 0: 4 \\+ -1 tokens"):
        padded(batch, PromptCompletion(prompt_lengths=(4, 1), prompt_width=4, completion_width=4), cells=cells())
    with pytest.raises(ConfigError, match="16 experts do not divide by 3"):
        padded(batch, LeftPadded(width=6), cells=cells(expert_shards=3))
    with pytest.raises(ConfigError, match="data rank 2 of 2"):
        cells(data_rank=2, data_ranks=2)
    with pytest.raises(PayloadError, match=r"rows of sequences of \[4, 4\] tokens asked of a batch of \[3, 5\]"):
        arranged(batch, packed([0, 4, 8], [0, 4, 8]), cells=cells())
    half = rank_rows(
        packed([0, 3, 8], [0, 4, 12]), ContextLayout.ZIGZAG, context_rank=0, context_ranks=2, tensor_rank=0, tensor_ranks=1, multiple=1,
        first_slot=4,
    )  # fmt: skip
    with pytest.raises(PayloadError, match="a part of a micro batch"):
        in_order(arranged(batch, half, cells=cells()), half)


@pytest.mark.payload("D6", "D9")
@pytest.mark.parametrize(
    ("experts", "top_k", "form"), [(512, 22, torch.int32), (256, 8, torch.uint8), (512, 22, torch.uint8), (128, 8, torch.int64)]
)
def test_padding_cells_are_distinct_in_a_row_and_balanced_over_experts_and_shards(experts: int, top_k: int, form: torch.dtype) -> None:
    """uint8 above 256 experts: the two bytes of each id."""
    lengths, width = [1, 30, 17], 40
    ids = np.full((48, 2, top_k), experts - 1, np.uint16 if form == torch.uint8 and experts > 256 else np.int64)
    rows = torch.from_numpy(ids.view(np.uint8)) if ids.dtype == np.uint16 else torch.from_numpy(ids).to(form)
    batch = pack_tokens(sequences(np.random.default_rng(0), lengths))
    data = DenseTensor(rows, torch.ones(48, dtype=torch.bool), (3, 9), experts)
    batch = PackedMicroBatch(**{**vars(batch), "fields": {"routed_experts": data}})

    def ids_of(got: PaddedMicroBatch) -> NDArray[Any]:
        laid = got.fields["routed_experts"]
        assert isinstance(laid, DenseTensor)
        assert laid.rows.dtype == form
        cells_PLK = laid.rows[~got.attention_mask].numpy()
        return cells_PLK.view(np.uint16) if laid.id_bytes == 2 else cells_PLK

    got = ids_of(padded(batch, LeftPadded(width=width), cells=cells(expert_shards=8)))
    assert got.shape == (3 * width - 48, 2, top_k)
    for layer in range(2):
        assert all(len(set(row)) == top_k for row in got[:, layer].tolist())
        for size in (1, experts // 8):
            loads = np.bincount(got[:, layer].ravel() // size, minlength=experts // size)
            assert loads.max() - loads.min() <= 1
    again = padded(batch, LeftPadded(width=width), cells=cells(expert_shards=8))
    assert np.array_equal(got, ids_of(again))
    rank = padded(batch, LeftPadded(width=width), cells=cells(expert_shards=8, step=6, data_rank=0, data_ranks=2))
    assert np.array_equal(got, ids_of(rank)), "numbered by step * ranks + rank, and by nothing else"
    other = padded(batch, LeftPadded(width=width), cells=cells(expert_shards=8, data_rank=1, data_ranks=2))
    assert not np.array_equal(got, ids_of(other))


@pytest.mark.payload("D6")
def test_the_padding_of_a_steps_micro_batches_is_balanced_as_a_whole_by_their_first_slots() -> None:
    ids, first = [], 0
    for n in range(5):
        batch = random_batch(np.random.default_rng(n), [2, 3])
        got = padded(batch, RightPadded(width=4 + n), cells=cells(first_slot=first))
        data = got.fields["routed_experts"]
        assert isinstance(data, DenseTensor)
        ids.append(data.rows[~got.attention_mask][:, 0].numpy())
        first += int((~got.attention_mask).sum())
    loads = np.bincount(np.concatenate(ids).ravel(), minlength=EXPERTS)
    assert loads.max() - loads.min() <= 1


@dataclass
class Stage:
    schema: Schema
    reader: Reader
    micro_batch: MicroBatch
    arrays: list[tuple[Payload | None, int]]
    """Per sequence what a message would have carried, and the tokens of it that are kept."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    run_schema, rng = schema(layers=4), np.random.default_rng(3)
    with open_root(str(tmp_path_factory.mktemp("root")), run="run", create=True) as store, Reader(store, run_schema) as reader:
        writer = Writer(store, run_schema, Numbers(), durability="process")
        whole = payload(rng, run_schema, 2100, missing={f.name: [TokenRange(0, 1), TokenRange(2099, 2100)] for f in run_schema.fields})
        short, dummy = payload(rng, run_schema, 9), payload(rng, run_schema, 6)
        arrays: list[tuple[Payload | None, int]] = [(whole, 2100), (None, 0), (short, 7), (dummy, 6)]
        bare = sequences(rng, [2100, 4, 9, 6], dummies=[3])
        refs = [None if p is None else writer.put(p).truncated(kept) for p, kept in arrays]
        micro_batch = MicroBatch(
            tuple(
                SampleSequence(**{**{n: getattr(s, n) for n in s.__struct_fields__}, "ref": r})
                for s, r in zip(bare.sequences, refs, strict=True)
            )
        )
        yield Stage(run_schema, reader, micro_batch, arrays)


def assembled(stage: Stage, *, expert_ids: ExpertIds = "int32") -> PackedMicroBatch:
    """The whole micro batch, packed without padding."""
    sequences = stage.micro_batch.sequences
    bounds = [0, *accumulate(s.token_count for s in sequences)]
    got = read_slice(
        stage.reader, sources_of(sequences, stage.schema), stage.schema, rows=packed(bounds, bounds),
        fields=[f.name for f in stage.schema.fields], layers=None, step=0, expert_shards=1,
    )  # fmt: skip
    return rank_batch(stage.micro_batch, got, stage.schema, expert_ids=expert_ids, bytes_read=11)


def inline(stage: Stage, name: str) -> tuple[list[NDArray[Any]], dict[str, list[NDArray[Any]]]]:
    """Rows or counts per sequence, and values per column, as a message would have carried them."""
    spec = stage.schema.field(name)
    rows, columns = [], {c.name: [] for c in spec.columns}  # type: ignore[var-annotated]
    for (arrays, kept), sequence in zip(stage.arrays, stage.micro_batch.sequences, strict=True):
        count = sequence.token_count
        if arrays is None or (sequence.padding and not spec.expert_count):
            got: NDArray[Any] = np.zeros((count, *(() if spec.ragged else spec.row_shape)), np.int32 if spec.ragged else spec.dtype)
            values = {c.name: np.zeros(0, c.dtype) for c in spec.columns}
        else:
            got, values = cut(arrays.fields[name], 0, kept)
            extra = np.zeros(count - kept, np.int32) if spec.ragged else np.repeat(got[-1:], count - kept, 0)
            got = np.concatenate([got, extra])
        rows.append(got)
        for n, v in values.items():
            columns[n].append(v)
    return rows, columns


@pytest.mark.payload("A17")
@pytest.mark.parametrize(
    ("layout", "where"),
    [
        (LeftPadded(width=2104), oracle.left([2100, 4, 9, 6], 2104)),
        (RightPadded(width=2100), oracle.right([2100, 4, 9, 6], 2100)),
        (
            PromptCompletion(prompt_lengths=(1000, 4, 0, 3), prompt_width=1001, completion_width=1101),
            oracle.prompt_completion([2100, 4, 9, 6], [1000, 4, 0, 3], 1001, 1101),
        ),
    ],
    ids=lambda x: type(x).__name__,
)
def test_each_layout_of_stored_arrays_equals_slicing_the_inline_ones(stage: Stage, layout: Layout, where: list[list[oracle.Cell]]) -> None:
    batch = assembled(stage)
    got = padded(batch, layout, cells=cells())
    pad = ~got.attention_mask.numpy()
    for spec in stage.schema.fields:
        rows, columns = inline(stage, spec.name)
        data = got.fields[spec.name]
        expected = oracle.laid(rows, where, 0)
        if isinstance(data, RaggedTensor):
            assert raw(data.counts) == expected.tobytes()
            for name, values in columns.items():
                assert raw(data.columns[name]) == oracle.laid_values(rows, values, where).tobytes()
            continue
        wide = expected.astype(np.int32) if expected.dtype.kind == "u" else expected
        if spec.expert_count:
            wide[pad] = data.rows.numpy()[pad]
        assert raw(data.rows) == wide.tobytes(), spec.name
    same(got.packed(), batch)


@pytest.mark.payload("B5", "D1", "D2", "D3")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["int32", "int64", "uint8", "bytes"])
def test_a_ranks_tensors_equal_its_rows_of_the_whole_micro_batch(stage: Stage, layout: str, form: ExpertIds) -> None:
    lengths = [s.token_count for s in stage.micro_batch.sequences]
    rooms = [room_of(n, layout, 2, 0) for n in lengths]
    step = packed([0, *accumulate(lengths)], [0, *accumulate(rooms)])
    whole = assembled(stage, expert_ids=form)
    for rank in range(2):
        rows = rank_rows(
            step, ContextLayout(layout), context_rank=rank, context_ranks=2, tensor_rank=0, tensor_ranks=1, multiple=8,
            first_slot=padding_count(step),
        )  # fmt: skip
        got = read_slice(
            stage.reader, sources_of(stage.micro_batch.sequences, stage.schema), stage.schema, rows=rows,
            fields=[f.name for f in stage.schema.fields], layers=None, step=12, expert_shards=SHARDS,
        )  # fmt: skip
        mine = rank_batch(stage.micro_batch, got, stage.schema, token_id=7, expert_ids=form, bytes_read=whole.bytes_read)
        same(mine, arranged(whole, rows, cells=cells()))
        routed = mine.fields["routed_experts"]
        assert isinstance(routed, DenseTensor)
        assert routed.rows.dtype == {"int32": torch.int32, "int64": torch.int64}.get(form, torch.uint8)


def test_a_slice_of_other_sequences_is_refused(stage: Stage) -> None:
    rows = packed([0, 9], [0, 9])
    got = read_slice(
        stage.reader, [Source(stage.micro_batch.sequences[2].ref, ("routed_experts",))], stage.schema, rows=rows, fields=["routed_experts"],
        layers=None, step=0, expert_shards=1,
    )  # fmt: skip
    with pytest.raises(PayloadError, match="rows of sequences of"):
        rank_batch(stage.micro_batch, got, stage.schema, token_id=0, expert_ids="int32")
