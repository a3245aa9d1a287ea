"""From what the loader handed out to what goes through the model: fetched micro batches as they are, dropped ones as stand-ins."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsref.loader.agreement import Agreement, Taken
from fsref.loader.standin import StandIns
from fsref.steps import MicroBatch
from fsref.tensors import PackedMicroBatch


def ready_batches(taken: Taken, agreement: Agreement, stand_ins: StandIns, *, device: torch.device) -> tuple[list[PackedMicroBatch], int]:
    """The step's micro batches in order, on ``device``, and how many stand-ins route by made-up rows.

    A micro batch that another rank of the same data rank failed to fetch is a stand-in too.
    """
    moved = [on_device(t if isinstance(t, PackedMicroBatch) else t.batch, device) for t in taken]
    stand_ins.learn(m for m, dropped in zip(moved, agreement.dropped, strict=True) if not dropped)
    out: list[PackedMicroBatch] = []
    generated = 0
    for batch, dropped in zip(moved, agreement.dropped, strict=True):
        if not dropped:
            out.append(batch)
            continue
        stand_in = stand_ins.build(batch)
        generated += stand_in.generated
        out.append(stand_in.batch)
    return out, generated


def fresh_tokens(micro_batch: MicroBatch, *, version: int, device: torch.device) -> Tensor:
    """bool [T]: tokens of samples that no weights but those of ``version`` sampled."""
    return torch.cat([torch.full((s.token_count,), s.version == version, dtype=torch.bool) for s in micro_batch.sequences]).to(device)


def on_device(batch: PackedMicroBatch, device: torch.device) -> PackedMicroBatch:
    """The same batch with every tensor on ``device``; itself where it is there already."""
    if batch.token_ids.device == device:
        return batch
    moved = _moved(batch, device)
    assert isinstance(moved, PackedMicroBatch)
    return moved


def copied_to(device: torch.device) -> Callable[[], None] | None:
    """Waits for the copies to ``device`` that were begun so far; None where nothing is copied."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    wait: Callable[[], None] = event.synchronize
    return wait


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {k: _moved(v, device) for k, v in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _moved(getattr(value, f.name), device) for f in fields(value)})
    return value
