"""Writes the experts that a forward really used, for proofs and for looking into a run (``trainer.record_routes``).

Owns the files ``routes/step_000012/rank_0_micro_batch_1.npz``: ``token_ids`` int64 [T], ``cu_seqlens`` int32 [S + 1], ``samples`` [S] str,
``padding`` bool [T], ``valid`` bool [T] (the row that was asked for is a real one), ``experts`` [T, L, K] as read at the experts' input,
slots in order, L over the model's MoE layers, ascending.
"""

from pathlib import Path

import numpy as np

from fsref.folders import mapped
from fsref.loader.standin import ROUTING
from fsref.steps import step_name
from fsref.tensors import DenseTensor, PackedMicroBatch
from fsref.trainer.replay import RoutesUsed


def write_routes(parent: Path, batch: PackedMicroBatch, used: RoutesUsed, *, step: int, rank: int, micro_batch: int) -> Path:
    """Writes one micro batch and returns the file; ``used`` must have been captured. Raises ``StoreError``."""
    routing = batch.fields[ROUTING]
    assert isinstance(routing, DenseTensor)
    folder = parent / step_name(step)
    path = folder / f"rank_{rank}_micro_batch_{micro_batch}.npz"
    with mapped(f"writing {path}"):
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(
            path,
            token_ids=batch.token_ids.cpu().numpy(),
            cu_seqlens=batch.cu_seqlens.cpu().numpy(),
            samples=np.asarray(batch.samples),
            padding=batch.padding.cpu().numpy(),
            valid=routing.valid.cpu().numpy(),
            experts=used.dispatched.to("cpu").numpy().astype(np.int32),
        )
    return path
