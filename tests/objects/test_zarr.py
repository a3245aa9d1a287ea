"""Any Zarr tool opens an object, and every tool sees what was put."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from fsref.errors import ObjectCorrupt
from fsref.objects import view
from fsref.refs import Codec, Dense, Payload, Ragged, Schema, TokenRange, object_name, token_hash
from fsref.store import open_root
from fsref.writer import Writer
from tests.support import needs
from tests.support.payloads import Numbers, cut, payload, schema


def stored(tmp_path: Path, run_schema: Schema, arrays: Payload) -> Path:
    with open_root(str(tmp_path), run="run", create=True) as store:
        ref = Writer(store, run_schema, Numbers()).put(arrays)
    return tmp_path / "run" / object_name(ref.object_ids[0])


def expected(run_schema: Schema, arrays: Payload) -> dict[str, np.ndarray[Any, Any]]:
    """Array path to values, by plain slicing."""
    out = {}
    for f in run_schema.fields:
        rows, columns = cut(arrays.fields[f.name], 0, arrays.token_count)
        if f.ragged:
            out[f"{f.name}/counts"] = rows
            out |= {f"{f.name}/{n}": v for n, v in columns.items()}
        else:
            out[f.name] = rows
    return out


CODECS = [Codec(), Codec(name="zstd", level=2), Codec(name="blosclz", level=5), Codec(name="none")]


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
@pytest.mark.parametrize("tokens", [0, 3, 2049, 5000])
def test_zarr_python_reads_every_array(tmp_path: Path, tokens: int, codec: Codec) -> None:
    run_schema = schema(codec=codec, layers_per_chunk=3)
    arrays = payload(np.random.default_rng(tokens), run_schema, tokens)
    store = zarr.storage.ZipStore(stored(tmp_path, run_schema, arrays), mode="r")
    group = zarr.open_group(store, mode="r", zarr_format=3)
    for path, values in expected(run_schema, arrays).items():
        got = group[path]
        assert isinstance(got, zarr.Array)
        assert (got.dtype, got.shape) == (values.dtype, values.shape)
        assert np.asarray(got[...]).tobytes() == values.tobytes(), path
    attributes: Any = group.attrs["fsref"]
    assert attributes["token_count"] == tokens
    assert attributes["token_hash"] == token_hash(arrays.token_ids).hex()
    store.close()


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
def test_tensorstore_reads_every_array(tmp_path: Path, codec: Codec) -> None:
    tensorstore = needs.extra("tensorstore", "test")
    run_schema = schema(codec=codec)
    arrays = payload(np.random.default_rng(5), run_schema, 5000)
    path = stored(tmp_path, run_schema, arrays)
    for name, values in expected(run_schema, arrays).items():
        spec = {"driver": "zarr3", "kvstore": {"driver": "zip", "base": f"file://{path}", "path": f"{name}/"}}
        got = tensorstore.open(spec, open=True, read=True).result().read().result()
        assert got.dtype == values.dtype
        assert np.ascontiguousarray(got).tobytes() == values.tobytes(), name


def test_plain_zip_tools_list_and_verify_it_and_equal_content_has_equal_bytes(tmp_path: Path) -> None:
    run_schema = schema()
    arrays = payload(np.random.default_rng(6), run_schema, 3000)
    first, second = stored(tmp_path / "a", run_schema, arrays), stored(tmp_path / "b", run_schema, arrays)
    with zipfile.ZipFile(first) as archive:
        assert archive.testzip() is None
        assert {i.compress_type for i in archive.infolist()} == {zipfile.ZIP_STORED}
        names = archive.namelist()
    assert names.index("sampling_mask/ids/c/0") < names.index("routed_experts/c/1/0/0"), "token range first, then field"
    assert first.read_bytes() == second.read_bytes()


def test_the_view_shows_schema_coverage_statistics_and_values(tmp_path: Path) -> None:
    run_schema = schema()
    arrays = payload(np.random.default_rng(7), run_schema, 2500, missing={"routed_experts": [TokenRange(2499, 2500)]})
    path = stored(tmp_path, run_schema, arrays)
    with open_root(str(tmp_path), run="run") as store, store.open(str(path.relative_to(tmp_path / "run"))) as file:
        seen = view(file)
        assert seen.schema == run_schema
        assert seen.missing == {"routed_experts": (TokenRange(2499, 2500),)}
        mask = arrays.fields["sampling_mask"]
        assert isinstance(mask, Ragged)
        assert seen.stats["sampling_mask"] == {"rows": int((mask.counts > 0).sum()), "values": int(mask.counts.sum())}
        routed = seen.read("routed_experts")
        assert isinstance(routed, Dense)
        assert np.array_equal(routed.rows, cut(arrays.fields["routed_experts"], 0, 2500)[0])
        assert sum(a.bytes_stored for a in seen.arrays()) < seen.byte_count


@pytest.mark.parametrize("damage", ["short", "middle", "comment", "deflate", "prefix", "twice"])
def test_a_file_that_is_not_an_intact_object_is_refused(tmp_path: Path, damage: str) -> None:
    run_schema = schema()
    path = stored(tmp_path, run_schema, payload(np.random.default_rng(8), run_schema, 100))
    data = bytearray(path.read_bytes())
    if damage == "short":
        data = data[:-7]
    elif damage == "middle":
        del data[500:600]
    elif damage == "comment":
        data[-2:] = b"\x05\x00"
        data += b"hello"
    elif damage == "prefix":
        data = bytearray(b"#!/bin/sh\n") + data
    path.write_bytes(bytes(data))
    if damage == "deflate":
        _rewrite(path, zipfile.ZIP_DEFLATED)
    elif damage == "twice":
        with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as archive:
            archive.writestr("zarr.json", b"{}")
    with (
        open_root(str(tmp_path), run="run") as store,
        store.open(str(path.relative_to(tmp_path / "run"))) as file,
        pytest.raises(ObjectCorrupt),
    ):
        view(file)


def _rewrite(path: Path, method: int) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = {n: archive.read(n) for n in archive.namelist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
