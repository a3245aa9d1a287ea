"""A rank's part of a micro batch as tensors: what ``fsref.slices`` read, beside the tokens of the same rows."""

from dataclasses import replace

import numpy as np
import torch

from fsref.plan import PackedRows
from fsref.refs import Dense, FieldData, Schema
from fsref.slices import RankSlice
from fsref.steps import MicroBatch
from fsref.tensors.batch import PackedMicroBatch, pack_tokens
from fsref.tensors.dtypes import ExpertIds, dense_tensor, plain_tensor
from fsref.tensors.fields import DenseTensor, RaggedTensor
from fsref.tensors.gather import PaddingCells
from fsref.tensors.layouts import arranged


def rank_tokens(micro_batch: MicroBatch, rows: PackedRows, *, token_id: int = 0, targets_ahead: int = 0) -> PackedMicroBatch:
    """The token-level tensors of the rank's rows, without any field; ``token_id`` in padding. ``targets_ahead``: as in ``arranged``.

    ``rows`` numbers the sequences of ``micro_batch``. Raises ``PayloadError`` for rows of other sequences.
    """
    nothing = PaddingCells(token_id=token_id, step=0, data_rank=0, data_ranks=1, expert_shards=1)
    return arranged(pack_tokens(micro_batch), rows, cells=nothing, targets_ahead=targets_ahead)


def rank_batch(
    micro_batch: MicroBatch,
    got: RankSlice,
    schema: Schema,
    *,
    expert_ids: ExpertIds = "int32",
    token_id: int = 0,
    bytes_read: int = 0,
    targets_ahead: int = 0,
) -> PackedMicroBatch:
    """The rank's rows: ``cu_seqlens`` and ``position_ids`` of its axis, its tokens, and the fields of ``got``.

    ``targets_ahead``: that of the plan that ``got`` was read by (``plan_slice``). Memory is shared with ``got`` wherever its dtypes are
    those of tensors already; expert ids in padding are in ``got``. Raises ``PayloadError`` for a slice of other sequences or ids that do
    not fit, ``ConfigError`` for a form that does not hold the experts.
    """
    fields = {name: _field(data, got, schema, name, expert_ids) for name, data in got.fields.items()}
    tokens = rank_tokens(micro_batch, got.rows, token_id=token_id, targets_ahead=targets_ahead)
    return replace(tokens, fields=fields, bytes_read=bytes_read)


def _field(data: FieldData, got: RankSlice, schema: Schema, name: str, expert_ids: ExpertIds) -> DenseTensor | RaggedTensor:
    spec, valid = schema.field(name), torch.from_numpy(got.valid[name])
    if isinstance(data, Dense):
        return DenseTensor(dense_tensor(data.rows, spec, expert_ids), valid, got.layers.get(name, ()), spec.expert_count)
    return RaggedTensor(
        torch.from_numpy(np.asarray(data.counts, np.int32)),
        {n: plain_tensor(c, what=f"field {name!r} column {n!r}") for n, c in data.columns.items()},
        valid,
        {n: plain_tensor(r, what=f"field {name!r} column {n!r}") for n, r in data.row_columns.items()},
    )
