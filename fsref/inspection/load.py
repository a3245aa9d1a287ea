"""Expert load: how often each expert was used, per layer. Shape letters: T tokens, L layers, K experts per token, E experts."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from fsref.refs import Dense, Field, flags_of


class LayerLoad(msgspec.Struct, frozen=True):
    """One layer's counts."""

    layer: int
    """Global layer id."""
    counts: tuple[int, ...]
    """Rows by expert id."""

    @property
    def busiest(self) -> float:
        """The busiest expert's share relative to an even one; 1.0 is balanced."""
        total = sum(self.counts)
        return max(self.counts) * len(self.counts) / total if total else 0.0

    @property
    def idle(self) -> int:
        """Experts that were never used."""
        return sum(1 for c in self.counts if c == 0)


def routing_field(fields: tuple[Field, ...]) -> Field | None:
    """The first dense field whose values are expert ids per layer."""
    return next((f for f in fields if f.expert_count and len(f.row_shape) == 2), None)


class LoadCounter:
    """Adds up rows of one field."""

    def __init__(self, field: Field) -> None:
        self.field = field
        self._counts_LE: NDArray[np.int64] = np.zeros((field.row_shape[0], field.expert_count), np.int64)

    def add(self, data: Dense, *, token_count: int) -> None:
        """Counts the real rows among the first ``token_count``; fillers of missing rows do not count."""
        real = ~flags_of(data.missing, len(data.rows))[:token_count]
        rows_TLK = data.rows[:token_count][real]
        for layer in range(rows_TLK.shape[1]):
            self._counts_LE[layer] += np.bincount(rows_TLK[:, layer].ravel(), minlength=self.field.expert_count)

    def layers(self) -> tuple[LayerLoad, ...]:
        """One record for each layer, in order."""
        ids = self.field.layer_ids or tuple(range(len(self._counts_LE)))
        return tuple(LayerLoad(i, tuple(map(int, c))) for i, c in zip(ids, self._counts_LE, strict=True))
