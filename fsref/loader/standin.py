"""What goes through the model in place of a dropped micro batch, so that its forward still routes like real data.

Owns the order of sources: real rows of the same step on this rank, else of its last good step, else balanced
generated rows, which are counted. Refuses to give a stand-in any trained token.

Shape letters: T tokens, R kept rows, L layers, K experts per token, E experts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fsref.parallel import Coordinate, Parallel
from fsref.plan import balanced_rows, held_layers
from fsref.refs import Field, Schema
from fsref.tensors import DenseTensor, ExpertIds, PackedMicroBatch, dense_tensor

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

    def __init__(
        self, field: Field | None, *, layers: Sequence[int] | None = None, shards: int = 1, expert_ids: ExpertIds = "int32"
    ) -> None:
        """``field``: the schema's ``routed_experts``, or None where a run has no routing. ``layers``: the rank's, None for all.
        ``expert_ids``: the form of the ids in the batches."""
        self._layers = () if field is None else field.layer_ids if layers is None else held_layers(field, layers)
        self._field = None if field is not None and field.layer_ids and not self._layers else field
        self._shards, self._expert_ids = shards, expert_ids
        self._last: Tensor | None = None

    @classmethod
    def of(cls, schema: Schema, parallel: Parallel, at: Coordinate, *, expert_ids: ExpertIds = "int32") -> "StandIns":
        """For one rank of a layout."""
        field = next((f for f in schema.fields if f.name == ROUTING), None)
        return cls(field, layers=parallel.layers(at), shards=parallel.expert_shards, expert_ids=expert_ids)

    def learn(self, batches: Iterable[PackedMicroBatch]) -> None:
        """Remembers real rows of those micro batches of a step that train, before its stand-ins are built; keeps the older ones if there
        are none. Only of those: tensor parallel ranks must remember the same rows, also where one of them has fetched more than the other.
        """
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
            rows = dense_tensor(self._generated(self._field, token_count), self._field, self._expert_ids).to(device)
        else:
            rows = self._last[torch.arange(token_count, device=device) % len(self._last)]
        routing = DenseTensor(
            rows=rows,
            valid=torch.zeros(token_count, dtype=torch.bool, device=device),
            layer_ids=self._layers,
            expert_count=self._field.expert_count,
        )
        return StandIn(replace(batch, fields={ROUTING: routing}), generated=self._last is None)

    def _generated(self, field: Field, token_count: int) -> NDArray[np.int32]:
        """[T, L, K], the same on every call and on every rank of a data rank."""
        layer_count, top_k = field.row_shape
        layer_ids = self._layers or range(layer_count)
        return balanced_rows(
            range(token_count), step=0, layer_ids=layer_ids, top_k=top_k, expert_count=field.expert_count, shards=self._shards
        )
