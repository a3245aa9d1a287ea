"""The loss against an oracle that writes the formulas down token by token, in float64, over plain dicts of probabilities."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from fsref.config import LossSection
from fsref.errors import PayloadError
from fsref.tensors import PackedMicroBatch, RaggedTensor
from fsref.trainer.loss import SUMS, micro_batch_loss, trained_rows
from tests.trainer.builders import VOCABULARY, dense, packed, ragged, random_sequences

WIDE = LossSection(ratio_low=0.0, ratio_high=1e9, center_weight=0.0)
HEAD_COLUMNS = ("ids", "logprobs")


def sums_of(batch: PackedMicroBatch, logits: Tensor, config: LossSection) -> dict[str, float]:
    return dict(zip(SUMS, micro_batch_loss(logits, batch, trained_rows(batch), config=config).sums.tolist(), strict=True))


def oracle(
    logits: Tensor,
    *,
    sampled: int,
    logq: float,
    advantage: float,
    temperature: float,
    mask: Sequence[int],
    head: dict[int, float],
    config: LossSection,
) -> Tensor:
    """One token's loss in float64, coefficients taken as constants."""
    z = logits.double() / temperature
    support = sorted(set(mask) | {sampled}) if mask else list(range(len(z)))
    log_norm = torch.logsumexp(z[support], dim=0)
    logp = {v: z[v] - log_norm for v in support}
    p = {v: float(x.detach().exp()) for v, x in logp.items()}

    def weight(ratio: float) -> float:
        inside = config.ratio_low <= ratio <= config.ratio_high
        return (ratio if config.ratio_weight else 1.0) if inside else 0.0

    policy = weight(p[sampled] / math.exp(logq)) * logp[sampled]
    q = {v: math.exp(x) for v, x in head.items() if v in p}
    alpha = max(0.0, 1 - sum(q.values())) / max(1e-6, 1 - sum(p[v] for v in q))
    expected = z.new_zeros(())
    for v, q_v in q.items():
        tail = weight(1 / alpha) * alpha * p[v] if alpha else 0.0
        expected = expected + ((weight(p[v] / q_v) * q_v if q_v else 0.0) - tail) * logp[v]
    return -advantage * (policy - config.center_weight * expected)


def one_token(
    mask: Sequence[int] = (), head: dict[int, float] | None = None, *, sampled: int = 5, logq: float = -2.0, temperature: float = 1.0
) -> PackedMicroBatch:
    """A sequence of two tokens, the second of which trains."""
    fields = {"sampling_mask": ragged([[], list(mask)])}
    if head is not None:
        fields["top_logprobs"] = ragged([[], list(head.items())], HEAD_COLUMNS)
    return packed(
        [[1, sampled]], trained=[[0, 1]], logprobs=[0.0, logq], advantages=[0.0, 0.7], temperature=temperature, fields=dict(fields)
    )


def random_logits(count: int = 1, seed: int = 0) -> Tensor:
    return (torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 1.5).requires_grad_()


