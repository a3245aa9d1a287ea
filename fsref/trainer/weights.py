"""Weights for inference: ``weights/step_000012`` holds the policy after 12 optimiser steps.

Owns the folder's form: a Hugging Face folder with bfloat16 safetensors under the names of the published architecture (experts one by
one, as every engine reads them), config and tokenizer beside them, ``STABLE`` last. Version 0 is the run's initial model and is not
exported.
"""

import json
import shutil
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from fsref.folders import publish, published, remove
from fsref.trainer.model import save_model

_NOT_COPIED: Final = (".safetensors", ".bin", ".pt", ".gguf", ".index.json")


def export(model: nn.Module, *, version: int, parent: Path, base: Path) -> Path:
    """Writes version ``version`` and returns its folder; the model itself stays float32.

    ``base`` is the initial model's folder, whose config and tokenizer are copied, so that an engine that read it reads this too.
    Raises ``StoreError`` subclasses.
    """

    def write(folder: Path) -> None:
        save_model(model, folder, _rounded(model.state_dict()))
        for path in base.iterdir():
            if path.is_file() and not path.name.endswith(_NOT_COPIED):
                shutil.copyfile(path, folder / path.name)
        settings = json.loads((base / "config.json").read_text(encoding="utf-8"))
        settings.pop("torch_dtype", None)
        (folder / "config.json").write_text(json.dumps(settings | {"dtype": "bfloat16"}, indent=2), encoding="utf-8")

    existing = published(parent).get(version)
    if existing is not None:  # trained again after a restart
        remove(existing)
    return publish(parent, version, write)


def _rounded(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Floats as bfloat16 on the CPU; tensors that share memory still do, so that tied weights are written once."""
    copies: dict[tuple[int, torch.Size], Tensor] = {}
    out = {}
    for name, tensor in state.items():
        key = tensor.data_ptr(), tensor.shape
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)
        out[name] = copies[key]
    return out


def remove_future(parent: Path, *, version: int) -> None:
    """Removes exports newer than ``version``: a run that resumes there will make them anew."""
    for found, folder in published(parent).items():
        if found > version:
            remove(folder)
