"""The folder that the tiny model is made of."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from fsref import config as settings
from fsref.errors import ConfigError
from fsref.inference.model import SPECIAL_TOKENS, ModelSizes, main, make_model
from fsref.wire.modelconfig import read_model_shape
from tests.inference.conftest import SIZES


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_model(tmp_path / name, seed=seed, sizes=SIZES)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    changed = {n for n, d in digests(tmp_path / "c").items() if digests(tmp_path / "a")[n] != d}
    assert changed == {"model.safetensors"}


def test_its_config_says_which_layers_route(model_folder: Path) -> None:
    shape = read_model_shape(model_folder)
    assert shape.layer_ids == (0, 2)
    assert (shape.layer_count, shape.top_k, shape.expert_count, shape.vocab_count) == (3, 2, 8, 512)


def test_a_folder_with_a_model_is_left_alone(model_folder: Path) -> None:
    before = digests(model_folder)
    with pytest.raises(ConfigError, match="holds a model already"):
        make_model(model_folder, seed=1)
    assert digests(model_folder) == before


@pytest.mark.parametrize(
    ("sizes", "word"),
    [({"vocab_count": 256}, "vocab_count"), ({"heads": 3}, "heads"), ({"head_dim": 15}, "heads"), ({"top_k": 17}, "top_k")],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        ModelSizes(**sizes)


def test_transformers_loads_every_tensor_and_no_other(model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    _, info = load(model_folder, output_loading_info=True)
    assert not any(info.values())


def test_every_token_of_the_vocabulary_decodes_and_the_special_ones_have_fixed_ids(model_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    assert len(tokenizer) == 512
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.eos_token_id == json.loads((model_folder / "config.json").read_text())["eos_token_id"] == 2
    text = "what is 3 plus 4? ünïcode"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_qwen3_renderer_bridges_a_second_turn(model_folder: Path) -> None:
    from renderers import create_renderer
    from renderers.base import load_tokenizer
    from renderers.configs import Qwen3RendererConfig

    renderer = create_renderer(load_tokenizer(str(model_folder)), Qwen3RendererConfig(thinking_retention="all"))
    first = renderer.render([{"role": "user", "content": "one plus two"}], add_generation_prompt=True)
    completion = [300, 301, 2]
    bridged = renderer.bridge_to_next_turn(first.token_ids, completion, [{"role": "user", "content": "and now"}])
    assert bridged is not None
    assert bridged.token_ids[: len(first.token_ids) + 3] == [*first.token_ids, *completion]


def test_the_launchers_step_makes_the_configured_folder(tmp_path: Path) -> None:
    config = settings.build({"run": {"id": "r", "seed": 5}, "model": {"path": str(tmp_path / "model")}})
    main(config)
    make_model(tmp_path / "same", seed=5)
    assert digests(tmp_path / "model") == digests(tmp_path / "same")
