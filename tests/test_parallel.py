"""How a step lies over ranks: what must be said, and who reads what."""

import pytest

from fsref.config import ParallelSection
from fsref.errors import ConfigError
from fsref.parallel import Coordinate, Parallel, data_parallel, parse_stages
from fsref.plan import ContextLayout
from fsref.refs import Schema, routed_experts, sampling_mask, top_logprobs

SCHEMA = Schema((routed_experts(layer_ids=range(4), top_k=2, expert_count=8), top_logprobs(), sampling_mask()))


def test_stages_are_ids_and_ranges() -> None:
    assert parse_stages("0-2,7;3-6") == [[[0, 1, 2, 7]], [[3, 4, 5, 6]]]
    assert parse_stages("0|4;5|1") == [[[0], [4]], [[5], [1]]]
    assert parse_stages("") == []
    for text in ("a", "1-", "-1", "0;;1", "99999999"):
        with pytest.raises(ConfigError, match="ids and ranges"):
            parse_stages(text)


@pytest.mark.payload("D3", "C5")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"context": 2}, "2 context ranks need parallel.layout"),
        ({"pipeline": 2}, "2 pipeline ranks need parallel.stages"),
        ({"pipeline": 2, "stages": "0-3"}, "lists the layers of 1 ranks, parallel.pipeline is 2"),
        ({"tensor": 4, "sequence": True, "multiple": 6}, "multiple is 6, which 4 tensor ranks"),
        ({"context": 2, "layout": "zigzag", "sequence_multiple": 2}, "needs a multiple of 4"),
        ({"loss_stage": 1}, "there are pipeline ranks 0 to 0"),
        ({"order": ("data", "data")}, "names an axis twice"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_an_error_and_never_a_guess(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Parallel.of(ParallelSection(**({"data": 1} | given)))  # type: ignore[arg-type]


def test_ranks_are_numbered_along_the_axes_that_the_order_names_slowest_first() -> None:
    p = Parallel(data=2, context=2, layout=ContextLayout.ZIGZAG, pipeline=2, stages=[[[0]], [[1]]], order=("pipeline", "data", "context"))
    assert [tuple(p.coordinate(r)) for r in range(p.world_size)] == [(d, c, 0, s) for s in range(2) for d in range(2) for c in range(2)]
    with pytest.raises(ConfigError, match="rank 8 of 8"):
        p.coordinate(8)


def test_what_fsref_trainer_cannot_train_is_refused_and_a_way_named() -> None:
    assert data_parallel(ParallelSection(data=3)) == Parallel(data=3)
    for given in ({"tensor": 2}, {"context": 2, "layout": "zigzag"}, {"multiple": 8}, {"targets": "next"}):
        with pytest.raises(ConfigError, match=r"fsref trainer is data parallel .* fsref\.loader"):
            data_parallel(ParallelSection(**given))


def test_an_order_that_is_needed_is_asked_for() -> None:
    p = Parallel(data=2, tensor=2)
    with pytest.raises(ConfigError, match=r"leaves out \['tensor'\]"):
        p.coordinate(0)
    assert Parallel(tensor=2).coordinate(1) == Coordinate(tensor=1)


def test_fields_without_layers_are_read_at_the_loss_only() -> None:
    stages = [[[0, 1]], [[2, 3]]]
    last, first = Parallel(pipeline=2, stages=stages), Parallel(pipeline=2, stages=stages, loss_stage=0)
    every, routing = ("routed_experts", "top_logprobs", "sampling_mask"), ("routed_experts",)
    assert [last.fields(SCHEMA, Coordinate(pipeline=n)) for n in range(2)] == [routing, every]
    assert [first.fields(SCHEMA, Coordinate(pipeline=n)) for n in range(2)] == [every, routing]
    assert last.layers(Coordinate(pipeline=1)) == (2, 3)


def test_a_layout_that_does_not_fit_the_schema_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layers \[3\] of field 'routed_experts' are in none"):
        Parallel(pipeline=2, stages=[[[0, 1]], [[2]]]).check(SCHEMA)
    with pytest.raises(ConfigError, match=r"8 experts do not divide by parallel\.expert_shards = 3"):
        Parallel(expert_shards=3).check(SCHEMA)