CASES = {
    "full vocabulary": {"mask": [], "head": {}},
    "kept set": {"mask": [9, 4, 5, 30], "head": {}},
    "kept set of the sampled token alone": {"mask": [5], "head": {}},
    "head over the full vocabulary": {"mask": [], "head": {5: -1.0, 7: -1.5, 2: -3.0}},
    "head inside a kept set": {"mask": [5, 7, 2, 11, 12], "head": {7: -0.7, 5: -1.4}},
    "head with a removed token": {"mask": [], "head": {5: -1.0, 7: -9999.0, 9: -math.inf}},
    "head that is the whole kept set": {"mask": [5, 7], "head": {7: math.log(0.75), 5: math.log(0.25)}},
}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    "config",
    [
        WIDE,
        LossSection(ratio_low=0.0, ratio_high=1e9, center_weight=1.0),
        LossSection(ratio_low=0.5, ratio_high=2.0, center_weight=0.3),
        LossSection(ratio_low=0.1, ratio_high=3.0, center_weight=1.0, ratio_weight=True),
    ],
    ids=["policy", "centred", "band", "weighted"],
)
def test_loss_and_gradient_match_the_formula(case, config: LossSection, temperature: float) -> None:  # type: ignore[no-untyped-def]
    batch = one_token(case["mask"], case["head"], temperature=temperature)
    logits = random_logits(seed=3)
    expected = oracle(
        logits[0], sampled=5, logq=-2.0, advantage=0.7, temperature=temperature, mask=case["mask"], head=case["head"], config=config
    )
    loss = micro_batch_loss(logits, batch, trained_rows(batch), config=config).loss
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    (got,) = torch.autograd.grad(loss, logits)
    (wanted,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def test_many_tokens_of_several_sequences_are_the_sum_of_each_alone() -> None:
    rng = np.random.default_rng(0)
    sequences = random_sequences((6, 4, 9), seed=2)
    trained = [[0, 0, 1, 1, 0, 1], [0, 1, 1, 1], [0] * 5 + [1] * 4]
    count = sum(map(len, sequences))
    flat = [t for s in sequences for t in s]
    masks = [[int(v) for v in rng.permutation(VOCABULARY)[: rng.integers(0, 6)]] for _ in range(count)]
    heads = []
    for mask in masks:
        ids = mask[:2] or [int(v) for v in rng.permutation(VOCABULARY)[:3]]
        heads.append([(v, float(np.log(0.8 / len(ids)))) for v in ids])
    logq = -rng.random(count) * 4
    advantages = rng.standard_normal(count)
    config = LossSection(ratio_low=0.2, ratio_high=5.0, center_weight=0.5)
    batch = packed(
        sequences,
        trained=trained,
        logprobs=logq,
        advantages=advantages,
        temperature=0.8,
        fields={"sampling_mask": ragged(masks), "top_logprobs": ragged(heads, HEAD_COLUMNS)},
    )
    rows = trained_rows(batch)
    logits = random_logits(len(rows), seed=4)
    expected = torch.stack(
        [
            oracle(
                logits[n],
                sampled=flat[t],
                logq=float(np.float32(logq[t])),
                advantage=float(np.float32(advantages[t])),
                temperature=0.8,
                mask=masks[t],
                head=dict(heads[t]),
                config=config,
            )
            for n, t in enumerate(rows.tolist())
        ]
    ).sum()
    loss = micro_batch_loss(logits, batch, rows, config=config).loss
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], torch.autograd.grad(expected, logits)[0], rtol=1e-3, atol=1e-5)


def test_ids_named_twice_in_mask_or_head_count_once() -> None:
    config = LossSection(ratio_low=0.0, ratio_high=1e9, center_weight=1.0)
    logits = random_logits(seed=5)
    head = [(7, -0.9), (5, -1.2)]
    once = packed(
        [[1, 5]],
        trained=[[0, 1]],
        logprobs=[0.0, -2.0],
        fields={"sampling_mask": ragged([[], [7, 5, 2]]), "top_logprobs": ragged([[], head], HEAD_COLUMNS)},
    )
    twice = packed(
        [[1, 5]],
        trained=[[0, 1]],
        logprobs=[0.0, -2.0],
        fields={"sampling_mask": ragged([[], [7, 5, 2, 7, 5]]), "top_logprobs": ragged([[], [*head, (5, -1.2)]], HEAD_COLUMNS)},
    )
    assert sums_of(once, logits, config) == sums_of(twice, logits, config)


def test_the_sampled_token_is_always_in_its_kept_set_and_its_absence_is_counted() -> None:
    logits = random_logits(seed=6)
    present = sums_of(one_token([9, 5, 4]), logits, WIDE)
    absent = sums_of(one_token([9, 4]), logits, WIDE)
    assert absent["kept_set_without_sampled"] == 1
    assert present["kept_set_without_sampled"] == 0
    assert absent["loss"] == pytest.approx(present["loss"])
    assert absent["kept_set_size"] == 3


def test_logprobs_over_a_kept_set_sum_to_one() -> None:
    kept = [3, 17, 29, 40]
    logits = random_logits(seed=7)
    total = sum(math.exp(-sums_of(one_token(kept, sampled=v), logits, WIDE)["loss"] / 0.7) for v in kept)
    assert total == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(("ratio", "trains"), [(0.49, False), (0.51, True), (1.0, True), (1.99, True), (2.01, False)])
