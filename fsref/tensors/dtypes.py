"""What stored numbers become as tensors, and the checks before a value could change.

Owns the table of dtypes. Refuses values that do not fit, and 16-bit integers in any result: no collective of torch carries them.
"""

from typing import Any, Final, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fsref.errors import ConfigError, PayloadError
from fsref.refs import Field, Schema
from fsref.slices import ExpertDtype

ExpertIds = Literal["int32", "int64", "uint8", "bytes"]
"""Form of expert ids: ``uint8`` for up to 256 experts, ``bytes`` the stored ids as uint8, two per id above 256 experts."""

_LOGICAL: Final = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
_WIDENED: Final = {"uint16": "int32", "int16": "int32", "uint32": "int64"}
"""Storage dtypes that torch or its collectives cannot carry, and what they become. uint64 becomes int64 where its values fit."""
_NOT_CARRIED: Final = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64})


def slice_dtype(schema: Schema, expert_ids: ExpertIds) -> ExpertDtype:
    """What expert ids are read into (``SliceBuffers``), so that they widen while they are decoded and not in another pass.

    Raises ``ConfigError`` where the experts of a field do not fit the form that is asked for.
    """
    for spec in schema.fields:
        if spec.expert_count and not spec.ragged:
            _expert_dtype(spec, expert_ids)
    return expert_ids if expert_ids in ("int32", "int64") else "stored"


def _expert_dtype(spec: Field, form: ExpertIds) -> str:
    if form not in get_args(ExpertIds):
        raise ConfigError(f"field {spec.name!r}: expert ids as {form!r} asked for; known are {', '.join(get_args(ExpertIds))}")
    if form == "uint8" and spec.expert_count > 256:
        raise ConfigError(f"field {spec.name!r}: ids of {spec.expert_count} experts do not fit uint8: ask for int32, int64 or bytes")
    return spec.dtype if form == "bytes" else form


def dense_tensor(array: NDArray[Any], spec: Field, expert_ids: ExpertIds = "int32") -> Tensor:
    """Rows of a dense field, in the dtype of the table; without a copy where the array has that dtype and may be written.

    Raises ``PayloadError`` for values that the wanted dtype does not hold.
    """
    if spec.logical_dtype:
        bits = array.view(np.int16) if array.itemsize == 2 else array
        return _from_numpy(bits).view(_LOGICAL[spec.logical_dtype])
    if not spec.expert_count:
        return plain_tensor(array, what=f"field {spec.name!r}")
    wanted = _expert_dtype(spec, expert_ids)
    if array.dtype != wanted:
        check_range(array, np.dtype(wanted), what=f"field {spec.name!r}")
        array = array.astype(wanted)
    return _from_numpy(array.view(np.uint8) if expert_ids == "bytes" else array)


def plain_tensor(array: NDArray[Any], *, what: str) -> Tensor:
    """A column, or rows of a field without a meaning of its own: as stored, 16-bit integers and unsigned ones widened."""
    name = array.dtype.name
    if name == "uint64":
        check_range(array, np.dtype(np.int64), what=what)
        return _from_numpy(array.view(np.int64))
    return _from_numpy(array.astype(_WIDENED[name]) if name in _WIDENED else array)


def check_range(values: "NDArray[Any] | Tensor", dtype: "np.dtype[Any]", *, what: str) -> None:
    """Raises ``PayloadError`` with the numbers unless every integer of ``values`` fits ``dtype``."""
    if not (values.numel() if isinstance(values, Tensor) else values.size):
        return
    low, high, info = int(values.min()), int(values.max()), np.iinfo(dtype)
    if low < info.min or high > info.max:
        raise PayloadError(f"{what}: values {low}..{high} do not fit {dtype} ({info.min}..{info.max}): ask for a wider one")


def check_carried(tensor: Tensor, *, what: str) -> None:
    """Raises ``PayloadError`` for a dtype that collectives cannot carry."""
    if tensor.dtype in _NOT_CARRIED:
        name = str(tensor.dtype).removeprefix("torch.")
        raise PayloadError(f"{what} is {name}, which no collective carries: make it int32, int64 or uint8")


def _from_numpy(array: NDArray[Any]) -> Tensor:
    """Shares memory with the array; a read-only one is copied, since every result may be written."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
