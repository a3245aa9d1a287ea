"""Checkpoints: ``checkpoints/step_000012`` holds all that is needed to go on after 12 optimiser steps, on every rank.

Owns the file's content and its checks. A checkpoint of version v covers the steps below v: their arrays may be removed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsref.errors import ConfigError, ObjectCorrupt
from fsref.folders import mapped, publish, published, remove

_FILE: Final = "state.pt"
_FORMAT: Final = 1


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    version: int
    folder: Path


def newest(parent: Path) -> Checkpoint | None:
    """The checkpoint with the highest version; ``None`` if there is none."""
    found = published(parent)
    return Checkpoint(max(found), found[max(found)]) if found else None


def save(parent: Path, *, run: str, version: int, generators: Sequence[Tensor], model: nn.Module, optimizer: Optimizer) -> None:
    """Durable on return. ``generators``: the random state of every rank. Raises ``StoreError`` subclasses."""
    state = {
        "format": _FORMAT,
        "run": run,
        "version": version,
        "generators": list(generators),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    existing = published(parent).get(version)
    if existing is not None:
        remove(existing)
    publish(parent, version, lambda folder: torch.save(state, folder / _FILE))


def load(rank: int, world_size: int, checkpoint: Checkpoint, *, run: str, model: nn.Module, optimizer: Optimizer) -> None:
    """Puts model, optimiser and random state back, bit for bit. Raises ``ConfigError`` for another run or number of ranks."""
    path = checkpoint.folder / _FILE
    with mapped(f"reading {path}"):
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, ValueError) as e:
            raise ObjectCorrupt(
                f"the checkpoint {path} cannot be read: {e}; without its folder the one before is used, if its steps are not released"
            ) from e
    found = (state.get("format"), state.get("run"), state.get("version"))
    if found != (_FORMAT, run, checkpoint.version):
        raise ConfigError(f"{path} is of format, run and version {found}, not of {(_FORMAT, run, checkpoint.version)}")
    if len(state["generators"]) != world_size:
        raise ConfigError(f"{path} was written by {len(state['generators'])} ranks, {world_size} were started: set trainer.parallel.data")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["generators"][rank])
