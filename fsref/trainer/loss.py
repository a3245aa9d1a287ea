r"""The objective: a policy gradient with IcePop's band as mask and score centering over the sampler's top-k head.

Owns the loss of one packed micro batch from the logits at its trained tokens, in float32, and the sums that the metrics are made of.
Refuses to normalise: it returns sums over tokens; the division by the step's trained tokens over all ranks is the step's.

Notation for one trained token with prefix h: ``a`` is the sampled token, ``q`` the sampler's distribution, ``p`` the trainer's, both
after temperature and after the filters (top-k, top-p, min-p) of the sampler; ``A`` the advantage; ``sg`` stops gradients.

**Trainer logprobs.** ``p(v) = exp(z_v / temperature) / sum over u in S``, where S is the token's kept set (field ``sampling_mask``)
and always holds the sampled token. A token with an empty mask row was sampled without filters: S is the vocabulary.

**IcePop** (arXiv 2510.18855): the calibration ``M(k) = k if low <= k <= high else 0`` of the ratio ``k = p(a) / q(a)`` removes tokens on
which trainer and sampler disagree. ``ratio_weight`` chooses the weight ``w``: ``M`` itself, or (default) the band as a mask,
``w(k) = 1 if low <= k <= high else 0``, because score centering corrects what the factor ``k`` would. Masked tokens still count in the
denominator.

**Score centering** (Marek and Ryabinin, arXiv 2609.20807; also NovaSky-AI/SkyRL#2244 and radixark/miles#3317). With samples from q the
expected update ``E_q[A w s]``, ``s_v = grad log p(v)``, holds the drift ``E_q[A] E_q[w s]``, which does not vanish for q unlike p and adds
up over steps. Subtracting the sampler's expected weighted score leaves the covariance only::

    loss = - A ( sg(w_a) log p(a)  -  c  sum_v sg(q_v w_v) log p(v) ),        c = center_weight, 1 in the paper

The sampler's head H (field ``top_logprobs``) is exact. **Tail**: outside H, q is modelled as the trainer's tail, scaled to the mass that
is left, ``q_v = alpha p_v`` with ``alpha = (1 - sum_H q) / (1 - sum_H p)``. As ``sum_v p_v s_v = 0``, the tail folds back onto the head, so
that only head logits are needed::

    sum_v q_v w_v s_v  =  sum_H ( w(p_v / q_v) q_v  -  w(1 / alpha) alpha p_v ) s_v

The sum runs at every trained token with a head, also at those whose sampled token is masked: only so is the weighted score centred.

**Mismatch KL**: the k3 estimate ``(k - 1) - log k`` of KL(q || p) at the sampled tokens (masked ones included).

Shape letters: N trained tokens, V vocabulary, M values of a ragged field in those N rows.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fsref.config import LossSection
from fsref.errors import PayloadError
from fsref.tensors import PackedMicroBatch, RaggedTensor

SUMS: Final = (
    "tokens",
    "tokens_masked",
    "tokens_unscored",
    "tokens_missing",
    "loss",
    "loss_policy",
    "loss_center",
    "mismatch_kl",
    "tokens_fresh",
    "mismatch_kl_fresh",
    "entropy",
    "tokens_kept_set",
    "kept_set_size",
    "kept_set_without_sampled",
    "tokens_head",
    "head_mass",
    "head_outside_kept_set",
)
"""Names of the sums in ``MicroBatchLoss.sums``, in order."""

_TAIL_MASS_MIN: Final = 1e-6
"""Below this trainer mass the tail is empty up to float32 rounding; its score is then zero whatever alpha is."""
_LOG_RATIO_MAX: Final = 60.0
"""Keeps ``exp`` finite in float32; such tokens are masked anyway."""


@dataclass(frozen=True, eq=False)
class MicroBatchLoss:
    """Sums over one micro batch's trained tokens."""

    loss: Tensor
    """Scalar with gradient: not yet divided by the step's trained tokens."""
    sums: Tensor
    """float64 [len(SUMS)], without gradient."""


@dataclass(frozen=True, eq=False)
class _Values:
    """Ragged rows of the trained tokens: value m belongs to trained token ``row[m]``."""

    row: Tensor
    ids: Tensor
    extra: Tensor | None
    count: Tensor


