"""Fields as tensors: ragged rows of one width, dtypes that collectives carry, ids that fit, and what is real."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fsref.errors import ConfigError, PayloadError
from fsref.refs import MASK_FULL, MASK_TRUNCATED, Alignment, Field, Schema, routed_experts, sampling_mask
from fsref.tensors import DenseTensor, RaggedTensor
from fsref.tensors.dtypes import check_carried, dense_tensor, plain_tensor, slice_dtype

INF = float("inf")


def ragged(rows: list[list[tuple[int, float]]], *, flags: list[int] | None = None, valid: list[bool] | None = None) -> RaggedTensor:
    flat = [v for row in rows for v in row]
    columns = {"ids": torch.tensor([v[0] for v in flat], dtype=torch.int32), "logprobs": torch.tensor([v[1] for v in flat])}
    marks = {} if flags is None else {"flags": torch.tensor(flags, dtype=torch.uint8)}
    real = torch.tensor(valid if valid is not None else [True] * len(rows), dtype=torch.bool)
    return RaggedTensor(torch.tensor([len(r) for r in rows], dtype=torch.int32), columns, real, marks)


VALUE = st.tuples(st.integers(0, 5), st.floats(-9, 0, width=32))


@settings(max_examples=120, deadline=None)
@given(st.lists(st.lists(VALUE, max_size=6), max_size=8), st.integers(1, 7), st.data())
@pytest.mark.payload("E7")
def test_rows_of_one_width_hold_the_first_values_the_fill_and_the_sampled_one(
    rows: list[list[tuple[int, float]]], width: int, data: st.DataObject
) -> None:
    sampled = data.draw(st.lists(st.integers(0, 5), min_size=len(rows), max_size=len(rows)))
    keep = data.draw(st.booleans())
    got = ragged(rows).densified(width=width, truncate=True, sampled=torch.tensor(sampled, dtype=torch.int64) if keep else None)
    for t, row in enumerate(rows):
        wanted = row[:width]
        places = [n for n, v in enumerate(row) if v[0] == sampled[t]]
        if keep and places and places[0] >= width:
            wanted[-1] = row[places[0]]
        tail = width - len(wanted)
        assert got.columns["ids"][t].tolist() == [v[0] for v in wanted] + [-1] * tail
        assert got.columns["logprobs"][t].tolist() == [v[1] for v in wanted] + [-INF] * tail
        assert got.inside[t].tolist() == [True] * len(wanted) + [False] * tail
        assert (int(got.counts[t]), bool(got.truncated[t])) == (len(wanted), len(row) > width)
    assert got.values_cut == sum(max(0, len(row) - width) for row in rows)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(VALUE, max_size=6), max_size=8), st.integers(0, 3))
@pytest.mark.payload("E7")
def test_a_field_goes_to_one_width_and_back_byte_for_byte(rows: list[list[tuple[int, float]]], room: int) -> None:
    data = ragged(rows, flags=[n % 4 for n in range(len(rows))])
    back = data.densified(width=max([1, *map(len, rows)]) + room, flags="flags").ragged()
    assert back.counts.tolist() == data.counts.tolist()
    assert {n: c.numpy().tobytes() for n, c in back.columns.items()} == {n: c.numpy().tobytes() for n, c in data.columns.items()}
    assert back.row_columns["flags"].tolist() == data.row_columns["flags"].tolist()
    assert back.offsets.tolist() == data.offsets.tolist() == [0, *np.cumsum([len(r) for r in rows]).tolist()]


@pytest.mark.payload("E7")
def test_a_row_that_is_too_wide_is_an_error_unless_it_may_be_cut_and_then_it_is_marked_and_counted() -> None:
    data = ragged([[(1, -1.0)], [(2, -2.0), (3, -3.0), (4, -4.0)], []], flags=[MASK_TRUNCATED, 0, MASK_FULL], valid=[True, True, False])
    with pytest.raises(PayloadError, match="row 1 has 3 values, which do not fit a width of 2: widen it, or pass truncate=True"):
        data.densified(width=2)
    got = data.densified(width=2, truncate=True, flags="flags", fill={"ids": 0, "logprobs": 0})
    assert got.columns["ids"].tolist() == [[1, 0], [2, 3], [0, 0]]
    assert (got.counts.tolist(), got.values_cut) == ([1, 2, 0], 1)
    assert got.truncated.tolist() == [True, True, False], "the engine's own cut counts too"
    assert got.row_columns["flags"].tolist() == [MASK_TRUNCATED, MASK_TRUNCATED, MASK_FULL]
    assert got.valid.tolist() == [True, True, False]
    assert data.row_columns["flags"].tolist() == [MASK_TRUNCATED, 0, MASK_FULL], "what it was made of stays"
    assert data.densified(width=2, truncate=True).truncated.tolist() == [False, True, False]


def test_the_last_slot_is_for_a_sampled_token_that_would_be_cut_and_slot_0_stays() -> None:
    head = ragged([[(9, -0.1), (8, -0.2), (7, -0.3), (7, -0.4)], [(9, -0.1), (8, -0.2), (7, -0.3)]])
    got = head.densified(width=2, truncate=True, sampled=torch.tensor([7, 8]))
    assert got.columns["ids"].tolist() == [[9, 7], [9, 8]]
    assert got.columns["logprobs"].tolist() == torch.tensor([[-0.1, -0.3], [-0.1, -0.2]]).tolist()
    only = ragged([[(9, -0.1), (7, -0.3)]]).densified(width=1, truncate=True, sampled=torch.tensor([7]))
    assert only.columns["ids"].tolist() == [[7]]


def test_cells_of_a_rectangle_are_densified_too() -> None:
    flat = ragged([[(1, -1.0)], [], [(2, -2.0), (3, -3.0)], []])
    data = RaggedTensor(flat.counts.reshape(2, 2), flat.columns, flat.valid.reshape(2, 2))
    got = data.densified(width=2)
    assert got.columns["ids"].tolist() == [[[1, -1], [-1, -1]], [[2, 3], [-1, -1]]]
    assert got.counts.shape == got.truncated.shape == (2, 2)
    assert got.ragged().columns["ids"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"width": 0}, "cannot be 0 values wide"),
        ({"width": 3, "flags": "marks"}, r"flags 'marks' named, the row columns are \['flags'\]"),
        ({"width": 3, "fill": {"ids": 1 << 40}}, "column 'ids' is int32 and cannot hold the fill"),
        ({"width": 3, "fill": {"ids": 0.5}}, "cannot hold the fill 0.5"),
        ({"width": 3, "fill": {"ids": -INF}}, "cannot hold the fill -inf"),
    ],
)
def test_what_a_width_cannot_mean_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        ragged([[(1, -1.0)]], flags=[0]).densified(**asked)


def test_sampled_ids_are_kept_by_the_column_of_ids_only() -> None:
    data = RaggedTensor(torch.tensor([2], dtype=torch.int32), {"left": torch.tensor([1, 2])}, torch.tensor([True]))
    with pytest.raises(PayloadError, match=r"the columns are \['left'\]"):
        data.densified(width=1, truncate=True, sampled=torch.tensor([2]))


@pytest.mark.payload("B5")
@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.uint32, torch.uint64])
def test_no_field_holds_a_dtype_that_collectives_cannot_carry(dtype: torch.dtype) -> None:
    rows, valid = torch.zeros(2, 3, dtype=dtype), torch.ones(2, dtype=torch.bool)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(PayloadError, match=f"is {name}, which no collective carries: make it int32, int64 or uint8"):
        DenseTensor(rows, valid)
    with pytest.raises(PayloadError, match=f"column 'ids' is {name}"):
        RaggedTensor(torch.zeros(2, dtype=torch.int32), {"ids": rows[0][:0]}, valid)
    with pytest.raises(PayloadError, match=f"routes is {name}"):
        check_carried(rows, what="routes")


@pytest.mark.payload("B5")
def test_collectives_carry_what_fields_hold_and_not_what_they_refuse(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.bfloat16, torch.float32):
            check_carried(torch.zeros(2, dtype=dtype), what="it")
            dist.broadcast(torch.zeros(2, dtype=dtype), 0)
        for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
            with pytest.raises(RuntimeError, match="Invalid scalar type"):
                dist.broadcast(torch.zeros(2, dtype=dtype), 0)
    finally:
        dist.destroy_process_group()


@pytest.mark.payload("B2", "B5")
@pytest.mark.parametrize("form", ["int32", "int64", "uint8", "bytes"])
@pytest.mark.parametrize("experts", [256, 512])
def test_expert_ids_come_in_the_form_asked_for_or_not_at_all(form: Any, experts: int) -> None:
    spec = routed_experts(layer_ids=[0, 1], top_k=2, expert_count=experts)
    ids = np.asarray([[[0, 255], [experts - 1, 7]]]).astype(spec.dtype)
    if form == "uint8" and experts > 256:
        with pytest.raises(ConfigError, match="ids of 512 experts do not fit uint8: ask for int32, int64 or bytes"):
            slice_dtype(Schema((spec, sampling_mask())), form)
        with pytest.raises(ConfigError, match="do not fit uint8"):
            dense_tensor(ids, spec, form)
        return
    assert slice_dtype(Schema((spec, sampling_mask())), form) == {"int32": "int32", "int64": "int64"}.get(form, "stored")
    got = dense_tensor(ids, spec, form)
    values = got.numpy().view(spec.dtype) if form == "bytes" else got.numpy()
    assert values.tolist() == ids.tolist()
    assert got.dtype == {"int32": torch.int32, "int64": torch.int64}.get(form, torch.uint8)


@pytest.mark.payload("B2")
def test_no_id_is_narrowed_before_it_was_looked_at() -> None:
    valid = torch.ones(1, dtype=torch.bool)
    wide = DenseTensor(torch.tensor([[3, 300]]), valid, expert_count=512)
    assert wide.as_ids("int32").rows.dtype == torch.int32
    assert wide.as_ids("int64") is wide
    with pytest.raises(PayloadError, match=r"expert ids: values 3..300 do not fit uint8 \(0..255\)"):
        wide.as_ids("uint8")
    spec = routed_experts(layer_ids=[0], top_k=2, expert_count=200)
    with pytest.raises(PayloadError, match=r"values 3..300 do not fit uint8"):
        dense_tensor(np.asarray([[[3, 300]]]), spec, "uint8")
    with pytest.raises(PayloadError, match=r"do not fit int64"):
        plain_tensor(np.asarray([1 << 63], np.uint64), what="field 'x'")
    assert plain_tensor(np.asarray([(1 << 63) - 1], np.uint64), what="x").tolist() == [(1 << 63) - 1]
    assert plain_tensor(np.asarray([65535], np.uint16), what="x").dtype == torch.int32
    with pytest.raises(ConfigError, match="'int16' asked for; known are int32, int64, uint8, bytes"):
        slice_dtype(Schema((spec,)), "int16")  # type: ignore[arg-type]


@pytest.mark.payload("B6")
def test_a_sentinel_needs_a_signed_dtype_that_holds_whole_ids() -> None:
    valid = torch.tensor([True, False])
    narrow = DenseTensor(torch.tensor([[1, 255], [3, 4]], dtype=torch.uint8), valid, expert_count=256)
    assert narrow.with_sentinel().tolist() == [[1, 255], [-1, -1]]
    assert narrow.with_sentinel().dtype == torch.int32
    halves = DenseTensor(torch.zeros(2, 4, dtype=torch.uint8), valid, expert_count=512)
    assert halves.id_bytes == 2
    for wrong in (halves.with_sentinel, lambda: halves.as_ids("int32")):
        with pytest.raises(PayloadError, match="the bytes of 16-bit ids"):
            wrong()


def test_rows_and_their_marks_stand_in_the_same_cells() -> None:
    with pytest.raises(PayloadError, match=r"rows of shape \(3, 2\) do not stand in cells of shape \(2,\)"):
        DenseTensor(torch.zeros(3, 2), torch.ones(2, dtype=torch.bool))


def test_a_read_only_array_becomes_a_tensor_that_may_be_written() -> None:
    rows = np.ones((2, 3), np.float32)
    rows.flags.writeable = False
    spec = Field(name="score", alignment=Alignment.INPUT, dtype="float32", row_shape=(3,))
    got = dense_tensor(rows, spec)
    got.zero_()
    assert rows.all()
    own = np.ones((2, 3), np.float32)
    dense_tensor(own, spec).zero_()
    assert not own.any(), "one that may be written is not copied"
