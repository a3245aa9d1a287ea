"""A packed micro batch laid out for a framework with a batch axis, or in the rows of any ``PackedRows``, and back.

The layout, its widths and the prompt lengths are arguments, never derived from the tokens: frameworks that look alike lay them out
differently. Every conversion is an exact index gather of all fields at once and can be undone, byte for byte.

Shape letters: T packed tokens, B sequences, W width of a rectangle.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fsref.errors import PayloadError
from fsref.plan import PackedRows
from fsref.plan.padding import prompt_and_completion, rectangle
from fsref.tensors.batch import NO_LABEL, PackedMicroBatch
from fsref.tensors.fields import DenseTensor, RaggedTensor
from fsref.tensors.gather import PaddingCells, gathered, gathered_fields


@dataclass(frozen=True, kw_only=True)
class LeftPadded:
    """Sequences end at the last column."""

    width: int


@dataclass(frozen=True, kw_only=True)
class RightPadded:
    """Sequences begin at the first column."""

    width: int


@dataclass(frozen=True, kw_only=True)
class PromptCompletion:
    """Prompts end and completions begin at the same column: prompts are padded on the left, completions on the right."""

    prompt_lengths: tuple[int, ...]
    """Of every sequence."""
    prompt_width: int
    completion_width: int


Layout = LeftPadded | RightPadded | PromptCompletion


@dataclass(frozen=True, eq=False)
class PaddedMicroBatch:
    """Tensors of one micro batch as a rectangle, one sequence a row. Writable."""

    token_ids: Tensor
    """int64 [B, W]; the padding token where none stands."""
    position_ids: Tensor
    """int64 [B, W], from 0 at each sequence's first token; 0 in padding."""
    attention_mask: Tensor
    """bool [B, W]: True where a token stands, also one of a dummy."""
    loss_mask: Tensor
    """bool [B, W]."""
    logprobs: Tensor
    """float32 [B, W]; 0 in padding."""
    advantages: Tensor
    """float32 [B, W]; 0 in padding."""
    temperature: Tensor
    """float32 [B, W]; 1 in padding, so that it may divide."""
    padding: Tensor
    """bool [B, W]: no token stands here, or one of a dummy. Must not count in a loss, an expert bias or a balance loss."""
    fields: Mapping[str, DenseTensor | RaggedTensor]
    """In cells [B, W]: dense rows [B, W, *row_shape]; ragged counts [B, W], whose columns hold the values of row after row."""
    lengths: Tensor
    """int32 [B]."""
    layout: Layout
    index: Tensor
    """int64 [B, W]: which packed token stands here, -1 in padding."""
    samples: tuple[str, ...]
    bytes_read: int = 0
    labels: Tensor | None = None
    """int64 [B, W], where the packed batch has them; ``NO_LABEL`` in padding."""

    def missing(self, name: str) -> Tensor:
        """bool [B, W]: a token that is no padding stands here, and the field's row is a filler, or empty because its values are missing."""
        return ~self.fields[name].valid & ~self.padding

    def packed(self) -> PackedMicroBatch:
        """The micro batch that was laid out, byte for byte (as changed since, where its tensors were)."""
        flat = self.index.flatten()
        back = _inverse(flat, int(self.lengths.sum()))
        cu_seqlens = torch.zeros(len(self.lengths) + 1, dtype=torch.int32, device=flat.device)
        torch.cumsum(self.lengths, 0, out=cu_seqlens[1:])
        return _gathered(_flattened(self), back, slots=np.full(len(back), -1), cells=None, cu_seqlens=cu_seqlens)


def padded(batch: PackedMicroBatch, layout: Layout, *, cells: PaddingCells) -> PaddedMicroBatch:
    """The packed micro batch as a rectangle [B, W]; balanced expert ids in its padding, as ``cells`` says.

    Raises ``PayloadError`` for a sequence that does not fit, or prompt lengths of other sequences, ``ConfigError`` for experts that do not
    divide by the shards.
    """
    lengths = batch.cu_seqlens.diff()
    index_BW = _index(layout, lengths.tolist())
    index = torch.from_numpy(index_BW.ravel()).to(batch.token_ids.device)
    flat = _gathered(batch, index, slots=_numbered(index_BW.ravel(), cells.first_slot), cells=cells, cu_seqlens=batch.cu_seqlens.clone())
    shape = index_BW.shape
    return PaddedMicroBatch(
        token_ids=flat.token_ids.reshape(shape),
        position_ids=flat.position_ids.reshape(shape),
        attention_mask=(index >= 0).reshape(shape),
        loss_mask=flat.loss_mask.reshape(shape),
        logprobs=flat.logprobs.reshape(shape),
        advantages=flat.advantages.reshape(shape),
        temperature=flat.temperature.reshape(shape),
        padding=flat.padding.reshape(shape),
        fields={name: _shaped(data, shape) for name, data in flat.fields.items()},
        lengths=lengths,
        layout=layout,
        index=index.reshape(shape),
        samples=batch.samples,
        bytes_read=batch.bytes_read,
        labels=None if flat.labels is None else flat.labels.reshape(shape),
    )


