"""From reader buffers to torch tensors: a micro batch's sequences one after the other, or laid into a rectangle.

Every field is marked for what is real in it, and the result is byte for byte what the same arrays carried inline would give. Refuses I/O
and policy. Needs the extra ``torch``. ``dtypes`` (what stored numbers become), ``fields`` and ``batch`` (the structures), ``ranks`` (what a
rank read, as tensors), ``pinned`` (memory on the way to a GPU), ``gather`` and ``layouts`` (the same tokens in another order).
"""

from fsref.errors import MissingExtra

try:
    import torch as _torch  # noqa: F401 - proves the extra before a module below needs it
except ImportError as e:
    raise MissingExtra.of("torch", "torch") from e

from fsref.tensors.batch import NO_LABEL, PackedMicroBatch, pack_tokens
from fsref.tensors.dtypes import ExpertIds, dense_tensor, slice_dtype
from fsref.tensors.fields import DenseTensor, Densified, RaggedTensor
from fsref.tensors.gather import PaddingCells
from fsref.tensors.layouts import (
    Layout,
    LeftPadded,
    PaddedMicroBatch,
    PromptCompletion,
    RightPadded,
    arranged,
    in_order,
    padded,
)
from fsref.tensors.pinned import memory_for, pinned
from fsref.tensors.ranks import rank_batch, rank_tokens

__all__ = [
    "NO_LABEL",
    "DenseTensor",
    "Densified",
    "ExpertIds",
    "Layout",
    "LeftPadded",
    "PackedMicroBatch",
    "PaddedMicroBatch",
    "PaddingCells",
    "PromptCompletion",
    "RaggedTensor",
    "RightPadded",
    "arranged",
    "dense_tensor",
    "in_order",
    "memory_for",
    "pack_tokens",
    "padded",
    "pinned",
    "rank_batch",
    "rank_tokens",
    "slice_dtype",
]
