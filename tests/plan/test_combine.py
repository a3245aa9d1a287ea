"""Rewrites of plans: what they read is what their parts read, each chunk once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsref.errors import PayloadError
from fsref.objects import encode
from fsref.plan import combined, decode_index, plan_read, repeated, shifted
from fsref.refs import Codec, PayloadRef, Schema, TokenRange
from fsref.writer import reference
from tests.support.payloads import INC, payload, schema

SCHEMA = schema(layers=6, layers_per_chunk=2, codec=Codec(name="none"))


def stored(tokens: int, run_schema: Schema = SCHEMA, seq: int = 0) -> PayloadRef:
    encoded = encode(payload(np.random.default_rng(tokens), run_schema, tokens).checked(run_schema), run_schema)
    return reference(f"{INC}/{seq}", encoded, run_schema)


@settings(max_examples=25, deadline=None)
@given(st.data())
@pytest.mark.payload("D1", "C3")
def test_a_combined_plan_fetches_every_chunk_of_a_touched_range_once(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 9000))
    ref = stored(tokens)
    cuts = sorted(data.draw(st.lists(st.integers(0, tokens), min_size=2, max_size=8)))
    ranges = [TokenRange(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False) if a < b]
    layers = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True))
    most = data.draw(st.sampled_from([1, 1 << 14, 1 << 30]))
    fields = ["routed_experts", "indexer_picks"]
    plans, row = [], 0
    for r in ranges:
        plan = plan_read(ref, SCHEMA, tokens=r, fields=fields, layers=layers, request_bytes_max=most, gap_bytes_max=0)
        plans.append(shifted(plan, row))
        row += len(r)
    whole = combined(plans, row_count=row, request_bytes_max=most, gap_bytes_max=0)
    layout, sizes, _ = decode_index(ref.segments[0], SCHEMA)
    touched = {t // layout.range_tokens for r in ranges for t in (*range(r.start, r.stop, layout.range_tokens), r.stop - 1)}
    needed = sum(
        size
        for chunk, size in zip(layout.chunks, sizes, strict=True)
        if layout.arrays[chunk.array].field.name in fields
        and chunk.range_index in touched
        and (layout.arrays[chunk.array].field.name == "indexer_picks" or any(chunk.layer <= n < chunk.layer + 2 for n in layers))
    )
    assert whole.byte_count == needed
    assert whole.tokens == TokenRange(0, row)
    held = [(read.out_start, read.rows.start, len(read.rows)) for _, _, read in whole.reads("routed_experts")]
    places = [0, *np.cumsum([len(r) for r in ranges]).tolist()]
    assert held == [(at, r.start, len(r)) for at, r in zip(places, ranges, strict=False)]


def test_two_halves_of_one_chunk_are_one_request_of_it() -> None:
    ref = stored(1000)
    limits = {"request_bytes_max": 16, "gap_bytes_max": 0}
    half = [
        plan_read(ref, SCHEMA, tokens=TokenRange(a, a + 250), fields=["routed_experts"], layers=[4], **limits) for a in (0, 750)
    ]  # fmt: skip
    both = combined([half[0], shifted(half[1], 250)], row_count=500, **limits)
    assert half[0].byte_count == half[1].byte_count == both.byte_count, "larger than a request may be, and still fetched once"
    assert both.request_count == 1
    assert len(both.segments[0].requests[0].chunks) == 2


def test_one_object_in_two_sequences_is_read_once_and_two_objects_apart() -> None:
    refs = [stored(50), stored(50, seq=1)]
    limits = {"request_bytes_max": 1 << 20, "gap_bytes_max": 0}
    plans = [
        shifted(plan_read(ref, SCHEMA, tokens=TokenRange(0, 50), fields=["spans"], layers=None, **limits), 50 * n)
        for n, ref in enumerate([refs[0], refs[1], refs[0]])
    ]
    whole = combined(plans, row_count=150, **limits)
    assert [s.object_id for s in whole.segments] == [f"{INC}/0", f"{INC}/1"]
    assert whole.byte_count == plans[0].byte_count + plans[1].byte_count
    reads = [read for _, _, read in whole.reads("spans")]
    assert [r.out_start for r in reads] == [0, 50, 100]
    assert [r.value_base for r in reads] == [0, reads[0].values_max, reads[0].values_max + reads[1].values_max]


def test_only_one_tokens_dense_rows_can_be_repeated() -> None:
    ref = stored(10)
    one = plan_read(
        ref, SCHEMA, tokens=TokenRange(9, 10), fields=["indexer_picks"], layers=None, request_bytes_max=1 << 20, gap_bytes_max=0
    )
    assert [read.copies for _, _, read in repeated(one, 7).reads("indexer_picks")] == [7]
    for tokens, field in ((TokenRange(8, 10), "indexer_picks"), (TokenRange(9, 10), "spans")):
        plan = plan_read(ref, SCHEMA, tokens=tokens, fields=[field], layers=None, request_bytes_max=1 << 20, gap_bytes_max=0)
        with pytest.raises(PayloadError, match="only one token's dense rows can"):
            repeated(plan, 2)


def test_no_layers_read_nothing_of_a_field_that_has_layers() -> None:
    plan = plan_read(
        stored(10), SCHEMA, tokens=TokenRange(0, 10), fields=["routed_experts", "indexer_picks"], layers=[],
        request_bytes_max=1 << 20, gap_bytes_max=0,
    )  # fmt: skip
    assert [r.field.name for s in plan.segments for r in s.fields] == ["indexer_picks"]
