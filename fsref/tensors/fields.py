"""One field of a micro batch as tensors: dense rows, or counts and columns, with a mark for every row that is real.

Shape letters: C cells, [T] of packed tokens or [B, W] of a rectangle; N values of a ragged field; W the width of densified rows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from fsref.errors import PayloadError
from fsref.refs import MASK_TRUNCATED
from fsref.tensors.dtypes import check_carried, check_range

_IDS: Final = {"int32": torch.int32, "int64": torch.int64, "uint8": torch.uint8}


@dataclass(frozen=True, eq=False)
class DenseTensor:
    """A dense field of a micro batch."""

    rows: Tensor
    """[C, *row_shape]; expert ids as int32, other dtypes as stored (unsigned 16 to 64 bit widened), bfloat16 as itself. Writable."""
    valid: Tensor
    """bool [C]: False where the row is a filler or padding."""
    layer_ids: tuple[int, ...] = ()
    """Global ids of the layer axis, in its order: what a trainer compares with the layers that consumed it. Empty without such an axis."""
    expert_count: int = 0
    """The rows are ids of so many experts; 0 where they are none."""

    def __post_init__(self) -> None:
        check_carried(self.rows, what="a dense field")
        if self.rows.shape[: self.valid.ndim] != self.valid.shape:
            raise PayloadError(f"rows of shape {tuple(self.rows.shape)} do not stand in cells of shape {tuple(self.valid.shape)}")

    @property
    def id_bytes(self) -> int:
        """Entries of the last axis that are one id: 2 where the rows are the bytes of 16-bit ids, else 1."""
        return 2 if self.expert_count > 256 and self.rows.dtype == torch.uint8 else 1

    def with_sentinel(self, sentinel: int = -1) -> Tensor:
        """A copy of ``rows`` with ``sentinel`` in every row that is not real; uint8 becomes int32 for it."""
        if self.id_bytes == 2:
            raise PayloadError("the rows are the bytes of 16-bit ids, which hold no sentinel: ask for int32 or int64")
        out = self.rows.to(torch.int32) if self.rows.dtype == torch.uint8 else self.rows.clone()
        out[~self.valid] = sentinel
        return out

    def as_ids(self, form: Literal["int32", "int64", "uint8"]) -> "DenseTensor":
        """The same expert ids in another dtype, itself where they have it. Raises ``PayloadError`` where an id does not fit."""
        if self.id_bytes == 2:
            raise PayloadError("the rows are the bytes of 16-bit ids: ask for int32 or int64 where they are assembled")
        dtype = _IDS[form]
        if self.rows.dtype == dtype:
            return self
        check_range(self.rows, np.dtype(form), what="expert ids")
        return replace(self, rows=self.rows.to(dtype))


@dataclass(frozen=True, eq=False)
class Densified:
    """A ragged field with equally many slots in every row."""

    columns: Mapping[str, Tensor]
    """[C, W] each: values in slot order, the column's fill behind them."""
    inside: Tensor
    """bool [C, W]: True where a value stands."""
    counts: Tensor
    """int32 [C]: values that stand in the row; at most W."""
    valid: Tensor
    """bool [C]: False where values are missing, not merely none."""
    truncated: Tensor
    """bool [C]: values were left out, here or (where the field's flags were named) by the engine."""
    values_cut: int
    """Values that were left out here, in all rows."""
    row_columns: Mapping[str, Tensor] = field(default_factory=dict)
    """[C] each; the named flags say ``MASK_TRUNCATED`` wherever ``truncated`` does."""

    def ragged(self) -> "RaggedTensor":
        """The values as counts and columns again; what was cut is gone."""
        columns = {name: column.masked_select(self.inside) for name, column in self.columns.items()}
        return RaggedTensor(self.counts, columns, self.valid, self.row_columns)


