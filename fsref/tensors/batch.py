"""A packed micro batch as tensors: its sequences one after the other, on one axis.

Shape letters: T tokens, S sequences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fsref.errors import StepError
from fsref.steps import MicroBatch
from fsref.tensors.fields import DenseTensor, RaggedTensor

NO_LABEL: Final = -100
"""What torch's cross entropy leaves out (``ignore_index``)."""


@dataclass(frozen=True, eq=False)
class PackedMicroBatch:
    """Tensors of one micro batch, sequences in packing order. Writable."""

    token_ids: Tensor
    """int64 [T]."""
    position_ids: Tensor
    """int64 [T], from 0 in every sequence."""
    cu_seqlens: Tensor
    """int32 [S + 1]; where rows are padded behind all sequences, that padding counts as one more."""
    loss_mask: Tensor
    """bool [T]."""
    logprobs: Tensor
    """float32 [T], the sampler's."""
    advantages: Tensor
    """float32 [T]."""
    temperature: Tensor
    """float32 [T]; 1 in padding rows."""
    padding: Tensor
    """bool [T]: tokens of dummies, and rows where no token stands. Must not count in a loss, an expert bias or a balance loss."""
    fields: Mapping[str, DenseTensor | RaggedTensor]
    """By name, those that a sequence brings."""
    samples: tuple[str, ...]
    bytes_read: int = 0
    labels: Tensor | None = None
    """int64 [T], where targets are those of the next token: the token that a row predicts, ``NO_LABEL`` where it predicts none. Then
    ``loss_mask``, ``logprobs``, ``advantages`` and target-aligned fields are that token's too. None: every target is its own token's."""
    """Fetched from storage for it."""

    @property
    def token_count(self) -> int:
        """Rows, padding included."""
        return len(self.token_ids)

    def missing(self, name: str) -> Tensor:
        """bool [T]: a token that is no padding stands here, and the field's row is a filler, or empty because its values are missing."""
        return ~self.fields[name].valid & ~self.padding


def pack_tokens(micro_batch: MicroBatch) -> PackedMicroBatch:
    """The token-level tensors of a micro batch, without any field. Raises ``StepError`` if a sequence's arrays differ in length."""
    sequences = micro_batch.sequences
    for s in sequences:
        if (len(s.loss_mask), len(s.logprobs) // 4, len(s.advantages) // 4) != (s.token_count,) * 3:
            raise StepError(f"sample {s.sample}: token ids, mask, logprobs and advantages differ in length")
    lengths = [s.token_count for s in sequences]
    return PackedMicroBatch(
        token_ids=torch.from_numpy(_joined([s.token_ids for s in sequences], "<i4").astype(np.int64)),
        position_ids=torch.from_numpy(np.concatenate([np.arange(n, dtype=np.int64) for n in lengths] or [np.zeros(0, np.int64)])),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)),
        loss_mask=torch.from_numpy(_joined([s.loss_mask for s in sequences], "u1").astype(np.bool_)),
        logprobs=torch.from_numpy(_joined([s.logprobs for s in sequences], "<f4").copy()),
        advantages=torch.from_numpy(_joined([s.advantages for s in sequences], "<f4").copy()),
        temperature=torch.from_numpy(np.repeat(np.asarray([s.temperature for s in sequences], np.float32), lengths)),
        padding=torch.from_numpy(np.repeat(np.asarray([s.padding for s in sequences], np.bool_), lengths)),
        fields={},
        samples=tuple(s.sample for s in sequences),
    )


def _joined(parts: Sequence[bytes], dtype: str) -> NDArray[Any]:
    return np.frombuffer(b"".join(parts), dtype)
