"""Address files."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from fsref import addresses as address
from fsref.errors import BadRef
from fsref.journal.identity import process_start

UUID = "0" * 32


def record(**changes: object) -> address.Address:
    return msgspec.structs.replace(address.here(run="r1", run_uuid=UUID, address="tcp://127.0.0.1:5", label="demo-0"), **changes)


def test_a_published_record_is_found_under_its_source(tmp_path: Path) -> None:
    path = address.address_path(tmp_path, split="train", name="demo", node="local-0")
    assert path == tmp_path / "train" / "demo.local-0.address"
    address.publish(path, record(nonce="1" * 16))
    newer = record(nonce="2" * 16)
    address.publish(path, newer)
    address.publish(address.address_path(tmp_path, split="train", name="demo-two", node="local-0"), record())
    assert address.find(tmp_path, split="train", name="demo") == [(path, newer)]
    assert address.find(tmp_path, split="eval", name="demo") == []
    assert [p.name for p in path.parent.iterdir() if p.name.startswith(".")] == []


def test_only_the_own_record_is_withdrawn(tmp_path: Path) -> None:
    path = address.address_path(tmp_path, split="train", name="demo", node="local-0")
    old, new = record(nonce="1" * 16), record(nonce="2" * 16)
    address.publish(path, new)
    address.withdraw(path, old)
    assert address.read(path) == new
    address.withdraw(path, new)
    assert address.read(path) is None
    address.withdraw(path, new)


@pytest.mark.parametrize("text", ["", "tcp://127.0.0.1:5", "{}", "[1]", '{"v": 1}'])
def test_anything_else_is_refused_and_not_found(tmp_path: Path, text: str) -> None:
    path = address.address_path(tmp_path, split="train", name="demo", node="local-0")
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(BadRef, match="is not an address file"):
        address.read(path)
    assert address.find(tmp_path, split="train", name="demo") == []


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train" / "demo.local-0.address"
    address.publish(path, record(v=2))
    with pytest.raises(BadRef, match="has format 2, this version reads 1"):
        address.read(path)


def test_this_process_is_not_stale_and_one_of_another_run_is() -> None:
    assert not address.stale(record(), run_uuid=UUID)
    assert address.stale(record(), run_uuid="1" * 32)


def test_a_process_that_ended_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        start = process_start(child.pid)
        assert start is not None
        child_record = record(pid=child.pid, pstart=start)
        assert not address.gone(child_record)
        child.kill()
        child.wait(20)
    assert address.gone(child_record)


@pytest.mark.parametrize("changes", [{"pstart": 1}, {"boot_id": "another"}])
def test_a_pid_of_another_process_or_boot_is_gone(changes: dict[str, object]) -> None:
    assert address.gone(record(pid=os.getpid(), **changes))


def test_of_another_host_nothing_is_known() -> None:
    assert not address.gone(record(host="elsewhere", pid=1, pstart=1, boot_id="another"))


def test_what_cannot_be_read_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise OSError(24, "too many open files")

    mine = record()
    monkeypatch.setattr(Path, "read_text", refuse)
    assert not address.gone(mine)


def test_a_record_of_another_start_of_the_job_is_stale() -> None:
    mine = record(attempt="12.1")
    assert not address.stale(mine, run_uuid=UUID, attempt="12.1")
    assert address.stale(mine, run_uuid=UUID, attempt="12.0")
    assert address.stale(mine, run_uuid=UUID)
    assert address.stale(record(), run_uuid=UUID, attempt="12.1")


def test_the_inference_of_a_job_is_found_by_node(tmp_path: Path) -> None:
    found = record(node="n1", address="http://10.0.0.1:8000")
    address.publish(address.inference_path(tmp_path, "n1"), found)
    assert address.find_inference(tmp_path) == [(tmp_path / "inference/n1.address", found)]


def test_a_folder_that_cannot_be_looked_through_just_now_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = address.address_path(tmp_path, split="train", name="demo", node="n1")
    address.publish(path, record())

    def stale_handle(_: Path) -> address.Address | None:
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(address, "read", stale_handle)
        with pytest.raises(OSError, match="Stale file handle"):
            address.find(tmp_path, split="train", name="demo")
    assert len(address.find(tmp_path, split="train", name="demo")) == 1
