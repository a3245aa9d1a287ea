"""What goes through the model in place of a dropped micro batch, so that its forward still routes like real data.

Owns the order of sources: real rows of the same step on this rank, else of its last good step, else balanced
generated rows, which are counted. Refuses to give a stand-in any trained token.

Shape letters: T tokens, R kept rows, L layers, K experts per token, E experts.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fsref.plan import balanced_rows
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
            rows = torch.from_numpy(_generated(self._field, token_count)).to(device)
        else:
            rows = self._last[torch.arange(token_count, device=device) % len(self._last)]
        routing = DenseTensor(rows=rows, valid=torch.zeros(token_count, dtype=torch.bool, device=device))
        return StandIn(replace(batch, fields={ROUTING: routing}), generated=self._last is None)


def _generated(field: Field, token_count: int) -> NDArray[np.int32]:
    """[T, L, K], the same on every call: this trainer's experts are not split over ranks, and every dropped micro batch is its own."""
    layer_count, top_k = field.row_shape
    layer_ids = field.layer_ids or range(layer_count)
    return balanced_rows(range(token_count), step=0, layer_ids=layer_ids, top_k=top_k, expert_count=field.expert_count, shards=1)
