"""Gradients and updates of one rank against plain autograd."""

import msgspec
import pytest
import torch

from fsref.config import LossSection, ParallelSection, TrainerSection
from fsref.errors import ConfigError
from fsref.loader.ranks import Place, Ranks
from fsref.loader.standin import StandIns
from fsref.parallel import Parallel
from fsref.refs import Schema
from fsref.tensors import PackedMicroBatch
from fsref.trainer.learner import Learner
from fsref.trainer.loss import micro_batch_loss, trained_rows
from fsref.trainer.model import logits_at
from fsref.trainer.replay import RouterReplay
from tests.trainer.builders import dense, packed, random_routes, random_sequences, tiny_model
from tests.trainer.runs import SCHEMA

LOSS = LossSection(ratio_low=0.0, ratio_high=1e9)


def settings(**changes: object) -> TrainerSection:
    return TrainerSection(**{"parallel": ParallelSection(data=1), "loss": LOSS, "grad_norm_max": 1e9, **changes})  # type: ignore[arg-type]


def batch(seed: int, length: int = 8, trained: int = 5) -> PackedMicroBatch:
    sequences = random_sequences((length,), seed=seed)
    marks = [[0] * (length - trained) + [1] * trained]
    fields = {"routed_experts": dense(random_routes(length, seed=seed))}
    advantages = torch.linspace(-1, 1, length)
    return packed(sequences, trained=marks, logprobs=[-2.0] * length, advantages=advantages, fields=dict(fields))


def test_an_update_uses_the_mean_over_all_trained_tokens_of_all_micro_batches() -> None:
    config = settings()
    learner = Learner(tiny_model(), Ranks(Parallel(), Place()), SCHEMA, config)
    parts = [batch(1, trained=5), batch(2, trained=2)]
    for part in parts:
        learner.add(part)
    reference = tiny_model()
    for part in parts:
        with RouterReplay(reference).block(part.fields["routed_experts"].rows, replay=True):  # type: ignore[union-attr]
            logits = logits_at(reference, part, trained_rows(part), dtype=torch.float32)
            (micro_batch_loss(logits, part, trained_rows(part), config=LOSS).loss / 7).backward()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None]))
    optimizer.step()
    update = learner.update()
    assert update.sums["tokens"] == 7
    assert update.grad_norm == pytest.approx(float(norm), rel=1e-4)
    for (name, mine), theirs in zip(learner.model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=name)


def test_a_long_gradient_is_cut_to_the_limit() -> None:
    config = settings(grad_norm_max=0.01)
    learner = Learner(tiny_model(), Ranks(Parallel(), Place()), SCHEMA, config)
    seen: list[float] = []
    learner.optimizer.register_step_pre_hook(
        lambda opt, *_: seen.append(float(torch.stack([p.grad.norm() for g in opt.param_groups for p in g["params"]]).norm()))
    )
    learner.add(batch(1))
    assert learner.update().grad_norm > 0.01
    assert seen == [pytest.approx(0.01, rel=1e-3)]


def test_gradients_start_from_zero_after_an_update() -> None:
    config = settings()
    learner = Learner(tiny_model(), Ranks(Parallel(), Place()), SCHEMA, config)
    learner.add(batch(1))
    learner.update()
    assert not any(p.grad is None or p.grad.any() for p in learner.model.parameters())


@pytest.mark.parametrize("broken", [False, True])
def test_a_step_without_a_usable_gradient_leaves_the_parameters_alone(broken: bool) -> None:
    config = settings()
    learner = Learner(tiny_model(), Ranks(Parallel(), Place()), SCHEMA, config)
    before = [p.detach().clone() for p in learner.model.parameters()]
    if broken:
        learner.add(batch(1))
        next(learner.model.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]
    else:
        learner.add(batch(1, trained=0))
    update = learner.update()
    assert update.skipped
    assert all(torch.equal(p, b) for p, b in zip(learner.model.parameters(), before, strict=True))


def test_a_stand_in_changes_no_bit_of_the_update() -> None:
    config = settings()
    learners = [Learner(tiny_model(), Ranks(Parallel(), Place()), SCHEMA, config) for _ in range(2)]
    stand_ins = StandIns(SCHEMA.field("routed_experts"))
    for learner in learners:
        learner.add(batch(1))
    learners[1].add(stand_ins.build(batch(2)).batch)
    updates = [learner.update() for learner in learners]
    assert updates[0] == updates[1]
    for first, second in zip(learners[0].model.parameters(), learners[1].model.parameters(), strict=True):
        assert torch.equal(first, second)


def test_rows_that_route_differently_are_summed_over_micro_batches() -> None:
    config = settings(loss=LossSection(replay=False))
    learner = Learner(tiny_model(), Ranks(Parallel(), Place()), SCHEMA, config)
    for seed in (1, 2):
        learner.add(batch(seed))
    update = learner.update()
    assert update.routing_rows == 32
    assert 0 < update.routing_rows_different <= 32


@pytest.mark.parametrize("replay", [True, False])
def test_the_comparison_pass_measures_the_other_way_and_changes_no_bit_of_the_update(replay: bool) -> None:
    plain, compared = (settings(loss=LossSection(ratio_low=0.0, replay=replay, compare_replay=c)) for c in (False, True))
    learners = [Learner(tiny_model(), Ranks(Parallel(), Place()), SCHEMA, c) for c in (plain, compared)]
    for learner in learners:
        learner.add(batch(1))
        learner.add(batch(2))
    without, with_ = (learner.update() for learner in learners)
    for mine, theirs in zip(learners[0].model.parameters(), learners[1].model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    other = settings(loss=LossSection(ratio_low=0.0, replay=not replay))
    reference = Learner(tiny_model(), Ranks(Parallel(), Place()), SCHEMA, other)
    reference.add(batch(1))
    reference.add(batch(2))
    expected = reference.update()
    assert with_.other_sums["mismatch_kl"] == pytest.approx(expected.sums["mismatch_kl"], rel=1e-5)
    assert with_.other_rows_different == expected.routing_rows_different
    assert (with_.sums["loss"], without.other_sums["tokens"]) == (without.sums["loss"], 0.0)
    assert (with_.routing_rows_different == 0) is replay


@pytest.mark.payload("B11")
def test_physical_expert_ids_are_not_replayed_as_logical_ones() -> None:
    config = settings()
    physical = Schema(tuple(msgspec.structs.replace(f, id_space="physical") if f.expert_count else f for f in SCHEMA.fields))
    with pytest.raises(ConfigError, match="physical expert ids"):
        Learner(tiny_model(), Ranks(Parallel(), Place()), physical, config)
