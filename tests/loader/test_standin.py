"""What stands in for a dropped micro batch routes like real data and trains nothing."""

import pytest
import torch

from fsref.loader.standin import ROUTING, StandIns
from fsref.refs import routed_experts
from fsref.tensors import DenseTensor, PackedMicroBatch
from tests.trainer.builders import EXPERTS, MOE_LAYERS, TOP_K, dense, packed, random_routes, random_sequences

FIELD = routed_experts(layer_ids=MOE_LAYERS, top_k=TOP_K, expert_count=EXPERTS)


def batch_with(routes: torch.Tensor, valid: list[bool] | None = None) -> PackedMicroBatch:
    count = len(routes)
    return packed([[1] * count], trained=[[0] + [1] * (count - 1)], fields={ROUTING: dense(routes, valid)})


def tokens(count: int) -> PackedMicroBatch:
    return packed(random_sequences((count,)), trained=[[0] + [1] * (count - 1)])


def rows_of(batch: PackedMicroBatch) -> torch.Tensor:
    routing = batch.fields[ROUTING]
    assert isinstance(routing, DenseTensor)
    return routing.rows


def test_a_stand_in_keeps_the_tokens_and_trains_none() -> None:
    stand_in = StandIns(FIELD).build(tokens(5)).batch
    assert torch.equal(stand_in.token_ids, tokens(5).token_ids)
    assert not stand_in.loss_mask.any()
    routing = stand_in.fields[ROUTING]
    assert not routing.valid.any()


def test_real_rows_of_the_same_step_are_repeated() -> None:
    stand_ins = StandIns(FIELD)
    routes = random_routes(4, seed=1)
    stand_ins.learn([batch_with(routes)])
    built = stand_ins.build(tokens(10))
    assert not built.generated
    assert torch.equal(rows_of(built.batch), routes[torch.arange(10) % 4])


def test_only_valid_rows_of_real_tokens_are_learnt() -> None:
    stand_ins = StandIns(FIELD)
    routes = random_routes(4, seed=2)
    stand_ins.learn([batch_with(routes, [True, False, True, False])])
    assert torch.equal(rows_of(stand_ins.build(tokens(2)).batch), routes[[0, 2]])


def test_without_real_rows_in_this_step_those_of_the_last_good_one_serve() -> None:
    stand_ins = StandIns(FIELD)
    routes = random_routes(3, seed=3)
    stand_ins.learn([batch_with(routes)])
    stand_ins.learn([])
    built = stand_ins.build(tokens(3))
    assert not built.generated
    assert torch.equal(rows_of(built.batch), routes)


def test_without_any_real_row_balanced_ones_are_generated_and_said_to_be() -> None:
    built = StandIns(FIELD).build(tokens(12))
    assert built.generated
    counts = torch.bincount(rows_of(built.batch)[:, 0].flatten().long(), minlength=EXPERTS)
    assert counts.max() - counts.min() <= 1


@pytest.mark.payload("D6", "D9")
def test_generated_rows_hold_distinct_experts_and_are_the_same_every_time() -> None:
    rows = rows_of(StandIns(FIELD).build(tokens(7)).batch)
    assert rows.shape == (7, len(MOE_LAYERS), TOP_K)
    assert rows.dtype == torch.int32
    assert all(len(set(r)) == TOP_K for token in rows.tolist() for r in token)
    assert torch.equal(rows, rows_of(StandIns(FIELD).build(tokens(7)).batch))


def test_a_run_without_routing_gets_stand_ins_without_it() -> None:
    assert dict(StandIns(None).build(tokens(3)).batch.fields) == {}
