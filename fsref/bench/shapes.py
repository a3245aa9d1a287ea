"""Payloads of the shapes that real models have, from a seed.

Synthetic routing has a documented skew: in every layer the experts' popularity falls as 1 / rank^``skew``, in an order of its own, and a
token's experts are drawn by it without replacement, most probable first (Gumbel top-k). ``SKEW`` makes the busiest of 128 experts about
eight times as busy as an even share, as trained routers without a capacity limit are on one kind of text. Each layer of each token is
drawn on its own; a real router's layers and neighbours depend on each other, so real routing packs a little better.

Shape letters: T tokens, L layers, K experts per token, E experts, N values.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fsref.errors import ConfigError
from fsref.refs import Codec, Dense, Field, Payload, Ragged, Schema, TokenRange, expert_dtype, routed_experts, sampling_mask, top_logprobs

SKEW: Final = 0.7
PROMPT_SHARE: Final = 64
"""One token in so many is prompt: it has routing and no head."""
_BASE_ROWS: Final = 1024
VOCAB: Final = 151_936
MASK_MAX: Final = 64


@dataclass(frozen=True)
class Shape:
    """What one token's arrays look like."""

    name: str
    layers: int
    top_k: int
    experts: int
    head: int = 128
    """Entries of a top-k head; 0 for none."""
    masks: bool = True

    def schema(self, codec: Codec = Codec()) -> Schema:  # noqa: B008 - frozen
        """The run's schema."""
        fields: list[Field] = [routed_experts(layer_ids=range(self.layers), top_k=self.top_k, expert_count=self.experts)]
        fields += [top_logprobs()] if self.head else []
        fields += [sampling_mask()] if self.masks else []
        return Schema(tuple(fields), codec)

    def without(self, *, heads: bool, masks: bool) -> "Shape":
        """The same model with fewer fields."""
        parts = [self.name, *(["heads"] if heads else []), *(["masks"] if masks else [])]
        name = " + ".join(parts) if heads or masks else f"{self.name}, routing only"
        return Shape(name, self.layers, self.top_k, self.experts, self.head if heads else 0, masks)


SHAPES: Final = {
    "qwen3-30b": Shape("qwen3-30b", 48, 8, 128),
    "deepseek-v3": Shape("deepseek-v3", 58, 8, 256),
    "experts-512": Shape("experts-512", 48, 10, 512),
}
"""Qwen3-30B-A3B; DeepSeek-V3's 58 MoE layers; 48 layers of 10 of 512 experts, whose ids take two bytes."""


def shape_of(name: str) -> Shape:
    """The shape of that name; raises ``ConfigError`` that lists them."""
    if name not in SHAPES:
        raise ConfigError(f"shape {name!r} is unknown; there are {', '.join(SHAPES)}")
    return SHAPES[name]


def routing(rng: np.random.Generator, shape: Shape, tokens: int, *, skew: float = SKEW) -> NDArray[Any]:
    """Synthetic expert ids [T, L, K], without repeats in a row.

    A pool of 1,024 draws per layer, of which every token takes one at random: drawing each anew would take longer than what is measured.
    """
    out = np.empty((tokens, shape.layers, shape.top_k), expert_dtype(shape.experts))
    popularity = -skew * np.log(np.arange(1, shape.experts + 1, dtype=np.float32))
    for layer in range(shape.layers):
        scores = popularity[rng.permutation(shape.experts)] + rng.gumbel(size=(min(tokens, _BASE_ROWS), shape.experts)).astype(np.float32)
        order = np.argsort(-scores, axis=1)[:, : shape.top_k].astype(out.dtype)
        out[:, layer] = order[rng.integers(0, len(order), tokens)]
    return out


def ragged(rng: np.random.Generator, counts_T: NDArray[np.int32], *, logprobs: bool) -> Ragged:
    """Ids from all over the vocabulary without repeats in a row, and logprobs that descend by exponential steps."""
    total = int(counts_T.sum())
    starts = np.cumsum(counts_T) - counts_T
    within = np.arange(total) - np.repeat(starts, counts_T)
    strides = (
        2 * rng.integers(1, 593, len(counts_T)) + 1
    )  # odd and below 1,187: shares no factor with the vocabulary, so a row's ids differ
    at = np.repeat(rng.integers(0, VOCAB, len(counts_T)), counts_T) + within * np.repeat(strides, counts_T)
    columns: dict[str, NDArray[Any]] = {"ids": rng.permutation(VOCAB).astype(np.int32)[at % VOCAB]}
    if logprobs:
        steps = rng.exponential(0.12, total)
        sums = np.cumsum(steps)
        columns["logprobs"] = (np.repeat((sums - steps)[np.minimum(starts, max(total - 1, 0))] if total else sums, counts_T) - sums).astype(
            np.float32
        )
    return Ragged(counts_T, columns)


def payload(shape: Shape, tokens: int, *, seed: int = 0, routes: NDArray[Any] | None = None, skew: float = SKEW) -> Payload:
    """One branch of ``tokens`` tokens; ``routes`` [T, L, K] instead of synthetic routing. The last row is missing, as it is in life."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCAB, tokens).astype(np.int32)
    sampled = np.arange(tokens) >= tokens // PROMPT_SHARE
    rows = routing(rng, shape, tokens, skew=skew) if routes is None else routes
    missing = (TokenRange(tokens - 1, tokens),) if tokens > 1 else ()
    fields: dict[str, Dense | Ragged] = {"routed_experts": Dense(rows, missing)}
    if shape.head:
        fields["top_logprobs"] = ragged(rng, np.where(sampled, shape.head, 0).astype(np.int32), logprobs=True)
    if shape.masks:
        kept = np.where(sampled, rng.integers(1, MASK_MAX + 1, tokens), 0).astype(np.int32)
        fields["sampling_mask"] = ragged(rng, kept, logprobs=False)
    return Payload(ids, fields)


def raw_bytes(data: Payload) -> int:
    """Bytes of the arrays themselves."""
    return sum(
        d.rows.nbytes if isinstance(d, Dense) else d.counts.nbytes + sum(c.nbytes for c in (*d.columns.values(), *d.row_columns.values()))
        for d in data.fields.values()
    )
