"""Settings: what is read, what is refused and how that reads."""

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fsref import config as settings
from fsref.config import Config, EnvSection, SlurmSection, build, loading
from fsref.errors import ConfigError
from fsref.refs import Codec

SHIPPED = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


def load(folder: Path, text: str, *overrides: str) -> Config:
    path = folder / "c.toml"
    path.write_text(text)
    return settings.load(path, overrides)


def at(data: Any, key: str) -> Any:
    """What stands in plain data under a dotted key."""
    for part in key.split("."):
        data = data[int(part)] if isinstance(data, list) else data[part]
    return data


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "") == Config()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_shipped_configs_are_valid_and_ask_for_what_they_can_get(path: Path) -> None:
    config = settings.load(path)
    assert any(e.split == "train" for e in config.env)
    assert "routed_experts" in config.run.fields
    if "top_logprobs" in config.run.fields:
        assert config.sampling.top_logprobs > 0
    if config.inference.kind == "vllm":
        assert "sampling_mask" not in config.run.fields


def test_all_configs_ship() -> None:
    assert {"local.toml", "local-vllm.toml", "s3.toml", "s3-embedded.toml", "slurm.toml"} <= {p.name for p in SHIPPED}


def test_every_profile_of_the_s3_config_is_a_valid_choice() -> None:
    """Each commented block under [store], taken in."""
    head, _, store = next(p for p in SHIPPED if p.name == "s3.toml").read_text().partition("[store]\n")
    blocks = [b for b in store.split("\n\n")[1:] if "\n# " in b]
    assert [b.partition(":")[0].partition("\n")[0] for b in blocks] == [
        "# AWS S3",
        "# MinIO",
        "# SeaweedFS",
        "# Ceph RGW",
        "# Cloudflare R2",
    ]
    for block in blocks:
        keys = [line.removeprefix("# ") for line in block.splitlines() if re.match(r"# [a-z_]+ = ", line)]
        config = build(tomllib.loads(head + "[store]\n" + "\n".join(keys)), source="s3.toml")
        assert keys
        assert config.store.region or config.store.endpoint


def test_dump_and_parse_are_inverse() -> None:
    config = settings.load(SHIPPED[-1])
    assert settings.parse(settings.dump(config)) == config


