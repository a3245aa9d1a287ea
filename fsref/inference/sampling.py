"""Draws one token for each of many sequences, and says which tokens truncation kept and how probable the best ones were.

The order of vLLM: temperature, min-p, top-k, top-p. Logprobs are **processed**: of the distribution that was sampled from, after
temperature and renormalised over the tokens that truncation kept (vLLM's ``logprobs_mode=processed_logprobs``, which it asks for where
sampling masks are on). Kept tokens are always the most probable ones, so a mask is the head of one descending order, and top-k keeps
exactly k: of tokens tied across the cut an unspecified one stays.

Shape letters: B sequences, V vocabulary, M most probable tokens (all of them unless every sequence has a top-k).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsref.errors import MissingExtra

try:
    import torch
except ImportError as e:
    raise MissingExtra.of("demo", "torch") from e


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one sequence is sampled; values are checked where requests are parsed."""

    temperature: float
    """0 is greedy: no truncation, logprobs of the plain distribution."""
    top_p: float
    top_k: int
    """0: off."""
    min_p: float
    head: int | None
    """Entries of the top-k head; ``None``: no logprobs."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def truncates(self) -> bool:
        """Whether a sampling mask exists."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Drawn:
    """One token for each sequence: ``ids``, ``logprobs``, ``ranks`` and ``kept`` are [B], the tops [B, M]."""

    ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int64]
    """1 for the most probable token."""
    top_ids: NDArray[np.int64]
    """Descending in probability."""
    top_logprobs: NDArray[np.float32]
    """Minus infinity for tokens that truncation removed."""
    kept: NDArray[np.int64]
    """So many of ``top_ids`` were kept."""


@torch.inference_mode()
def draw(logits_BV: torch.Tensor, sampling: Sequence[Sampling], uniforms: Sequence[float]) -> Drawn:
    """``logits`` are float32; ``uniforms`` in [0, 1) decide (inverse of the cumulative distribution, most probable first)."""
    vocab = logits_BV.shape[1]
    scaled = logits_BV / torch.tensor([1.0 if s.greedy else s.temperature for s in sampling])[:, None]
    width = min(vocab, max(_width(s, vocab) for s in sampling))
    if width < vocab:
        values, ids = scaled.topk(width, dim=-1)
    else:
        values, ids = scaled.sort(dim=-1, descending=True, stable=True)
    logprobs, kept = _truncate(values, sampling)
    cumulative = logprobs.exp().cumsum(dim=-1)
    aim = torch.tensor(uniforms)[:, None] * cumulative[:, -1:]
    index = torch.minimum((cumulative <= aim).sum(dim=-1), kept - 1)
    index = torch.where(torch.tensor([s.greedy for s in sampling]), 0, index)[:, None]
    return Drawn(
        ids=ids.gather(1, index)[:, 0].numpy(),
        logprobs=logprobs.gather(1, index)[:, 0].numpy(),
        ranks=index[:, 0].numpy() + 1,
        top_ids=ids.numpy(),
        top_logprobs=logprobs.numpy(),
        kept=kept.numpy(),
    )


def _width(sampling: Sampling, vocab: int) -> int:
    """How many of the most probable tokens this sequence needs."""
    if sampling.greedy or sampling.top_k <= 0:
        return vocab
    return max(sampling.top_k, sampling.head or 0)


def _truncate(values_BM: torch.Tensor, sampling: Sequence[Sampling]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs [B, M] renormalised over the tokens kept, and how many they are [B]; ``values`` descend."""
    if not any(s.truncates for s in sampling):
        return values_BM.log_softmax(dim=-1), torch.full((len(values_BM),), values_BM.shape[1])
    on = [s.truncates for s in sampling]
    top_k = torch.tensor([s.top_k if t and s.top_k > 0 else 1 << 31 for s, t in zip(sampling, on, strict=True)])
    floor = torch.tensor([math.log(s.min_p) if t and s.min_p > 0 else -math.inf for s, t in zip(sampling, on, strict=True)])
    top_p = torch.tensor([s.top_p if t and s.top_p < 1 else 2.0 for s, t in zip(sampling, on, strict=True)])
    keep = torch.arange(values_BM.shape[1]) < top_k[:, None]
    keep &= values_BM >= values_BM[:, :1] + floor[:, None]
    probs = values_BM.masked_fill(~keep, -math.inf).softmax(dim=-1)
    keep &= probs.cumsum(dim=-1) - probs < top_p[:, None]  # a token stays if those before it do not fill top-p
    return values_BM.masked_fill(~keep, -math.inf).log_softmax(dim=-1), keep.sum(dim=-1)


def heads_sampled_first(
    top_ids_TK: NDArray[Any], top_logprobs_TK: NDArray[Any], ids_T: NDArray[Any], logprobs_T: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """vLLM's order of a head: the sampled token, then the most probable others; K entries in all, so the last gives way if need be."""
    count, width = top_ids_TK.shape
    same = top_ids_TK == ids_T[:, None]
    leaves = np.where(same.any(axis=1), same.argmax(axis=1), width - 1)
    stays = np.ones(top_ids_TK.shape, np.bool_)
    stays[np.arange(count), leaves] = False
    rest = (count, width - 1)
    ids = np.concatenate([ids_T[:, None], top_ids_TK[stays].reshape(rest)], axis=1)
    return ids, np.concatenate([logprobs_T[:, None], top_logprobs_TK[stays].reshape(rest)], axis=1)
