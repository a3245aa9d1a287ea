"""What goes through the model in place of a dropped micro batch, so that its forward still routes like real data.

Owns the order of sources: real rows of the same step on this rank, else of its last good step, else balanced
generated rows, which are counted. Refuses to give a stand-in any trained token.

Shape letters: T tokens, R kept rows, L layers, K experts per token, E experts.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from fsref.refs import Field
from fsref.tensors import DenseTensor, PackedMicroBatch

ROWS_MAX: Final = 4096
"""Rows that are remembered; more would add nothing to the balance."""
ROUTING: Final = "routed_experts"


@dataclass(frozen=True)
class StandIn:
    """A micro batch without loss."""

    batch: PackedMicroBatch
    generated: bool
    """Its rows were made up, because no real ones are at hand."""


def balanced_routes(token_count: int, *, layer_count: int, top_k: int, expert_count: int) -> Tensor:
    """int32 [T, L, K]: distinct experts in each row, every expert equally often up to one, the same on every call."""
    flat = torch.arange(token_count * top_k, dtype=torch.int32).reshape(token_count, 1, top_k) % expert_count
    return flat.expand(token_count, layer_count, top_k).contiguous()


class StandIns:
    """Builds stand-ins for one rank; remembers the rows of its last good step."""

    def __init__(self, field: Field | None) -> None:
        """``field``: the schema's ``routed_experts``, or None where a run has no routing."""
        self._field = field
        self._last: Tensor | None = None

    def learn(self, batches: Iterable[PackedMicroBatch]) -> None:
        """Remembers real rows of a step's fetched micro batches, before its stand-ins are built; keeps the older ones if there are none."""
        found: list[Tensor] = []
        count = 0
        for batch in batches:
            data = batch.fields.get(ROUTING)
            if not isinstance(data, DenseTensor) or count >= ROWS_MAX:
                continue
            rows = data.rows[data.valid & ~batch.padding][: ROWS_MAX - count]
            found.append(rows)
            count += len(rows)
        if count:
            self._last = torch.cat(found)

    def build(self, tokens: PackedMicroBatch) -> StandIn:
        """The token-level tensors of a dropped micro batch with borrowed routing and nothing to train."""
        token_count = len(tokens.token_ids)
        device = tokens.token_ids.device
        batch = replace(tokens, loss_mask=torch.zeros_like(tokens.loss_mask), padding=torch.ones_like(tokens.padding), fields={})
        if self._field is None:
            return StandIn(batch, generated=False)
        if self._last is None:
            layer_count, top_k = self._field.row_shape
            rows = balanced_routes(token_count, layer_count=layer_count, top_k=top_k, expert_count=self._field.expert_count).to(device)
        else:
            rows = self._last[torch.arange(token_count, device=device) % len(self._last)]
        routing = DenseTensor(rows=rows, valid=torch.zeros(token_count, dtype=torch.bool, device=device))
        return StandIn(replace(batch, fields={ROUTING: routing}), generated=self._last is None)