def trained_rows(batch: PackedMicroBatch) -> Tensor:
    """int64 [N]: positions of the tokens that train, ascending.

    Raises ``PayloadError`` if the first token of a sequence is marked as trained: nothing predicts it.
    """
    starts = batch.cu_seqlens[:-1].long()
    starts = starts[starts < len(batch.loss_mask)]
    if bool(batch.loss_mask[starts].any()):
        raise PayloadError("the loss mask holds the first token of a sequence, which nothing predicts: check the sample's prompt")
    return batch.loss_mask.nonzero(as_tuple=True)[0]


def micro_batch_loss(
    logits_NV: Tensor, batch: PackedMicroBatch, rows_N: Tensor, *, config: LossSection, fresh_T: Tensor | None = None
) -> MicroBatchLoss:
    """The loss of the trained tokens ``rows_N`` of ``batch`` from the logits that predict them (row n predicts token ``rows_N[n]``).

    ``fresh_T``: bool [T], tokens that were sampled with the very weights that train now; their mismatch is summed apart, because what is
    left there is the engines' difference alone.

    Logits of any float dtype; everything is computed in float32. Raises ``PayloadError`` for a temperature of zero or ids outside the
    vocabulary.
    """
    temperature_N = batch.temperature[rows_N]
    if bool((temperature_N <= 0).any()):
        raise PayloadError("a trained token has temperature 0: its sampler has no distribution to train on")
    z_NV = logits_NV.float() / temperature_N.float().unsqueeze(1)
    sampled_N = batch.token_ids[rows_N]
    kept = _kept_sets(batch, rows_N, sampled_N, vocabulary=z_NV.shape[1])
    log_norm_N = _log_norm(z_NV, kept)
    logp_N = _gather(z_NV, sampled_N) - log_norm_N
    logq_N = batch.logprobs[rows_N].float()
    advantage_N = batch.advantages[rows_N].float()

    log_ratio_N = logp_N.detach() - logq_N
    keep_N = _in_band(log_ratio_N, config)
    policy_N = -advantage_N * _weight(log_ratio_N, config) * logp_N
    head = _head(batch, rows_N, kept, vocabulary=z_NV.shape[1])
    center_N, head_mass_N = _expected_score(z_NV, log_norm_N, head.values, config)
    center_N = config.center_weight * advantage_N * center_N
    loss = (policy_N + center_N).sum()

    scored_N = torch.isfinite(log_ratio_N)
    k3_N = torch.where(scored_N, torch.expm1(log_ratio_N.clamp(max=_LOG_RATIO_MAX)) - log_ratio_N, torch.zeros_like(log_ratio_N))
    fresh_N = scored_N & fresh_T[rows_N] if fresh_T is not None else torch.zeros_like(scored_N)
    sums = {
        "tokens": torch.ones_like(logp_N),
        "tokens_masked": ~keep_N,
        "tokens_unscored": ~scored_N,
        "tokens_missing": _missing(batch, rows_N),
        "loss": policy_N + center_N,
        "loss_policy": policy_N,
        "loss_center": center_N,
        "mismatch_kl": k3_N,
        "tokens_fresh": fresh_N,
        "mismatch_kl_fresh": torch.where(fresh_N, k3_N, torch.zeros_like(k3_N)),
        "entropy": _entropy(z_NV.detach(), log_norm_N.detach(), kept),
        "tokens_kept_set": kept.masked,
        "kept_set_size": torch.where(kept.masked, kept.values.count, torch.zeros_like(kept.values.count)),
        "kept_set_without_sampled": kept.sampled_absent,
        "tokens_head": head.values.count > 0,
        "head_mass": head_mass_N,
        "head_outside_kept_set": head.outside,
    }
    return MicroBatchLoss(loss, torch.stack([sums[name].detach().double().sum() for name in SUMS]))


def _missing(batch: PackedMicroBatch, rows_N: Tensor) -> Tensor:
    """bool [N]: a row of some field that this token's loss rests on is a filler: its own, or for dense fields the one of the token fed
    before it."""
    out_N = torch.zeros_like(rows_N, dtype=torch.bool)
    for data in batch.fields.values():
        out_N |= ~data.valid[rows_N if isinstance(data, RaggedTensor) else rows_N - 1]
    return out_N


