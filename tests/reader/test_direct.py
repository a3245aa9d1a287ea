"""Chunks of codec none are read straight to their places: the same rows, damage is noticed, and what does not fit goes the other way."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsref.errors import ObjectCorrupt
from fsref.reader import Reader, allocate
from fsref.refs import Codec, Dense, PayloadRef, Ragged, Schema, TokenRange, object_name
from fsref.store import Store, open_root
from fsref.writer import Receipts, Writer
from tests.support.payloads import payload, schema

TOKENS = 5000


@pytest.fixture
def world(tmp_path: Path) -> Any:
    run_schema = schema(codec=Codec(name="none"))
    arrays = payload(np.random.default_rng(7), run_schema, TOKENS).checked(run_schema)
    with open_root(str(tmp_path), run="run", create=True) as store:
        yield store, run_schema, arrays, Writer(store, run_schema, Receipts("d")).put(arrays)


def read(store: Store, run_schema: Schema, ref: PayloadRef, tokens: TokenRange) -> dict[str, Dense | Ragged]:
    with Reader(store, run_schema, threads=1, retries_max=0) as reader:
        return reader.read(ref, tokens=tokens)


@pytest.mark.parametrize(("start", "stop"), [(0, TOKENS), (0, 2048), (1, 4097), (2047, 2049), (4999, 5000), (2048, 4096)])
def test_any_range_is_the_rows_that_were_put(world: Any, start: int, stop: int) -> None:
    store, run_schema, arrays, ref = world
    for name, got in read(store, run_schema, ref, TokenRange(start, stop)).items():
        put = arrays.fields[name]
        if isinstance(got, Dense):
            np.testing.assert_array_equal(got.rows, put.rows[start:stop])
            continue
        np.testing.assert_array_equal(got.counts, put.counts[start:stop])
        first, last = (int(put.counts[:n].sum()) for n in (start, stop))
        for column, values in got.columns.items():
            np.testing.assert_array_equal(values, put.columns[column][first:last])


def test_every_flipped_byte_of_a_chunk_is_noticed(world: Any, tmp_path: Path) -> None:
    store, run_schema, _, ref = world
    path = tmp_path / "run" / object_name(ref.object_ids[0])
    whole = path.read_bytes()
    path.chmod(0o600)
    with Reader(store, run_schema, threads=1, retries_max=0) as reader:
        plan = reader.plan(ref)
        out = {f.name: allocate(plan, run_schema, f.name) for f in run_schema.fields}
        chunks = [(r.offset + c.offset, c.size) for s in plan.segments for r in s.requests for c in r.chunks]
        for offset, size in chunks:
            for at in (offset, offset + size // 2, offset + size - 1):
                path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
                with pytest.raises(ObjectCorrupt, match="crc32c"):
                    reader.read_into(plan, out)
        path.write_bytes(whole)
        reader.read_into(plan, out)
