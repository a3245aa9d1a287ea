"""The policy: loading it, and its packed forward.

Owns loading, the packed forward and saving. Refuses padding to a rectangle: sequences of a micro batch are packed one after the other
(shape [1, T]), position ids restart with each, and each sees itself alone (``attention``).
"""

from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from fsref.errors import ConfigError, MissingExtra
from fsref.tensors import PackedMicroBatch
from fsref.trainer import attention

try:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging
except ImportError as e:
    raise MissingExtra.of("demo", "transformers") from e


class Policy(Protocol):
    """What the trainer uses of a transformers model besides ``nn.Module``."""

    def save_pretrained(self, save_directory: str, *, state_dict: dict[str, Tensor]) -> None: ...


def load_policy(folder: Path, *, device: torch.device) -> nn.Module:
    """The model in ``folder`` (Hugging Face format) with float32 parameters, in train mode; never downloads.

    Raises ``ConfigError`` if the folder holds no model.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"no model in {str(folder)!r} (config.json is missing): set model.path, or start the run with `fsref run`")
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention.NAME, local_files_only=True
        )
    except (OSError, ValueError) as e:
        raise ConfigError(f"the model in {str(folder)!r} cannot be loaded: {e}") from e
    model.config.use_cache = False
    return cast("nn.Module", model.to(device).train())


def logits_at(model: nn.Module, batch: PackedMicroBatch, rows_N: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Logits [N, V] that predict the tokens at ``rows_N`` (each at least one position into its sequence), from one packed forward.

    Matrix products run in ``dtype`` (bfloat16 through autocast), parameters stay float32. Only N rows of logits are made; with N = 0 the
    forward runs all the same.
    """
    with torch.autocast(batch.token_ids.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        output: Any = model(
            input_ids=batch.token_ids.unsqueeze(0),
            position_ids=batch.position_ids.unsqueeze(0),
            use_cache=False,
            logits_to_keep=rows_N - 1,
            **{attention.LENGTHS: batch.cu_seqlens.diff().tolist()},
        )
    return cast("Tensor", output.logits[0])


def save_model(model: nn.Module, folder: Path, state: dict[str, Tensor]) -> None:
    """Writes ``state`` in place of the model's own parameters as a Hugging Face folder, under the published names."""
    cast("Policy", model).save_pretrained(str(folder), state_dict=state)