@dataclass(frozen=True, eq=False)
class RaggedTensor:
    """A ragged field of a micro batch."""

    counts: Tensor
    """int32 [C]; 0 in padding."""
    columns: Mapping[str, Tensor]
    """[N] each, N = counts.sum(): row after row, slots in engine order."""
    valid: Tensor
    """bool [C]: False where values are missing, not merely none, and in padding."""
    row_columns: Mapping[str, Tensor] = field(default_factory=dict)
    """[C] each: the field's row columns, for example a mask's flags; 0 where nothing is known."""

    def __post_init__(self) -> None:
        for name, column in {**self.columns, **self.row_columns}.items():
            check_carried(column, what=f"column {name!r}")

    @property
    def offsets(self) -> Tensor:
        """int64 [number of cells + 1]: where each row's values begin."""
        out = torch.zeros(self.counts.numel() + 1, dtype=torch.int64, device=self.counts.device)
        torch.cumsum(self.counts.flatten(), 0, out=out[1:])
        return out

    def densified(
        self,
        *,
        width: int,
        fill: Mapping[str, float] | None = None,
        truncate: bool = False,
        sampled: Tensor | None = None,
        flags: str = "",
    ) -> Densified:
        """Every column as [C, W], in slot order, so what stands in slot 0 stays there.

        ``fill``: what stands behind a row's values, by column; without, -1 in integers and minus infinity in floats. ``truncate``: a row
        of more than ``width`` values keeps the first of them, is marked and counted; else it is an error. ``sampled`` [C]: ids of which
        the row's own is kept in any case, in the last slot where it would be cut (needs the column ``ids``); without it, truncating a
        sampling mask may cut the token that was sampled. ``flags``: the row column whose ``MASK_TRUNCATED`` bit says that the engine itself
        reported a part.

        Raises ``PayloadError`` for a wider row, a fill that its column cannot hold, or a column that is not there.
        """
        if width < 1:
            raise PayloadError(f"rows cannot be {width} values wide")
        counts = self.counts.flatten()
        cut = (counts - width).clamp_min(0)
        values_cut = int(cut.sum())
        if values_cut and not truncate:
            at = int(cut.argmax())
            raise PayloadError(
                f"row {at} has {int(counts[at])} values, which do not fit a width of {width}: widen it, or pass truncate=True, which"
                " keeps the first ones, marks the row and counts the rest"
            )
        kept = counts - cut
        inside = torch.arange(width, device=counts.device) < kept[:, None]
        places = _Places(self, width, sampled) if values_cut else None
        columns = {n: _dense_column(c, inside, places, _fill(n, c, fill or {})) for n, c in self.columns.items()}
        shape = self.counts.shape
        truncated = (cut > 0).reshape(shape)
        rows = {n: r.clone() for n, r in self.row_columns.items()}
        if flags:
            if flags not in rows:
                raise PayloadError(f"flags {flags!r} named, the row columns are {sorted(rows)}")
            rows[flags] |= truncated * MASK_TRUNCATED
            truncated = (rows[flags] & MASK_TRUNCATED) > 0
        return Densified(
            {n: c.reshape(*shape, width) for n, c in columns.items()},
            inside.reshape(*shape, width),
            kept.reshape(shape),
            self.valid.clone(),
            truncated,
            values_cut,
            rows,
        )


class _Places:
    """Which values of a ragged field stand in a width that is too small for some rows, and which sampled ones take the last slot."""

    def __init__(self, data: RaggedTensor, width: int, sampled: Tensor | None) -> None:
        counts, offsets = data.counts.flatten(), data.offsets
        row_N = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        slot_N = torch.arange(len(row_N), device=counts.device) - offsets[row_N]
        self.kept_N = slot_N < width
        self.moved = self.rows = torch.zeros(0, dtype=torch.int64, device=counts.device)
        if sampled is None:
            return
        if "ids" not in data.columns:
            raise PayloadError(f"sampled ids are kept by the column 'ids'; the columns are {sorted(data.columns)}")
        hit_N = data.columns["ids"] == sampled.flatten()[row_N]
        safe = torch.zeros(len(counts), dtype=torch.bool, device=counts.device)
        safe[row_N[hit_N & self.kept_N]] = True
        lost = torch.nonzero(hit_N & ~self.kept_N & ~safe[row_N]).flatten().flip(0)
        first = torch.full((len(counts),), -1, dtype=torch.int64, device=counts.device)
        first.scatter_reduce_(0, row_N[lost], lost, "amin", include_self=False)  # an id that ties repeat counts once
        self.rows = torch.nonzero(first >= 0).flatten()
        self.moved = first[self.rows]


def _dense_column(column: Tensor, inside: Tensor, places: _Places | None, fill: float) -> Tensor:
    out = torch.full(inside.shape, fill, dtype=column.dtype, device=column.device)
    if places is None:
        return out.masked_scatter_(inside, column)
    out.masked_scatter_(inside, column[places.kept_N])
    out[places.rows, -1] = column[places.moved]
    return out


def _fill(name: str, column: Tensor, fills: Mapping[str, float]) -> Any:
    floating = column.dtype.is_floating_point
    value = fills.get(name, float("-inf") if floating else -1)
    if floating:
        return value
    low, high = (0, 1) if column.dtype == torch.bool else (torch.iinfo(column.dtype).min, torch.iinfo(column.dtype).max)
    if not math.isfinite(value) or value != int(value) or not low <= value <= high:
        raise PayloadError(f"column {name!r} is {str(column.dtype).removeprefix('torch.')} and cannot hold the fill {value}: name another")
    return int(value)
