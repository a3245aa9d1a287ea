"""Small rules of workers and brokers."""

import msgpack
import pytest

pytest.importorskip("verifiers", reason="needs verifiers: install the extra of that name")

from fsref.config import Config, EnvSection
from fsref.envserver.install import strip
from fsref.envserver.main import reachable
from fsref.envserver.resources import Settings, section
from fsref.envserver.worker import cancel_target, worker_index
from fsref.errors import ConfigError


@pytest.mark.parametrize(("address", "index"), [("ipc:///tmp/vf-pool-x/3", 3), ("tcp://127.0.0.1:4001", 0)])
def test_a_worker_knows_its_number_by_its_address(address: str, index: int) -> None:
    assert worker_index(address) == index


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgpack.packb([1]), msgpack.packb({"request_id": 5}), msgpack.packb({}), b"\xff" * 9])
def test_a_cancel_that_is_none_names_no_request(payload: bytes) -> None:
    assert cancel_target(payload) == ""


def test_a_cancel_names_its_request() -> None:
    assert cancel_target(msgpack.packb({"request_id": "abc"})) == "abc"


def test_deltas_lose_arrays_and_nothing_else() -> None:
    node = {"token_ids": [1], "routed_experts": {"__nd__": True}, "sampling_mask": None, "top_logprobs": {}}
    delta = {"trace": "t", "nodes": [node], "routing_repairs": {0: {}}, "set": {"info": {}}}
    assert strip(delta) == {"trace": "t", "nodes": [{"token_ids": [1]}], "set": {"info": {}}}
    assert strip([1]) == [1]


def test_a_wildcard_is_published_as_an_address_that_others_reach() -> None:
    assert reachable("tcp://127.0.0.1:5") == "tcp://127.0.0.1:5"
    host = reachable("tcp://0.0.0.0:5").removeprefix("tcp://").removesuffix(":5")
    assert host not in ("0.0.0.0", "")


def test_an_unknown_source_names_the_ones_there_are() -> None:
    config = Config(env=(EnvSection(name="one"), EnvSection(name="two")))
    assert section(config, "two").name == "two"
    with pytest.raises(ConfigError, match=r"no \[\[env\]\] table named 'three'; it has \['one', 'two'\]"):
        section(config, "three")


def test_incarnations_are_labelled_by_source_and_replica() -> None:
    assert Settings(config_json=b"", env="demo", replica=2).label == "demo-2"
