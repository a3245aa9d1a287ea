"""The tools that break things break what they say, on both servers, and nothing else."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from botocore.exceptions import BotoCoreError, ClientError

from fsref.errors import ObjectMissing, StoreUnavailable
from fsref.store import Deletion
from fsref.store.filesystem import FilesystemStore
from tests.support.faultproxy import FaultProxy
from tests.support.faultystore import FaultyStore
from tests.support.s3servers import BUCKET, S3Server, s3_client


@pytest.fixture(params=["moto", "weed"])
def server(request: pytest.FixtureRequest) -> S3Server:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, S3Server)
    return found


def get(client: Any, key: str) -> bytes:
    return bytes(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())


def test_the_proxy_passes_and_counts_what_no_rule_breaks(server: S3Server, fault_proxy: Callable[[S3Server], FaultProxy]) -> None:
    proxy = fault_proxy(server)
    client = s3_client(proxy.endpoint)
    client.put_object(Bucket=BUCKET, Key="tools/a b<&", Body=b"x" * 300_000)
    assert get(client, "tools/a b<&") == b"x" * 300_000
    assert client.head_object(Bucket=BUCKET, Key="tools/a b<&")["ContentLength"] == 300_000
    assert [c["Key"] for c in client.list_objects_v2(Bucket=BUCKET, Prefix="tools/a")["Contents"]] == ["tools/a b<&"]
    client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": "tools/a b<&"}]})
    assert server.keys("tools/a") == []
    assert proxy.counts() == {"PUT": 1, "GET": 1, "HEAD": 1, "LIST": 1, "DELETE_MANY": 1}
    assert proxy.counts("tools/") == {"PUT": 1, "GET": 1, "HEAD": 1}


def test_each_fault_does_to_the_server_and_to_the_client_what_it_says(
    server: S3Server, fault_proxy: Callable[[S3Server], FaultProxy]
) -> None:
    proxy = fault_proxy(server)
    client = s3_client(proxy.endpoint)
    for action, arrives in (("status", False), ("reset_before", False), ("reset_after", True), ("lost_reply", True)):
        proxy.add(action, "PUT", key=action)  # type: ignore[arg-type]
        with pytest.raises((ClientError, BotoCoreError)):
            client.put_object(Bucket=BUCKET, Key=f"faults/{action}", Body=b"x")
        assert (server.keys(f"faults/{action}") == [f"faults/{action}"]) is arrives
    client.put_object(Bucket=BUCKET, Key="faults/a", Body=b"01234567")
    proxy.add("flip", "GET", size=3)
    assert get(client, "faults/a") == b"01224567"
    proxy.add("short", "GET", size=3)
    assert get(client, "faults/a") == b"012"
    proxy.add("throttle", "GET")
    proxy.add("duplicate", "GET")
    assert [get(client, "faults/a"), get(client, "faults/a")] == [b"01234567"] * 2
    proxy.add("truncate", "GET", size=3)
    with pytest.raises(BotoCoreError):
        get(client, "faults/a")
    assert get(client, "faults/a") == b"01234567"


def test_a_bulk_removal_can_fail_for_some_keys_only(server: S3Server, fault_proxy: Callable[[S3Server], FaultProxy]) -> None:
    proxy = fault_proxy(server)
    client = s3_client(proxy.endpoint)
    for name in ("some/a", "some/b"):
        client.put_object(Bucket=BUCKET, Key=name, Body=b"x")
    proxy.add("key_errors", "DELETE_MANY", failing="b$")
    reply = client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": "some/a"}, {"Key": "some/b"}]})
    assert [d["Key"] for d in reply["Deleted"]] == ["some/a"]
    assert [(e["Key"], e["Code"]) for e in reply["Errors"]] == [("some/b", "SlowDown")]
    assert server.keys("some/") == ["some/b"]


@pytest.mark.parametrize("action", ["stall", "hang"])
def test_a_request_that_hangs_does_so_until_it_is_let_go(
    moto: S3Server, fault_proxy: Callable[[S3Server], FaultProxy], action: Any
) -> None:
    proxy = fault_proxy(moto)
    client = s3_client(proxy.endpoint)
    client.put_object(Bucket=BUCKET, Key="hang", Body=b"01234567")
    proxy.add(action, "GET", size=3)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            get(client, "hang")
        except BotoCoreError as e:
            errors.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    assert proxy.broken.acquire(timeout=30)
    assert errors == []
    proxy.release()
    thread.join(60)
    assert len(errors) == 1


def test_the_faulty_store_breaks_one_operation_and_passes_the_others() -> None:
    store = FaultyStore(FilesystemStore("memory://tools/run"))
    with store:
        store.fail("put", StoreUnavailable("later"), name="a", times=1)
        with pytest.raises(StoreUnavailable):
            store.put("a", [b"1"])
        store.put("a", [b"1"])
        store.fail("delete", StoreUnavailable("lost reply"), after=True)
        assert isinstance(store.delete(["a"])["a"], StoreUnavailable)
        assert store.delete(["a"]) == {"a": Deletion.ABSENT}
        store.put("b", [b"2"])
        store.hidden.add("b")
        with pytest.raises(ObjectMissing):
            store.open("b")
        assert list(store.list("x")) == []
        store.honours_create_only = False
        store.put("b", [b"3"])
        store.clear()
        assert store.read("b", bytes_max=9) == b"3"
        gate = store.hang("read_into")
        done: list[bytes] = []
        thread = threading.Thread(target=lambda: done.append(store.read("b", bytes_max=9)))
        thread.start()
        assert gate.entered.wait(30)
        assert not gate.left.is_set()
        gate.release()
        thread.join(30)
        assert done == [b"3"]
        assert gate.left.is_set()
        out = np.zeros(1, np.uint8)
        with store.open("b") as file:
            file.read_into(0, out)
        assert store.calls["read_into"] == 3
