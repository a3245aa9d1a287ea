"""Routed experts: which experts each token used in each layer, rows [R, L, K] from token position ``start`` on.

Forms: vLLM's (0.27 to 0.32) is a string, base64 of .npy bytes; it does not say where it starts, so ``start`` comes from the
request's ``routed_experts_prompt_start``. prime-rl's is ``{"data": base64, "shape", "dtype", "start"}``, which says it. An engine in the
same process hands over the array itself.
A reply holds rows for all tokens but the last sampled one, which was never fed to the model: ``token_count - 1 - start`` rows.

Shape letters: R rows, L layers, K experts per token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fsref.errors import WireError
from fsref.refs import expert_dtype
from fsref.refs.lints import zero_layers
from fsref.wire.modelconfig import ModelShape
from fsref.wire.npy import check_shape, decode_npy, encode_npy
from fsref.wire.text import BYTES_MAX, decode_base64, encode_base64

WHAT: Final = "routed_experts"
DTYPES: Final = frozenset({"uint8", "uint16", "uint32", "int8", "int16", "int32", "int64"})
"""What engines send: uint8 up to 256 experts, uint16 above, int32 in 0.32 without a narrow buffer; signed ones are range checked."""


@dataclass(frozen=True, eq=False)
class Routing:
    """Rows [R, L, K] of expert ids; row r is of token position ``start + r``."""

    rows: NDArray[Any]
    start: int


def decode_routed_experts(
    value: object,
    *,
    start: int,
    token_count: int,
    model: ModelShape | None = None,
    bytes_max: int = BYTES_MAX,
    refuse_zero_layer: bool = True,
) -> Routing | None:
    """A choice's ``routed_experts`` as sent by the engine; ``None`` if the engine sent none (the caller knows whether it asked).

    ``start`` is the request's ``routed_experts_prompt_start``, ``token_count`` prompt plus completion. Rows are C-contiguous; they may
    share the decoded bytes and be read-only. With ``model``, layers are cut to those that route (an engine may send all layers or
    only those), ids are checked against the expert count and the dtype follows from it, never from the values.

    Raises ``WireError`` for an unknown form or dtype, bytes that the shape does not account for, more rows than tokens, fewer
    than all but the last one, negative ids, or, with ``model``, foreign sizes, ids out of range, or a layer that is zero throughout.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        rows, start = _from_mapping(value, start, bytes_max)
    elif isinstance(value, np.ndarray):
        rows = value
    elif isinstance(value, str | bytes | memoryview):
        rows = decode_npy(decode_base64(value, what=WHAT, bytes_max=bytes_max), what=WHAT)
    else:
        raise WireError(
            f"{WHAT}: a base64 string (vLLM) or an object with data, shape, dtype (prime-rl) expected, {type(value).__name__} found"
        )
    if rows.ndim != 3 or rows.dtype.name not in DTYPES:
        raise WireError(f"{WHAT}: [rows, layers, top_k] of whole numbers expected, {rows.dtype.name} {rows.shape} found")
    _check_rows(len(rows), start=start, token_count=token_count)
    if rows.dtype.kind == "i" and rows.size and int(rows.min()) < 0:
        raise WireError(f"{WHAT}: expert id {int(rows.min())} found; validity travels beside the ids, never as a negative one")
    return Routing(rows if model is None else fit_model(rows, model, refuse_zero_layer=refuse_zero_layer), start)


def _from_mapping(value: Mapping[str, Any], start: int, bytes_max: int) -> tuple[NDArray[Any], int]:
    shape, name, own_start = value.get("shape"), value.get("dtype", "uint8"), value.get("start")
    if not isinstance(shape, list | tuple) or any(type(n) is not int for n in shape):
        raise WireError(f"{WHAT}: shape {shape!r} is not a list of whole numbers")
    if not isinstance(name, str) or name.lstrip("<|=") not in DTYPES:
        raise WireError(f"{WHAT}: dtype {name!r} is not one of {sorted(DTYPES)}")
    dtype = np.dtype(name.lstrip("<|=")).newbyteorder("<")
    if own_start is not None and type(own_start) is not int:
        raise WireError(f"{WHAT}: start {own_start!r} is not a whole number")
    data = decode_base64(value.get("data"), what=f"{WHAT}.data", bytes_max=bytes_max)
    check_shape(tuple(shape), byte_count=len(data), itemsize=dtype.itemsize, what=WHAT)
    return np.frombuffer(data, dtype).reshape(shape), start if own_start is None else own_start


def _check_rows(row_count: int, *, start: int, token_count: int) -> None:
    if not 0 <= start <= token_count:
        raise WireError(f"{WHAT}: start {start} is not in 0..{token_count}, the tokens of prompt and completion")
    most = token_count - start
    if not max(most - 1, 0) <= row_count <= most:
        raise WireError(
            f"{WHAT}: {row_count} rows found for {token_count} tokens from {start} on, {max(most - 1, 0)} needed "
            "(the last sampled token has none); the engine lost rows or answered another request"
        )


def fit_model(rows_RLK: NDArray[Any], model: ModelShape, *, refuse_zero_layer: bool = True) -> NDArray[Any]:
    """``rows`` cut to the layers that route and in the dtype of the model's expert count.

    Raises ``WireError`` if the sizes are of another model, an id is out of range, or (where a token uses several experts, so that
    ids cannot all be 0) a layer is zero throughout: then the engine did not capture it.
    """
    layers, top_k = rows_RLK.shape[1:]
    if model.mtp_count and layers == model.layer_count + model.mtp_count:
        rows_RLK, layers = rows_RLK[:, : model.layer_count], model.layer_count  # drafts of the prediction layers are never replayed
    if top_k != model.top_k or layers not in (model.layer_count, len(model.layer_ids)):
        raise WireError(
            f"{WHAT}: {layers} layers of {top_k} experts found; the model has {model.layer_count} layers, "
            f"{len(model.layer_ids)} of them route to {model.top_k} experts"
        )
    if layers != len(model.layer_ids):
        rows_RLK = rows_RLK[:, model.layer_ids]
    if rows_RLK.size and int(rows_RLK.max()) >= model.expert_count:
        raise WireError(f"{WHAT}: expert id {int(rows_RLK.max())} found, the model has {model.expert_count} experts")
    if refuse_zero_layer and (zero := zero_layers(rows_RLK)):
        raise WireError(f"{WHAT}: all ids of layer {model.layer_ids[zero[0]]} are 0: the engine did not capture it")
    return np.ascontiguousarray(rows_RLK, dtype=expert_dtype(model.expert_count))


def encode_routed_experts(rows_RLK: NDArray[Any]) -> str:
    """vLLM's native form: base64 of .npy bytes."""
    return encode_base64(encode_npy(rows_RLK))


def packed_routed_experts(routing: Routing) -> dict[str, Any]:
    """prime-rl's form, which verifiers reads: ``{"data": base64, "shape", "dtype", "start"}``, little-endian and C order."""
    rows = np.asarray(routing.rows, dtype=routing.rows.dtype.newbyteorder("<"), order="C")
    return {"data": encode_base64(rows), "shape": list(rows.shape), "dtype": rows.dtype.name, "start": routing.start}
