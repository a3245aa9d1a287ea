"""Router replay on a real Qwen3-MoE, read back at the experts' input."""

import pytest
import torch
from torch import Tensor, nn

from fsref.errors import ConfigError, PayloadError
from fsref.trainer.model import logits_at
from fsref.trainer.replay import RouterReplay, moe_layers
from tests.trainer.builders import EXPERTS, MOE_LAYERS, TOP_K, packed, random_routes, random_sequences, tiny_model


def batch_of(lengths: tuple[int, ...] = (7, 5)):  # type: ignore[no-untyped-def]
    sequences = random_sequences(lengths)
    return packed(sequences, trained=[[0] + [1] * (len(s) - 1) for s in sequences])


def forward(model: nn.Module, batch) -> Tensor:  # type: ignore[no-untyped-def]
    return logits_at(model, batch, batch.loss_mask.nonzero()[:, 0], dtype=torch.float32)


def own_routes(model: nn.Module, batch) -> Tensor:  # type: ignore[no-untyped-def]
    with RouterReplay(model).block(None, replay=False, capture=True) as used:
        forward(model, batch)
    return used.dispatched


def test_the_experts_are_given_exactly_the_replayed_ids_in_slot_order() -> None:
    model, batch = tiny_model(), batch_of()
    routes = random_routes(12, seed=1)
    with RouterReplay(model).block(routes.unsqueeze(0), replay=True, capture=True) as used:
        forward(model, batch)
    assert torch.equal(used.dispatched, routes.long())
    assert (used.rows, used.rows_different) == (12 * len(MOE_LAYERS), 0)


def test_replaying_a_models_own_choice_changes_no_bit() -> None:
    model, batch = tiny_model(), batch_of()
    plain = forward(model, batch)
    with RouterReplay(model).block(own_routes(model, batch), replay=True):
        replayed = forward(model, batch)
    assert torch.equal(plain, replayed)


@pytest.mark.parametrize("normalised", [True, False])
def test_replayed_weights_are_the_routers_own_probabilities_at_the_given_experts(normalised: bool) -> None:
    model, batch = tiny_model(norm_topk_prob=normalised), batch_of()
    routes = random_routes(12, seed=2)
    seen: list[tuple[Tensor, Tensor]] = []
    layer = moe_layers(model)[0]
    with RouterReplay(model).block(routes, replay=True):
        logits_hook = layer.router.register_forward_hook(lambda _m, _a, out: seen.append((out[0], out[1])))
        forward(model, batch)
        logits_hook.remove()
    logits, weights = seen[0]
    expected = torch.softmax(logits.double(), dim=-1).gather(1, routes[:, 0].long())
    if normalised:
        expected = expected / expected.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)


def test_the_router_gets_gradients_at_the_replayed_experts() -> None:
    model, batch = tiny_model(), batch_of()
    routes = torch.full((12, len(MOE_LAYERS), TOP_K), 0)
    routes[..., 1] = 5
    with RouterReplay(model).block(routes, replay=True):
        forward(model, batch).square().sum().backward()
    layer = moe_layers(model)[0]
    gradient = layer.experts.down_proj.grad
    assert isinstance(gradient, Tensor)
    assert [n for n in range(EXPERTS) if gradient[n].abs().sum() > 0] == [0, 5]
    assert layer.router.weight.grad.abs().sum() > 0  # type: ignore[union-attr, operator]


def test_without_replay_the_rows_that_route_differently_are_counted() -> None:
    model, batch = tiny_model(), batch_of()
    routes = own_routes(model, batch).clone()
    routes[3, 1] = (routes[3, 1] + 1) % EXPERTS
    routes[4, 0] = routes[4, 0].flip(0)
    with RouterReplay(model).block(routes, replay=False) as used:
        forward(model, batch)
    assert (used.rows, used.rows_different) == (24, 1)


def test_rows_shifted_by_one_token_are_detected() -> None:
    model, batch = tiny_model(), batch_of()
    routes = random_routes(12, seed=3)
    with RouterReplay(model).block(routes.roll(1, dims=0), replay=True, capture=True) as used:
        forward(model, batch)
    assert not torch.equal(used.dispatched, routes.long())
    with RouterReplay(model).block(own_routes(model, batch).roll(1, dims=0), replay=False) as compared:
        forward(model, batch)
    assert compared.rows_different > 0


def test_rows_that_are_not_valid_are_replayed_but_not_compared() -> None:
    model, batch = tiny_model(), batch_of()
    routes = (own_routes(model, batch) + 1) % EXPERTS
    valid = torch.ones(12, dtype=torch.bool)
    valid[2:] = False
    with RouterReplay(model).block(routes, replay=False, valid_T=valid) as used:
        forward(model, batch)
    assert used.rows == 4
    assert used.rows_different == 4


def test_no_hook_stays_on_the_model() -> None:
    model, batch = tiny_model(), batch_of()
    plain = forward(model, batch)
    with RouterReplay(model).block(random_routes(12), replay=True):
        forward(model, batch)
    with pytest.raises(PayloadError), RouterReplay(model).block(random_routes(3), replay=True):
        forward(model, batch)
    assert torch.equal(forward(model, batch), plain)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_routes_are_found_by_layer_id_and_dense_layers_among_them_are_ignored() -> None:
    model, batch = tiny_model(), batch_of()
    routes = random_routes(12, seed=4, layers=3)
    with RouterReplay(model, layer_ids=(2, 1, 0)).block(routes, replay=True, capture=True) as used:
        forward(model, batch)
    assert torch.equal(used.dispatched, routes[:, [2, 0]].long())


def test_a_schema_without_one_of_the_models_moe_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"also routes in \[2\]"):
        RouterReplay(tiny_model(), layer_ids=(0, 1))


def test_a_model_without_moe_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="no MoE layer"):
        RouterReplay(tiny_model(mlp_only_layers=[0, 1, 2]))


@pytest.mark.parametrize(("low", "high"), [(-1, 3), (0, EXPERTS)])
def test_expert_ids_that_the_model_does_not_have_are_refused(low: int, high: int) -> None:
    routes = random_routes(12)
    routes[0, 0, 0], routes[1, 0, 0] = low, high
    with pytest.raises(PayloadError, match="expert ids"), RouterReplay(tiny_model()).block(routes, replay=True):
        pass


def test_a_block_in_which_no_layer_ran_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="0 of 2 MoE layers"), RouterReplay(tiny_model()).block(None, replay=False):
        pass


def test_recomputing_layers_in_the_backward_replays_again_and_counts_once() -> None:
    model, batch = tiny_model(), batch_of()
    routes = random_routes(12, seed=5)
    with RouterReplay(model).block(routes, replay=True):
        forward(model, batch).square().sum().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()  # type: ignore[operator]
    with RouterReplay(model).block(routes, replay=True) as used:
        forward(model, batch).square().sum().backward()
    assert used.rows == 24
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name])