def _gather(z_NV: Tensor, ids_N: Tensor) -> Tensor:
    return z_NV.gather(1, ids_N.unsqueeze(1)).squeeze(1)


def _in_band(log_ratio: Tensor, config: LossSection) -> Tensor:
    """Whether exp(log_ratio) lies in the closed band; NaN does not."""
    low = math.log(config.ratio_low) if config.ratio_low > 0 else -math.inf
    return (log_ratio >= low) & (log_ratio <= math.log(config.ratio_high))


def _weight(log_ratio: Tensor, config: LossSection) -> Tensor:
    """``w`` of the module's docstring: 0 outside the band."""
    inside = _in_band(log_ratio, config)
    return torch.where(inside, torch.exp(log_ratio) if config.ratio_weight else torch.ones_like(log_ratio), torch.zeros_like(log_ratio))


def _ragged_rows(data: RaggedTensor | None, rows_N: Tensor, *, column: str | None, vocabulary: int, name: str) -> _Values:
    """The values of the rows ``rows_N``, flat, in row order; no values where the field is absent."""
    if data is None:
        none = torch.zeros(0, dtype=torch.int64, device=rows_N.device)
        return _Values(none, none, none.float() if column else None, torch.zeros_like(rows_N))
    counts_T = data.counts.long()
    count_N = counts_T[rows_N]
    row_M = torch.repeat_interleave(torch.arange(len(rows_N), device=rows_N.device), count_N)
    within_M = torch.arange(len(row_M), device=rows_N.device) - (count_N.cumsum(0) - count_N)[row_M]
    at_M = (counts_T.cumsum(0) - counts_T)[rows_N][row_M] + within_M
    ids_M = data.columns["ids"][at_M].long()
    if len(ids_M) and not (int(ids_M.min()) >= 0 and int(ids_M.max()) < vocabulary):
        raise PayloadError(f"{name} holds token ids {int(ids_M.min())} to {int(ids_M.max())}, the model's vocabulary has {vocabulary}")
    return _Values(row_M, ids_M, data.columns[column][at_M].float() if column else None, count_N)


def _first_of_each(values: _Values, keep_M: Tensor, vocabulary: int) -> Tensor:
    """bool [M]: of the values to keep, the first of each (row, id): ties and appended sampled tokens name an id twice."""
    key_M = torch.where(keep_M, values.row * vocabulary + values.ids, torch.full_like(values.row, -1))
    sorted_M, order_M = key_M.sort(stable=True)
    first_M = torch.ones_like(keep_M)
    first_M[1:] = sorted_M[1:] != sorted_M[:-1]
    out_M = torch.empty_like(keep_M)
    out_M[order_M] = first_M
    return out_M & keep_M


def _chosen(values: _Values, choice_M: Tensor, row_count: int) -> _Values:
    row_M = values.row[choice_M]
    extra = None if values.extra is None else values.extra[choice_M]
    return _Values(row_M, values.ids[choice_M], extra, torch.bincount(row_M, minlength=row_count))


@dataclass(frozen=True, eq=False)
class _KeptSets:
    values: _Values
    """Distinct ids of each kept set, the sampled token among them; none for unmasked rows."""
    masked: Tensor
    sampled_absent: Tensor


def _kept_sets(batch: PackedMicroBatch, rows_N: Tensor, sampled_N: Tensor, *, vocabulary: int) -> _KeptSets:
    data = batch.fields.get("sampling_mask")
    assert data is None or isinstance(data, RaggedTensor), "sampling_mask is ragged"
    given = _ragged_rows(data, rows_N, column=None, vocabulary=vocabulary, name="sampling_mask")
    masked_N = given.count > 0
    holds_N = torch.zeros_like(masked_N)
    holds_N[given.row[given.ids == sampled_N[given.row]]] = True
    absent_N = masked_N & ~holds_N
    extra_rows = absent_N.nonzero(as_tuple=True)[0]
    joined = _Values(torch.cat([given.row, extra_rows]), torch.cat([given.ids, sampled_N[extra_rows]]), None, given.count)
    keep_M = torch.ones_like(joined.row, dtype=torch.bool)
    values = _chosen(joined, _first_of_each(joined, keep_M, vocabulary), len(rows_N))
    return _KeptSets(values, masked_N, absent_N)


