"""The Zarr v3 metadata documents of an object, written without Zarr: they depend on the layout alone.

``attributes.fsref`` of the root group carries what a reader without the reference needs: schema, token count, token-id hash,
coverage and statistics.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from fsref.objects.codec import shuffle_width
from fsref.plan.layout import Array, Layout
from fsref.refs import Codec, Schema, TokenRange

FORMAT: Final = 1
_GROUP: Final = {"zarr_format": 3, "node_type": "group"}


def codec_chain(array: Array, codec: Codec) -> list[dict[str, Any]]:
    """The Zarr v3 codecs of an array's chunks."""
    chain: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if codec.name != "none":
        chain.append(
            {
                "name": "blosc",
                "configuration": {
                    "cname": codec.name,
                    "clevel": codec.level,
                    "shuffle": "bitshuffle",
                    "typesize": shuffle_width(array.chunk_nbytes, np.dtype(array.dtype).itemsize),
                    "blocksize": 0,
                },
            }
        )
    return [*chain, {"name": "crc32c"}]


def documents(
    layout: Layout,
    *,
    token_hash: bytes,
    missing: Mapping[str, Sequence[TokenRange]],
    stats: Mapping[str, tuple[int, int]],
) -> list[tuple[str, bytes]]:
    """(entry name, JSON) of every ``zarr.json``, the root's first."""
    attributes = {
        "format": FORMAT,
        "schema": msgspec.to_builtins(layout.schema),
        "schema_hash": layout.schema.hash.hex(),
        "fields": list(layout.present),
        "token_count": layout.token_count,
        "range_tokens": layout.range_tokens,
        "token_hash": token_hash.hex(),
        "missing": {name: [[r.start, r.stop] for r in ranges] for name, ranges in missing.items() if ranges},
        "stats": {name: {"rows": rows, "values": values} for name, (rows, values) in stats.items()},
    }
    out = [("zarr.json", {**_GROUP, "attributes": {"fsref": attributes}})]
    out += [(f"{f.name}/zarr.json", group_document()) for f in layout.schema.fields if f.ragged and f.name in layout.present]
    out += [(f"{a.path}/zarr.json", array_document(a, layout.schema)) for a in layout.arrays]
    return [(name, json.dumps(doc, separators=(",", ":")).encode()) for name, doc in out]


def group_document() -> dict[str, Any]:
    """The ``zarr.json`` of a ragged field's group."""
    return {**_GROUP, "attributes": {}}


def array_document(array: Array, schema: Schema) -> dict[str, Any]:
    """The ``zarr.json`` of an array; a reader accepts no other one for it, whatever dtype, shape or codec it names."""
    if array.dtype == "bool":
        fill: Any = False
    else:
        fill = 0.0 if array.dtype.startswith("float") else 0
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(array.shape),
        "data_type": array.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(array.chunk_shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill,
        "codecs": codec_chain(array, schema.codec),
        "attributes": {"logical_dtype": array.field.logical_dtype} if array.field.logical_dtype else {},
    }
