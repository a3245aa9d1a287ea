"""The schema of a run from its config and model."""

import json
from pathlib import Path

import pytest

from fsref.config import Config, ModelSection, RunSection
from fsref.errors import ConfigError
from fsref.pipeline.schema import build_schema, check_names
from fsref.refs import Alignment, Codec, Field

MODEL = {"num_hidden_layers": 3, "num_experts": 300, "num_experts_per_tok": 4, "vocab_size": 99, "mlp_only_layers": [0]}


def config(folder: Path, *fields: str, declared: tuple[Field, ...] = ()) -> Config:
    (folder / "config.json").write_text(json.dumps(MODEL))
    return Config(run=RunSection(fields=fields), model=ModelSection(path=str(folder)), field=declared, codec=Codec(name="zstd", level=3))


def test_known_fields_come_from_the_model_in_the_order_of_the_config(tmp_path: Path) -> None:
    schema = build_schema(config(tmp_path, "top_logprobs", "routed_experts"))
    assert [f.name for f in schema.fields] == ["top_logprobs", "routed_experts"]
    routing = schema.field("routed_experts")
    assert (routing.layer_ids, routing.row_shape, routing.dtype, routing.expert_count) == ((1, 2), (2, 4), "uint16", 300)
    assert schema.codec == Codec(name="zstd", level=3)


def test_a_declared_field_needs_no_code(tmp_path: Path) -> None:
    picks = Field(name="indexer_picks", alignment=Alignment.INPUT, dtype="uint16", row_shape=(8,))
    schema = build_schema(config(tmp_path, "indexer_picks", declared=(picks,)))
    assert schema.fields == (picks,)


def test_a_declaration_wins_over_the_known_one(tmp_path: Path) -> None:
    own = Field(name="routed_experts", alignment=Alignment.INPUT, dtype="uint8", row_shape=(2, 4), layers_per_chunk=1)
    assert build_schema(config(tmp_path, "routed_experts", declared=(own,))).fields == (own,)


def test_an_unknown_field_is_named_with_what_to_do(tmp_path: Path) -> None:
    for check in (build_schema, check_names):
        with pytest.raises(ConfigError, match=r"lists 'routed_expert': not one of routed_experts, .* needs a \[\[field\]\] table"):
            check(config(tmp_path, "routed_expert"))


def test_a_declaration_that_no_run_uses_is_refused(tmp_path: Path) -> None:
    idle = Field(name="picks", alignment=Alignment.INPUT, dtype="uint16")
    with pytest.raises(ConfigError, match=r"declares picks, which run\.fields does not list"):
        build_schema(config(tmp_path, "top_logprobs", declared=(idle,)))