def _log_norm(z_NV: Tensor, kept: _KeptSets) -> Tensor:
    """[N]: log of the sum of exp(z) over each token's kept set, or over the vocabulary where there is none."""
    out_N = z_NV.new_zeros(len(z_NV))
    free = (~kept.masked).nonzero(as_tuple=True)[0]
    if len(free):
        out_N = out_N.index_put((free,), torch.logsumexp(z_NV[free], dim=1))
    masked = kept.masked.nonzero(as_tuple=True)[0]
    if len(masked):
        row_M = kept.values.row
        z_M = z_NV[row_M, kept.values.ids]
        peak_N = z_NV.new_full((len(z_NV),), -math.inf).scatter_reduce(0, row_M, z_M.detach(), "amax")
        total_N = z_NV.new_zeros(len(z_NV)).index_add(0, row_M, torch.exp(z_M - peak_N[row_M]))
        out_N = out_N.index_put((masked,), peak_N[masked] + torch.log(total_N[masked]))
    return out_N


@dataclass(frozen=True, eq=False)
class _Head:
    values: _Values
    outside: Tensor


def _head(batch: PackedMicroBatch, rows_N: Tensor, kept: _KeptSets, *, vocabulary: int) -> _Head:
    """The sampler's head over distinct ids inside the kept set; ids outside are left out, and counted if they have any probability.

    Engines pad a head with logprobs of -inf or -9999: the sampler's probability is known to be zero there.
    """
    data = batch.fields.get("top_logprobs")
    assert data is None or isinstance(data, RaggedTensor), "top_logprobs is ragged"
    given = _ragged_rows(data, rows_N, column="logprobs", vocabulary=vocabulary, name="top_logprobs")
    assert given.extra is not None
    said_M = ~torch.isnan(given.extra)
    inside_M = ~kept.masked[given.row] | torch.isin(given.row * vocabulary + given.ids, kept.values.row * vocabulary + kept.values.ids)
    outside_N = torch.bincount(given.row[(given.extra.exp() > 0) & ~inside_M], minlength=len(rows_N))
    return _Head(_chosen(given, _first_of_each(given, said_M & inside_M, vocabulary), len(rows_N)), outside_N)


def _expected_score(z_NV: Tensor, log_norm_N: Tensor, head: _Values, config: LossSection) -> tuple[Tensor, Tensor]:
    """[N] whose gradient is the sampler's expected weighted score, and [N] the sampler's mass on the head."""
    assert head.extra is not None
    count = len(z_NV)
    logp_M = z_NV[head.row, head.ids] - log_norm_N[head.row]
    with torch.no_grad():
        p_M, q_M = logp_M.exp(), head.extra.exp()
        q_mass_N = z_NV.new_zeros(count).index_add(0, head.row, q_M)
        p_mass_N = z_NV.new_zeros(count).index_add(0, head.row, p_M)
        alpha_N = (1 - q_mass_N).clamp(min=0) / (1 - p_mass_N).clamp(min=_TAIL_MASS_MIN)
        tail_N = _weight(-torch.log(alpha_N), config) * alpha_N
        coefficient_M = _weight(logp_M - head.extra, config) * q_M - tail_N[head.row] * p_M
    return z_NV.new_zeros(count).index_add(0, head.row, coefficient_M * logp_M), q_mass_N


@torch.no_grad()
def _entropy(z_NV: Tensor, log_norm_N: Tensor, kept: _KeptSets) -> Tensor:
    """[N]: entropy of the trainer's distribution over each token's kept set, in nats."""
    out_N = z_NV.new_zeros(len(z_NV))
    free = (~kept.masked).nonzero(as_tuple=True)[0]
    if len(free):
        logp = z_NV[free] - log_norm_N[free].unsqueeze(1)
        out_N[free] = -(logp.exp() * logp).sum(dim=1)
    logp_M = z_NV[kept.values.row, kept.values.ids] - log_norm_N[kept.values.row]
    return out_N.index_add(0, kept.values.row, -(logp_M.exp() * logp_M))
