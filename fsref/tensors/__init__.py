"""From reader buffers to torch tensors: a micro batch's sequences one after the other, or laid into a rectangle.

Every field is marked for what is real in it, and the result is byte for byte what the same arrays carried inline would give. Refuses I/O
and policy. Needs the extra ``torch``. ``dtypes`` (what stored numbers become), ``fields`` and ``batch`` (the structures), ``assembly``
(buffers of one micro batch), ``ranks`` (a rank's part of it), ``gather`` and ``layouts`` (the same tokens in another order).
"""

from fsref.errors import MissingExtra

try:
    import torch as _torch  # noqa: F401 - proves the extra before a module below needs it
except ImportError as e:
    raise MissingExtra.of("torch", "torch") from e

from fsref.slices import fields_wanted
from fsref.tensors.assembly import Assembly
from fsref.tensors.batch import PackedMicroBatch, pack_tokens
from fsref.tensors.dtypes import ExpertIds
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
from fsref.tensors.ranks import rank_batch, rank_tokens

__all__ = [
    "Assembly",
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
    "fields_wanted",
    "in_order",
    "pack_tokens",
    "padded",
    "rank_batch",
    "rank_tokens",
]
