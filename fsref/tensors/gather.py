"""The rows of a micro batch in another order, with padding between them: exact index gathers, always copies.

``index`` (int64 [R]) says which row stands in each place, -1 for padding; ``slots`` (int64 [R]) numbers the padding, -1 elsewhere.
Padding routes to balanced experts (``fsref.plan.balance``); other fields have zeros there, ragged ones no values.

Shape letters: R places, T rows before, N values of a ragged field, L layers, K ids.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fsref.errors import ConfigError
from fsref.plan import balanced_rows
from fsref.tensors.fields import DenseTensor, RaggedTensor

Fields = Mapping[str, DenseTensor | RaggedTensor]


@dataclass(frozen=True, kw_only=True)
class PaddingCells:
    """What stands where no token does. Two reads with the same numbers give the same cells, in any process."""

    step: int
    data_rank: int
    data_ranks: int
    """Of those whose rows meet in the same experts: their padding goes to different ones."""
    expert_shards: int
    """Expert parallel ranks, each with as many successive experts; 1 without expert parallelism."""
    token_id: int = 0
    """Any token of the vocabulary; nothing that is made of it counts."""
    first_slot: int = 0
    """The number of the first padding cell: those of the micro batches before, where a step's padding is to be balanced as a whole."""

    def __post_init__(self) -> None:
        if not 0 <= self.data_rank < self.data_ranks or min(self.step, self.first_slot) < 0:
            raise ConfigError(f"padding of step {self.step}, data rank {self.data_rank} of {self.data_ranks}: ranks and steps count from 0")


def gathered(rows: Tensor, index: Tensor, *, fill: float = 0) -> Tensor:
    """[R, ...]: ``rows[index]``, ``fill`` in padding. Bits stay as they are."""
    if rows.dtype.itemsize == 1 and rows.dtype.is_floating_point:  # torch gathers no 8-bit floats on every device
        return gathered(rows.view(torch.uint8), index).view(rows.dtype)
    if not len(rows):
        return torch.full((len(index), *rows.shape[1:]), fill, dtype=rows.dtype, device=rows.device)
    out = rows.index_select(0, index.clamp_min(0))
    out[index < 0] = fill
    return out


def gathered_fields(fields: Fields, index: Tensor, *, slots: NDArray[np.int64], cells: PaddingCells | None) -> Fields:
    """Every field at ``index``. ``cells`` may be None where nothing is padding."""
    return {
        name: _dense(data, index, slots, cells) if isinstance(data, DenseTensor) else _ragged(data, index) for name, data in fields.items()
    }


def _dense(data: DenseTensor, index: Tensor, slots: NDArray[np.int64], cells: PaddingCells | None) -> DenseTensor:
    rows = gathered(data.rows, index)
    places = np.flatnonzero(slots >= 0)
    if data.expert_count and cells is not None and len(places):
        ids = _balanced(data, slots[places], cells)
        rows[torch.from_numpy(places).to(rows.device)] = ids.to(rows.device)
    return DenseTensor(rows, gathered(data.valid, index), data.layer_ids, data.expert_count)


def _balanced(data: DenseTensor, slots: NDArray[np.int64], cells: PaddingCells) -> Tensor:
    """Expert ids [P, *row_shape] of padding cells, computed wide and then checked into the dtype of the rows."""
    *layers, last = data.rows.shape[1:]
    ids_PLK = balanced_rows(
        slots,
        step=cells.step * cells.data_ranks + cells.data_rank,
        layer_ids=data.layer_ids or range(layers[0] if layers else 1),
        top_k=last // data.id_bytes,
        expert_count=data.expert_count,
        shards=cells.expert_shards,
    )
    if data.id_bytes == 2:
        ids = torch.from_numpy(ids_PLK.astype(np.uint16).view(np.uint8))
    else:
        ids = torch.from_numpy(ids_PLK).to(data.rows.dtype)
    return ids.reshape(len(slots), *layers, last)


def _ragged(data: RaggedTensor, index: Tensor) -> RaggedTensor:
    counts = gathered(data.counts, index)
    return RaggedTensor(
        counts,
        _values(data, index, counts),
        gathered(data.valid, index),
        {name: gathered(row, index) for name, row in data.row_columns.items()},
    )


def _values(data: RaggedTensor, index: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """Columns of the rows ``index``, of which each has ``counts`` values."""
    real = index[index >= 0]
    if torch.equal(real, torch.arange(len(data.counts), device=real.device)):
        return {name: column.clone() for name, column in data.columns.items()}  # every row in its order: padding alone moves no value
    offsets, ends = data.offsets, torch.cumsum(counts, 0)
    # Each row's values begin at offsets[index] there and at ends - counts here: one shift per row, repeated over its values.
    shift = offsets[index.clamp_min(0)] - (ends - counts)
    at = torch.repeat_interleave(shift, counts) + torch.arange(int(ends[-1]) if len(ends) else 0, device=counts.device)
    return {name: gathered(column, at) for name, column in data.columns.items()}