def test_only_tokens_inside_the_band_train(ratio: float, trains: bool) -> None:
    config = LossSection(ratio_low=0.5, ratio_high=2.0, center_weight=0.0)
    logits = random_logits(seed=8)
    logp = float(torch.log_softmax(logits[0].detach(), dim=0)[5])
    batch = one_token(logq=logp - math.log(ratio))
    result = micro_batch_loss(logits, batch, trained_rows(batch), config=config)
    (gradient,) = torch.autograd.grad(result.loss, logits)
    assert bool(gradient.abs().sum() > 0) is trains
    assert dict(zip(SUMS, result.sums.tolist(), strict=True))["tokens_masked"] == (0 if trains else 1)


@pytest.mark.parametrize("logq", [-math.inf, math.nan])
def test_a_sampler_logprob_that_is_not_finite_masks_its_token_and_is_counted(logq: float) -> None:
    logits = random_logits(seed=9)
    batch = one_token(logq=logq)
    result = micro_batch_loss(logits, batch, trained_rows(batch), config=LossSection())
    sums = dict(zip(SUMS, result.sums.tolist(), strict=True))
    assert (sums["tokens_masked"], sums["tokens_unscored"], sums["mismatch_kl"]) == (1, 1, 0)
    assert not torch.autograd.grad(result.loss, logits)[0].any()


@pytest.mark.parametrize("ratio_weight", [False, True])
def test_score_centering_takes_the_samplers_drift_away(ratio_weight: bool) -> None:
    """The mean over q of the per-token gradient is zero, where the head holds all of q."""
    kept = [2, 5, 7, 11]
    q = {2: 0.1, 5: 0.4, 7: 0.3, 11: 0.2}
    logits = random_logits(seed=10)
    head = {v: math.log(x) for v, x in q.items()}

    def mean_gradient(center_weight: float) -> Tensor:
        config = LossSection(ratio_low=0.4, ratio_high=100.0, center_weight=center_weight, ratio_weight=ratio_weight)
        total = torch.zeros(1, VOCABULARY)
        for v, probability in q.items():
            batch = one_token(kept, head, sampled=v, logq=math.log(probability))
            loss = micro_batch_loss(logits, batch, trained_rows(batch), config=config).loss
            total += probability * torch.autograd.grad(loss, logits)[0]
        return total

    assert mean_gradient(0.0).abs().max() > 1e-3
    assert mean_gradient(1.0).abs().max() < 1e-6


def test_the_modelled_tail_takes_the_drift_away_where_it_is_proportional_to_the_trainer() -> None:
    logits = random_logits(seed=11)
    p = torch.softmax(logits[0].detach().double(), dim=0)
    head_ids = p.topk(4).indices.tolist()
    q = p.clone()
    q[head_ids] *= torch.tensor([1.3, 0.8, 1.2, 0.9], dtype=torch.float64)
    tail = [v for v in range(VOCABULARY) if v not in head_ids]
    q[tail] *= (1 - q[head_ids].sum()) / q[tail].sum()
    head = {v: float(q[v].log()) for v in head_ids}
    config = LossSection(ratio_low=0.0, ratio_high=1e9, center_weight=1.0)
    total = torch.zeros(1, VOCABULARY)
    for v in range(VOCABULARY):
        batch = one_token([], head, sampled=v, logq=float(q[v].log()))
        total += float(q[v]) * torch.autograd.grad(micro_batch_loss(logits, batch, trained_rows(batch), config=config).loss, logits)[0]
    assert total.abs().max() < 1e-5


def test_the_centering_term_vanishes_where_trainer_and_sampler_agree() -> None:
    logits = random_logits(seed=12)
    logp = torch.log_softmax(logits[0].detach(), dim=0)
    head = {int(v): float(logp[v]) for v in logp.topk(6).indices}
    batch = one_token([], head, logq=float(logp[5]))
    centred = micro_batch_loss(logits, batch, trained_rows(batch), config=LossSection(center_weight=1.0)).loss
    plain = micro_batch_loss(logits, batch, trained_rows(batch), config=LossSection(center_weight=0.0)).loss
    difference = torch.autograd.grad(centred, logits)[0] - torch.autograd.grad(plain, logits)[0]
    assert difference.abs().max() < 1e-6


