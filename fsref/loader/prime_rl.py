"""A rank's micro batch under prime-rl's names and in its shapes, for its trainer's forward and loss.

Owns the names of ``prime_rl.trainer.rl.data.TensorMicroBatch`` (read in its source of 2026; a batch axis of 1 everywhere). Refuses what
fsref does not carry: images, and which LoRA adapter a token belongs to. Imports nothing of prime-rl.

Its context parallelism cuts the whole packed axis into equal parts, which is ``layout = "allgather"``.
"""

from typing import Any, TypedDict

import torch
from torch import Tensor

from fsref.errors import ConfigError, PayloadError
from fsref.loader.loader import ReadyMicroBatch
from fsref.loader.standin import ROUTING
from fsref.tensors import DenseTensor


class PrimeAdvantage(TypedDict):
    """One loss of a micro batch."""

    loss: str
    values: Tensor
    """float32 [1, seq]."""
    mask: Tensor
    """bool [1, seq]."""


class PrimeMicroBatch(TypedDict):
    """As prime-rl's trainer takes it; seq are this rank's rows, padding included."""

    input_ids: Tensor
    """int64 [1, seq]."""
    position_ids: Tensor
    """int64 [1, seq]."""
    advantages: Any
    """float32 [1, seq], or a list of ``PrimeAdvantage`` where a loss was named."""
    loss_mask: Tensor
    """bool [1, seq]."""
    inference_logprobs: Tensor
    """float32 [1, seq]."""
    temperatures: Tensor
    """float32 [1, seq]."""
    routed_experts: Tensor | None
    """int32 [1, seq, layers, top_k], over this rank's layers in its order; None where the micro batch has none."""
    sequence_lengths: list[int]
    """Rows of each sequence here, in order, its padding included; padding behind all of them counts as one more. They add up to seq."""
    lora_num_tokens: Tensor
    """int32 [loras]: all tokens belong to the first."""
    rewards: None
    mm_kwargs: None
    mm_token_type_ids: None


def prime_micro_batch(ready: ReadyMicroBatch, *, loss: str = "", loras: int = 1) -> PrimeMicroBatch:
    """The same memory under other names; nothing is copied.

    ``loss``: releases that train several losses at once take ``advantages`` as a list of one entry for each; name the one that these are
    for. Empty: older ones, which take a tensor. Raises ``PayloadError`` for expert ids that are not int32, ``ConfigError`` for no adapter.
    """
    batch = ready.tensors
    if loras < 1:
        raise ConfigError(f"{loras} LoRA adapters: tokens belong to the first of at least one")
    values, mask = batch.advantages.unsqueeze(0), batch.loss_mask.unsqueeze(0)
    channel: PrimeAdvantage = {"loss": loss, "values": values, "mask": mask}
    counts = torch.zeros(loras, dtype=torch.int32)
    counts[0] = batch.token_count
    return {
        "input_ids": batch.token_ids.unsqueeze(0),
        "position_ids": batch.position_ids.unsqueeze(0),
        "advantages": [channel] if loss else values,
        "loss_mask": mask,
        "inference_logprobs": batch.logprobs.unsqueeze(0),
        "temperatures": batch.temperature.unsqueeze(0),
        "routed_experts": _routing(ready),
        "sequence_lengths": batch.cu_seqlens.diff().tolist(),
        "lora_num_tokens": counts,
        "rewards": None,
        "mm_kwargs": None,
        "mm_token_type_ids": None,
    }


def _routing(ready: ReadyMicroBatch) -> Tensor | None:
    data = ready.tensors.fields.get(ROUTING)
    if data is None:
        return None
    if not isinstance(data, DenseTensor) or data.rows.dtype != torch.int32 or data.rows.ndim != 3:
        raise PayloadError(f"micro batch {ready.number}: {ROUTING} is not int32 [tokens, layers, top_k]: read it as int32")
    return data.rows.unsqueeze(0)
