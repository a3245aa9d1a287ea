"""From the config to tasks, sampling and clients."""

import json
from pathlib import Path

import pytest

pytest.importorskip("verifiers", reason="needs verifiers: install the extra of that name")

from fsref.config import EnvSection, SamplingSection
from fsref.episodes import Target, load_tasks, sampling_values
from fsref.episodes.source import client_config, env_config, renderer_for, sampling_config
from fsref.errors import ConfigError


def demo(**args: object) -> EnvSection:
    return EnvSection(name="demo", args=args)


def test_tasks_follow_from_the_seed_and_their_index() -> None:
    few, many = list(load_tasks(demo(count=3))), list(load_tasks(demo(count=9), limit=3))
    assert few == many
    assert [t.index for t in few] == [0, 1, 2]
    assert few != list(load_tasks(demo(count=3, seed=1)))
    assert len({t.key for t in load_tasks(demo(count=50))}) == 50
    json.dumps([dict(t.data) for t in few])


def test_shares_of_turns_and_forks_are_as_asked() -> None:
    tasks = list(load_tasks(demo(count=200, two_turn_share=0.5, fork_share=0.25, kinds=["digits", "first"])))
    assert 70 < sum(t.data["turns"] == 2 for t in tasks) < 130
    assert 30 < sum(t.data["fork"] for t in tasks) < 70
    assert {t.data["kind"] for t in tasks} == {"digits", "first"}


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (EnvSection(name="demo", taskset="no.such.module"), "No module named 'no'"),
        (EnvSection(name="demo", taskset="no_such_module"), "no_such_module"),
        (EnvSection(name="demo", taskset="fsref.refs"), "__all__"),
        (demo(cuont=3), "cuont"),
        (demo(count=0), "greater than or equal to 1"),
        (EnvSection(name="demo", env_args={"agent": {"no_such": 1}}), "no_such"),
    ],
)
def test_a_source_that_cannot_be_set_up_says_why(env: EnvSection, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"env 'demo': taskset .* cannot be set up: [\s\S]*{text}"):
        env_config(env)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="name at least one of"):
        list(load_tasks(demo(kinds=["runes"])))


def test_heads_are_asked_for_only_where_the_run_has_them() -> None:
    section = SamplingSection(top_logprobs=5, top_k=9)
    assert sampling_values(section, ["top_logprobs"])["logprobs"] == 5
    assert "logprobs" not in sampling_values(section, ["routed_experts"])
    assert sampling_values(section, [], seed=3)["seed"] == 3
    with pytest.raises(ConfigError, match=r"sampling\.top_logprobs is 0"):
        sampling_values(SamplingSection(top_logprobs=0), ["top_logprobs"])


def test_sampling_reaches_the_engine_by_its_own_names() -> None:
    values = sampling_values(SamplingSection(tokens_max=7, top_k=9), ["top_logprobs"])
    assert sampling_config(values).model_dump(exclude_none=True) == values


def test_a_client_talks_to_the_engine_without_credentials(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    train = client_config(Target(base_url="http://127.0.0.1:1/", model="policy", tokenizer=str(tmp_path)))
    assert (train.type, train.base_url, train.renderer_model_name) == ("train", "http://127.0.0.1:1/v1", str(tmp_path))
    assert train.renderer.name == "qwen3"
    relay = client_config(Target(base_url="http://127.0.0.1:1", model="policy", tokenizer="", kind="eval"))
    assert (relay.type, relay.base_url) == ("eval", "http://127.0.0.1:1/v1")


def test_other_models_get_the_renderer_that_verifiers_chooses(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert renderer_for(str(tmp_path)) is None
    assert renderer_for(str(tmp_path / "none")) is None