def test_the_json_form_is_read_by_its_suffix_and_takes_overrides(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(settings.dump(settings.load(SHIPPED[-1])))
    assert settings.load(path, ["run.steps=3"]).run.steps == 3


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("run.steps=8", lambda c: c.run.steps == 8),
        ("run.root=s3://bucket/x", lambda c: c.run.root == "s3://bucket/x"),
        ("run.root='8'", lambda c: c.run.root == "8"),
        ("trainer.loss.replay=false", lambda c: c.trainer.loss.replay is False),
        ('run.fields=["top_logprobs"]', lambda c: c.run.fields == ("top_logprobs",)),
        ("env.0.replicas=5", lambda c: c.env[0].replicas == 5),
        ("run.root=3\ny = 4", lambda c: c.run.root == "3\ny = 4"),
        ("codec.name=none", lambda c: c.codec == Codec(name="none")),
        ("env.0.args={count = 3}", lambda c: c.env[0].args == {"count": 3}),
    ],
)
def test_overrides_are_toml_values_or_bare_words(tmp_path: Path, override: str, found: "object") -> None:
    assert callable(found)
    assert found(load(tmp_path, '[[env]]\nname = "demo"\n', override))


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        ("[orchestrator]\nbatchsize = 1", (), r"c\.toml: unknown key orchestrator\.batchsize; did you mean orchestrator\.batch_size\?"),
        ("[orchestratr]\nx = 1", (), r"unknown key orchestratr; did you mean orchestrator\?"),
        ("[trainer]\ngroup_size = 4", (), r"unknown key trainer\.group_size; did you mean orchestrator\.group_size\?"),
        ("[run]\nzzzzz = 4", (), r"unknown key run\.zzzzz; known here: attempt, fields, id,"),
        ('[[env]]\nname = "a"\nreplica = 2', (), r"unknown key env\[0\]\.replica; did you mean env\[0\]\.replicas\?"),
        ('[run]\nsteps = "8"', (), r"c\.toml: Expected `int`, got `str` at `run\.steps`"),
        ("[run]\nsteps = 0", (), r"Expected `int` >= 1 at `run\.steps`"),
        ("[run]\nfields = []", (), r"run\.fields is empty"),
        ("[[env]]\nworkers = 1", (), r"missing required field `name` at `env\[0\]`"),
        ('[[env]]\nname = "a"\n[[env]]\nname = "a"', (), r"two \[\[env\]\] tables have the same name"),
        ("[orchestrator]\nbatch_size = 9", (), r"batch_size 9 is not a multiple of group_size 8"),
        ("[codec]\nlevel = 12", (), r"<= 9 at `codec\.level`"),
        ("[[field]]\nname = 'Upper'\nalignment = 'input'\ndtype = 'uint8'", (), r"field name 'Upper' must match"),
        ("x =", (), r"c\.toml: not valid TOML"),
        ("", ("run.steps",), r"override 'run\.steps' is not of the form section\.key=value"),
        ("", ("=8",), r"is not of the form"),
        ("", ("run.id.deep=8",), r"`str`"),
        ("[run]\nid = 'x'", ("run.id.deep=8",), r"override 'run\.id\.deep': run\.id is a value, not a section"),
        ('[[env]]\nname = "a"', ("env.replicas=2",), r"name an element by its number, as in env\.0\.replicas"),
        ('[[env]]\nname = "a"', ("env.1.replicas=2",), r"'1' is not an index below 1"),
        ('[[env]]\nname = "a"', ("env.-1.replicas=2",), r"'-1' is not an index below 1"),
    ],
)
def test_what_is_wrong_is_named_with_the_nearest_right(tmp_path: Path, text: str, overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        load(tmp_path, text, *overrides)
    assert "\n" not in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config '.*none\.toml': No such file"):
        settings.load(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b"x = '\xe9'")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        settings.load(tmp_path / "latin.toml")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds no settings"):
        settings.load(tmp_path / "list.json")
    with pytest.raises(ConfigError, match="not a config"):
        settings.parse(b"{")


def test_keys_name_every_scalar_setting() -> None:
    keys = settings.keys()
    assert {"run.steps", "trainer.loss.replay", "trainer.parallel.data", "codec.name", "env"} <= set(keys)
    assert len(set(keys)) == len(keys)


def test_every_setting_is_accepted_as_an_override(tmp_path: Path) -> None:
    plain = msgspec.to_builtins(Config(env=(EnvSection(name="demo"),), slurm=SlurmSection()))
    names = settings.keys()
    for key in names:
        value = at(plain, key)
        value = not value if isinstance(value, bool) else value  # these at least are not the default
        if isinstance(value, str | int | float):
            found = load(tmp_path, "", f"{key}={msgspec.json.encode(value).decode()}")
            assert at(msgspec.to_builtins(found), key) == value


def test_configs_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Config().run.steps = 3  # type: ignore[misc]  # that it is refused is the point


@given(st.text(max_size=40) | st.from_regex(r"env\.[^.]{1,3}\.[^.]{1,3}"), st.text(max_size=20))
@example("env.0.name", "a")
@example("env.².name", "a")
@example("env." + "0" * 5000 + ".name", "a")
def test_any_override_is_applied_or_refused_with_one_error(key: str, value: str) -> None:
    data: dict[str, Any] = {"env": [{}]}
    wanted = loading._toml_value(value)
    refused = ""
    try:
        loading._assign(data, key, wanted)
    except ConfigError as e:
        refused = str(e)
    if refused:
        assert repr(key) in refused
        assert data["env"] == [{}]
    else:
        assert at(data, key) is wanted


def test_a_policy_that_could_not_replay_the_steps_since_the_checkpoint_is_refused() -> None:
    trainer = {"commit": "keep_last", "keep_last": 3, "checkpoint_every": 4}
    with pytest.raises(ConfigError, match=r"keep_last 3 is below checkpoint_every 4: .*set run.replay = 'drop'"):
        settings.build({"trainer": trainer})
    settings.build({"trainer": trainer | {"keep_last": 4}})
    settings.build({"trainer": trainer, "run": {"replay": "drop"}})


def test_a_collective_must_outlast_the_fetch_that_it_waits_for() -> None:
    with pytest.raises(ConfigError, match=r"collective_s 60 is not longer than store.fetch_deadline_s 60"):
        settings.build({"trainer": {"collective_s": 60}, "store": {"fetch_deadline_s": 60}})


@pytest.mark.parametrize(
    "settings",
    [
        {"run": {"root": "s3://user:SENTINEL@bucket/x"}},
        {"run": {"root": "s3://bucket/x?X-Amz-Signature=SENTINEL"}},
        {"store": {"endpoint": "http://user:SENTINEL@host:9000"}},
        {"inference": {"address": "http://SENTINEL@host:8000"}},
    ],
)
def test_a_url_with_a_credential_is_refused_and_not_shown(settings: dict[str, dict[str, str]]) -> None:
    with pytest.raises(ConfigError, match="credentials come from the environment") as refused:
        build(settings)
    assert "SENTINEL" not in str(refused.value)
