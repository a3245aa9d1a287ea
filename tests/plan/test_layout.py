"""The order of chunks, and plans against a brute-force reading of the same rule."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsref.objects import encode
from fsref.objects.zipfile import END_BYTES, read_directory, read_end
from fsref.plan import Layout, chunk_tokens, decode_index, plan_read
from fsref.refs import Codec, Segment, TokenRange
from fsref.writer import reference
from tests.support.payloads import INC, payload, schema


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(0, 1), (1, 1), (2047, 2047), (2048, 2048), (2049, 2048), (32_768, 2048), (32_769, 4096), (131_072, 8192), (131_073, 16_384)],
)
def test_chunk_tokens_follow_the_rule(tokens: int, expected: int) -> None:
    assert chunk_tokens(tokens) == expected


def test_a_flat_chunk_stands_with_the_range_that_holds_its_first_value() -> None:
    run_schema = schema()
    sums = {"sampling_mask": [20, 20, 24]}
    layout = Layout(run_schema, ("sampling_mask",), 6000, sums)
    assert layout.range_count == 3
    placed = [(c.name, c.range_index) for c in layout.chunks if layout.arrays[c.array].column == "ids"]
    assert placed == [("sampling_mask/ids/c/0", 0), ("sampling_mask/ids/c/1", 0), ("sampling_mask/ids/c/2", 0)]
    last = Layout(run_schema, ("sampling_mask",), 6000, {"sampling_mask": [4, 4, 24]})
    assert [c.range_index for c in last.chunks if last.arrays[c.array].column == "ids"] == [0, 2, 2]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 7000), st.integers(0, 2**32 - 1), st.sampled_from(["lz4", "none"]), st.integers(0, 4))
def test_the_index_gives_the_offsets_that_the_file_has(tokens: int, seed: int, codec: str, layers_per_chunk: int) -> None:
    run_schema = schema(layers=4, codec=Codec(name=codec), layers_per_chunk=layers_per_chunk)  # type: ignore[arg-type]
    encoded = encode(payload(np.random.default_rng(seed), run_schema, tokens).checked(run_schema), run_schema)
    data = b"".join(bytes(memoryview(b).cast("B")) for b in encoded.buffers)
    assert len(data) == encoded.byte_count
    offset, size, count = read_end(data[-END_BYTES:], len(data))
    entries = {e.name: e for e in read_directory(data[offset : offset + size], entries=count, offset=offset)}
    layout, sizes, starts = decode_index(Segment(f"{INC}/0", len(data), 0, tokens, 0, encoded.index), run_schema)
    for chunk, stored, start in zip(layout.chunks, sizes, starts, strict=True):
        assert (entries[chunk.name].offset, entries[chunk.name].size) == (start, stored)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_plan_touches_exactly_the_chunks_of_the_touched_ranges(data: st.DataObject) -> None:
    run_schema = schema(layers=4, layers_per_chunk=2)
    tokens = data.draw(st.integers(1, 7000))
    start = data.draw(st.integers(0, tokens - 1))
    stop = data.draw(st.integers(start + 1, tokens))
    layer = data.draw(st.integers(0, 3))
    encoded = encode(payload(np.random.default_rng(tokens), run_schema, tokens).checked(run_schema), run_schema)
    ref = reference(f"{INC}/0", encoded, run_schema)
    plan = plan_read(
        ref, run_schema, tokens=TokenRange(start, stop), fields=["routed_experts", "spans"], layers=[layer],
        request_bytes_max=1 << 20, gap_bytes_max=0,
    )  # fmt: skip
    layout, _, _ = decode_index(ref.segments[0], run_schema)
    step = layout.range_tokens
    first, last = start // step, (stop - 1) // step
    sums = [0, *layout.value_sums["spans"]]
    expected = set()
    for chunk in layout.chunks:
        array = layout.arrays[chunk.array]
        touched = first <= chunk.range_index <= last
        if array.path == "routed_experts":
            wanted = touched and chunk.layer == layer // 2 * 2
        elif array.field.name != "spans":
            wanted = False
        else:
            wanted = touched if array.column == "counts" else chunk.start < sums[last + 1] and chunk.stop > sums[first]
        if wanted:
            expected.add((array.column, chunk.start, chunk.layer))
    got = [(c.column, c.start, c.layer) for s in plan.segments for r in s.requests for c in r.chunks]
    assert sorted(got) == sorted(expected)
    assert plan.byte_count == sum(c.size for s in plan.segments for r in s.requests for c in r.chunks)