def arranged(batch: PackedMicroBatch, rows: PackedRows, *, cells: PaddingCells, targets_ahead: int = 0) -> PackedMicroBatch:
    """The packed micro batch in the rows of a plan: padded behind, padded per sequence, or one rank's part of it.

    ``rows.index()`` numbers the batch's tokens; padding is numbered by ``rows.row_slots()`` (``cells.first_slot`` plays no part).
    ``targets_ahead=1`` puts token-level targets to the rows that predict them, and adds ``labels``; fields stay at their own token's.
    Raises ``PayloadError`` for rows of other sequences.
    """
    if list(rows.lengths) != batch.cu_seqlens.diff().tolist():
        raise PayloadError(f"rows of sequences of {list(rows.lengths)} tokens asked of a batch of {batch.cu_seqlens.diff().tolist()}")
    device = batch.token_ids.device
    index, cu_seqlens = torch.from_numpy(rows.index()).to(device), torch.from_numpy(rows.cu_seqlens()).to(device)
    out = _gathered(batch, index, slots=rows.row_slots(), cells=cells, cu_seqlens=cu_seqlens)
    samples = tuple(batch.samples[n] for n in rows.sequences)
    out = replace(out, position_ids=torch.from_numpy(rows.positions()).to(device), samples=samples)
    if not targets_ahead:
        return out
    following = torch.from_numpy(rows.index(ahead=targets_ahead)).to(device)
    return replace(
        out,
        labels=gathered(batch.token_ids, following, fill=NO_LABEL),
        loss_mask=gathered(batch.loss_mask, following),
        logprobs=gathered(batch.logprobs, following),
        advantages=gathered(batch.advantages, following),
    )


def in_order(batch: PackedMicroBatch, rows: PackedRows) -> PackedMicroBatch:
    """Undoes ``arranged``, where the rows hold every token once. Raises ``PayloadError`` where they do not."""
    index = torch.from_numpy(rows.index()).to(batch.token_ids.device)
    back = _inverse(index, sum(rows.lengths))
    cu_seqlens = torch.from_numpy(np.cumsum([0, *rows.lengths]).astype(np.int32)).to(index.device)
    out = _gathered(batch, back, slots=np.full(len(back), -1), cells=None, cu_seqlens=cu_seqlens)
    names = dict(zip(rows.sequences, batch.samples, strict=True))
    return replace(out, samples=tuple(names[n] for n in range(len(rows.lengths))))


def _index(layout: Layout, lengths: list[int]) -> NDArray[np.int64]:
    match layout:
        case LeftPadded(width=width):
            return rectangle(lengths, width=width, pad="left")
        case RightPadded(width=width):
            return rectangle(lengths, width=width, pad="right")
        case PromptCompletion(prompt_lengths=prompts, prompt_width=prompt_width, completion_width=completion_width):
            if len(prompts) != len(lengths):
                raise PayloadError(f"{len(prompts)} prompt lengths for {len(lengths)} sequences")
            completions = [length - prompt for length, prompt in zip(lengths, prompts, strict=True)]
            return prompt_and_completion(prompts, completions, prompt_width=prompt_width, completion_width=completion_width)


def _gathered(
    batch: PackedMicroBatch, index: Tensor, *, slots: NDArray[np.int64], cells: PaddingCells | None, cu_seqlens: Tensor
) -> PackedMicroBatch:
    return PackedMicroBatch(
        token_ids=gathered(batch.token_ids, index, fill=cells.token_id if cells else 0),
        position_ids=gathered(batch.position_ids, index),
        cu_seqlens=cu_seqlens,
        loss_mask=gathered(batch.loss_mask, index),
        logprobs=gathered(batch.logprobs, index),
        advantages=gathered(batch.advantages, index),
        temperature=gathered(batch.temperature, index, fill=1),
        padding=gathered(batch.padding, index, fill=1),
        fields=gathered_fields(batch.fields, index, slots=slots, cells=cells),
        samples=batch.samples,
        bytes_read=batch.bytes_read,
        labels=None if batch.labels is None else gathered(batch.labels, index, fill=NO_LABEL),
    )


def _numbered(index: NDArray[np.int64], first: int) -> NDArray[np.int64]:
    """Slots of the padding in ``index``, counted on from ``first``."""
    padding = index < 0
    return np.where(padding, np.cumsum(padding) - 1 + first, -1)


def _inverse(index: Tensor, token_count: int) -> Tensor:
    """Where each of ``token_count`` tokens stands in ``index``, each of them once."""
    places = torch.nonzero(index >= 0).flatten()
    if len(places) != token_count or len(index[places].unique()) != token_count:
        raise PayloadError(f"{len(places)} rows of {token_count} tokens: a part of a micro batch, or repeated rows, cannot be put back")
    out = torch.empty(token_count, dtype=torch.int64, device=index.device)
    out[index[places]] = places
    return out


def _flattened(batch: PaddedMicroBatch) -> PackedMicroBatch:
    """The cells of a rectangle one after the other."""
    return PackedMicroBatch(
        token_ids=batch.token_ids.flatten(),
        position_ids=batch.position_ids.flatten(),
        cu_seqlens=batch.lengths,
        loss_mask=batch.loss_mask.flatten(),
        logprobs=batch.logprobs.flatten(),
        advantages=batch.advantages.flatten(),
        temperature=batch.temperature.flatten(),
        padding=batch.padding.flatten(),
        fields={name: _shaped(data, (batch.index.numel(),)) for name, data in batch.fields.items()},
        samples=batch.samples,
        bytes_read=batch.bytes_read,
        labels=None if batch.labels is None else batch.labels.flatten(),
    )


def _shaped(data: DenseTensor | RaggedTensor, shape: tuple[int, ...]) -> DenseTensor | RaggedTensor:
    """The field's cells in another shape."""
    if isinstance(data, DenseTensor):
        row_shape = data.rows.shape[data.valid.ndim :]
        return replace(data, rows=data.rows.reshape(*shape, *row_shape), valid=data.valid.reshape(shape))
    row_columns = {name: row.reshape(shape) for name, row in data.row_columns.items()}
    return replace(data, counts=data.counts.reshape(shape), valid=data.valid.reshape(shape), row_columns=row_columns)
