"""Layers, experts and vocabulary out of config.json of several model families."""

import json
from pathlib import Path
from typing import Any

import pytest

from fsref.errors import ConfigError
from fsref.wire.modelconfig import ModelShape, model_shape, read_model_shape

QWEN3: dict[str, Any] = {"num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 4, "vocab_size": 512}


def layers(**over: Any) -> tuple[int, ...]:
    return model_shape({**QWEN3, "num_hidden_layers": 6, **over}).layer_ids


def test_every_layer_of_a_plain_qwen3_moe_routes() -> None:
    assert model_shape({**QWEN3, "mlp_only_layers": [], "decoder_sparse_step": 1}) == ModelShape((0, 1, 2, 3), 4, 4, 16, 512)


def test_dense_layers_in_between_are_left_out() -> None:
    assert layers(mlp_only_layers=[0, 3]) == (1, 2, 4, 5)
    assert layers(decoder_sparse_step=2) == (1, 3, 5)
    assert layers(decoder_sparse_step=2, mlp_only_layers=[3]) == (1, 5)
    assert layers(first_k_dense_replace=2) == (2, 3, 4, 5)
    assert layers(first_k_dense_replace=1, moe_layer_freq=2) == (2, 4)
    assert layers(moe_layer_freq=[0, 1, 1, 0, 1, 0]) == (1, 2, 4)


def test_other_families_name_their_experts_differently() -> None:
    assert model_shape({**QWEN3, "num_experts": None, "n_routed_experts": 256}).expert_count == 256
    transformers5 = {k: v for k, v in QWEN3.items() if k != "num_experts"}
    assert model_shape({**transformers5, "num_local_experts": 8}).expert_count == 8


def test_a_nested_text_config_is_looked_into() -> None:
    assert model_shape({"model_type": "qwen3_vl_moe", "vocab_size": 7, "text_config": QWEN3}) == model_shape(QWEN3)


@pytest.mark.parametrize(
    ("over", "word"),
    [
        ({"num_experts": 0}, "no experts"),
        ({"num_experts": 1 << 20}, "num_experts is 1048576"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok is 17"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is None"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4'"),
        ({"num_hidden_layers": 1 << 30}, "num_hidden_layers"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "all 4 layers are dense"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    ],
)
def test_configs_that_do_not_add_up_are_refused_by_key(over: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        model_shape({**QWEN3, **over})


def test_a_folder_is_read_and_its_faults_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError, match="No such file"):
        read_model_shape(tmp_path)
    for text in ("{", "[1]", "\x00"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json"):
            read_model_shape(tmp_path)
    path.write_text(json.dumps(QWEN3))
    assert read_model_shape(tmp_path).top_k == 4