def test_head_entries_outside_the_kept_set_are_counted_and_left_out() -> None:
    config = LossSection(ratio_low=0.0, ratio_high=1e9, center_weight=1.0)
    logits = random_logits(seed=13)
    inside = sums_of(one_token([5, 7], {5: -0.5, 7: -1.2}), logits, config)
    outside = sums_of(one_token([5, 7], {5: -0.5, 7: -1.2, 20: -3.0, 21: -math.inf, 22: -9999.0}), logits, config)
    assert outside["head_outside_kept_set"] == 1
    assert outside["loss"] == pytest.approx(inside["loss"])


def test_mismatch_kl_is_the_k3_estimate_over_all_trained_tokens() -> None:
    logits = random_logits(seed=14)
    logp = float(torch.log_softmax(logits[0].detach().double(), dim=0)[5])
    log_ratio = logp - -6.0
    assert sums_of(one_token(logq=-6.0), logits, LossSection())["mismatch_kl"] == pytest.approx(math.expm1(log_ratio) - log_ratio, rel=1e-5)


def test_the_mismatch_of_fresh_tokens_is_summed_apart() -> None:
    batch = packed([[1, 5, 6, 7]], trained=[[0, 1, 1, 1]], logprobs=[0.0, -2.0, -3.0, -math.inf])
    rows, logits = trained_rows(batch), random_logits(3, seed=16)
    fresh = torch.tensor([True, True, False, True])
    result = micro_batch_loss(logits, batch, rows, config=WIDE, fresh_T=fresh)
    sums = dict(zip(SUMS, result.sums.tolist(), strict=True))
    alone = sums_of(one_token(logq=-2.0), logits[:1], WIDE)
    assert sums["tokens_fresh"] == 1
    assert sums["mismatch_kl_fresh"] == pytest.approx(alone["mismatch_kl"])
    assert sums["mismatch_kl"] > sums["mismatch_kl_fresh"]


@pytest.mark.parametrize("mask", [[], [5, 6, 7, 30]])
def test_entropy_is_taken_over_the_kept_set(mask: list[int]) -> None:
    logits = random_logits(seed=15)
    ids = mask or list(range(VOCABULARY))
    p = torch.softmax(logits[0].detach().double()[ids], dim=0)
    assert sums_of(one_token(mask), logits, WIDE)["entropy"] == pytest.approx(float(-(p * p.log()).sum()), rel=1e-5)


def test_trained_tokens_that_rest_on_filler_rows_are_counted() -> None:
    """Token 2 is routed by the row of token 1, which fed its distribution; token 3 by a real one, but its kept set is missing."""
    routing = dense(torch.zeros(4, 2, 2, dtype=torch.int32), [True, False, True, False])
    mask = ragged([[], [5], [6], []])
    mask = RaggedTensor(mask.counts, mask.columns, torch.tensor([True, True, True, False]))
    batch = packed([[4, 5, 6, 7]], trained=[[0, 1, 1, 1]], fields={"routed_experts": routing, "sampling_mask": mask})
    assert sums_of(batch, random_logits(3), WIDE)["tokens_missing"] == 2


def test_a_batch_without_fields_or_trained_tokens_has_no_loss() -> None:
    batch = packed([[1, 2, 3]], trained=[[0, 0, 0]])
    logits = torch.zeros(0, VOCABULARY, requires_grad=True)
    result = micro_batch_loss(logits, batch, trained_rows(batch), config=LossSection())
    result.loss.backward()
    assert result.loss.item() == 0
    assert not result.sums.any()


def test_a_trained_first_token_is_refused() -> None:
    with pytest.raises(PayloadError, match="first token"):
        trained_rows(packed([[1, 2], [3, 4]], trained=[[0, 1], [1, 1]]))


def test_temperature_zero_is_refused() -> None:
    batch = one_token(temperature=0.0)
    with pytest.raises(PayloadError, match="temperature 0"):
        micro_batch_loss(random_logits(), batch, trained_rows(batch), config=WIDE)


@pytest.mark.parametrize("bad", [-1, VOCABULARY])
def test_ids_outside_the_vocabulary_are_refused(bad: int) -> None:
    batch = one_token([5, bad])
    with pytest.raises(PayloadError, match="sampling_mask holds token ids"):
        micro_batch_loss(random_logits(), batch, trained_rows(batch), config=WIDE)
