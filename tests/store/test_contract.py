"""One contract, every backend: the checks look around the store where they can."""

import os
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from moto.server import ThreadedMotoServer

from fsref.errors import BadRef, ConfigError, ObjectCorrupt, ObjectExists, ObjectMissing, StoreError
from fsref.store import Buffer, Deletion, Store, open_root
from fsref.store.filesystem import FilesystemStore
from fsref.store.objectstorage import ObjectStorageStore
from fsref.store.posix import PosixStore


@pytest.fixture(scope="module")
def bucket_endpoint() -> Iterator[str]:
    """A moto server with a bucket, on a free loopback port."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    endpoint = f"http://127.0.0.1:{port}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "SENTINEL", "AWS_REGION": "us-east-1"}.items():
            patch.setenv(name, value)
        request = urllib.request.Request(f"{endpoint}/bucket", method="PUT")
        urllib.request.urlopen(request, timeout=30).close()
        yield endpoint
    server.stop()


@pytest.fixture(params=["posix", "fsspec-file", "fsspec-memory", "obstore-s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "obstore-s3":
        endpoint = request.getfixturevalue("bucket_endpoint")
        made: Store = ObjectStorageStore(f"s3://bucket/{uuid.uuid4().hex}/run", endpoint=endpoint, region="us-east-1")
    elif request.param == "posix":
        made = PosixStore(tmp_path / "run", create=True)
    elif request.param == "fsspec-file":
        made = FilesystemStore(f"file://{tmp_path}/run")
    else:
        made = FilesystemStore(f"memory://{uuid.uuid4().hex}/run")
    with made:
        yield made


def content(store: Store, name: str) -> bytes:
    return store.read(name, bytes_max=1 << 20)


def test_what_was_put_is_read_in_any_range(store: Store) -> None:
    parts: list[Buffer] = [b"abc", bytearray(b""), memoryview(b"defg"), np.arange(3, dtype=np.uint16)]
    store.put("obj/a/0000000000.zip", parts)
    whole = b"abcdefg" + np.arange(3, dtype="<u2").tobytes()
    assert content(store, "obj/a/0000000000.zip") == whole
    with store.open("obj/a/0000000000.zip") as file:
        assert file.byte_count == len(whole)
        for start in range(len(whole)):
            out = np.empty(len(whole) - start, np.uint8)
            file.read_into(start, out)
            assert out.tobytes() == whole[start:]


def test_a_read_beyond_the_end_is_corruption_not_a_short_result(store: Store) -> None:
    store.put("x", [b"12345"])
    with store.open("x") as file:
        for start, size in ((0, 6), (4, 2), (5, 1), (99, 1)):
            with pytest.raises(ObjectCorrupt, match="truncated"):
                file.read_into(start, np.empty(size, np.uint8))


def test_names_are_insert_only_and_control_files_can_be_replaced(store: Store) -> None:
    store.put("a/b", [b"1"])
    with pytest.raises(ObjectExists):
        store.put("a/b", [b"2"])
    assert content(store, "a/b") == b"1"
    store.replace("a/b", b"3")
    store.replace("new", b"4")
    assert (content(store, "a/b"), content(store, "new")) == (b"3", b"4")


def test_a_missing_object_is_missing(store: Store) -> None:
    for name in ("nothing", "no/such/folder"):
        with pytest.raises(ObjectMissing):
            store.open(name)


def test_each_removal_has_its_own_outcome(store: Store) -> None:
    store.put("obj/a/1", [b"1"])
    store.put("obj/a/2", [b"2"])
    absent = Deletion.DONE if isinstance(store, ObjectStorageStore) else Deletion.ABSENT  # S3 does not tell
    assert store.delete(["obj/a/1", "obj/a/9", "zzz/1"]) == {"obj/a/1": Deletion.DONE, "obj/a/9": absent, "zzz/1": absent}
    assert [e.name for e in store.list("obj")] == ["obj/a/2"]
    assert store.delete(["obj/a/1"]) == {"obj/a/1": absent}


def test_a_listing_has_every_object_below_the_prefix_and_no_other(store: Store) -> None:
    for name in ("obj/a/1", "obj/b/2", "obj/b/.3.tmp", "objects/x", "steps/s/S.json"):
        store.put(name, [name.encode()])
    assert {(e.name, e.byte_count) for e in store.list("obj")} == {("obj/a/1", 7), ("obj/b/2", 7), ("obj/b/.3.tmp", 12)}
    assert list(store.list("nothing")) == []


ILLEGAL = ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/./b", "a\x00b", "a\nb",
    "ü", "a/" + "b" * 300, "%2e%2e/x", "a b"]  # fmt: skip


@pytest.mark.parametrize("name", ILLEGAL)
def test_an_illegal_name_is_refused_before_any_io(store: Store, name: str) -> None:
    for call in (lambda: store.put(name, [b""]), lambda: store.open(name), lambda: store.delete([name]), lambda: list(store.list(name))):
        with pytest.raises(BadRef):
            call()


def test_a_small_read_is_bounded(store: Store) -> None:
    store.put("x", [b"12345"])
    with pytest.raises(StoreError, match="at most 4"):
        store.read("x", bytes_max=4)


def test_concurrent_readers_and_writers_do_not_mix(store: Store) -> None:
    errors: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for k in range(10):
                name, data = f"obj/w{n}/{k}", bytes([n]) * (1000 + k)
                store.put(name, [data], durability="process")
                assert content(store, name) == data
        except BaseException as e:  # noqa: BLE001 - handed to the test's thread
            errors.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert errors == []
    assert len(list(store.list("obj"))) == 60


def test_the_posix_store_leaves_no_staging_file_when_publishing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with PosixStore(tmp_path, create=True) as store:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match="free space"):
            store.put("obj/a/1", [b"1"])
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize("where", ["folder", "object"])
def test_the_posix_store_follows_no_link_below_the_root(tmp_path: Path, where: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "0.zip").write_bytes(b"secret")
    root = tmp_path / "run"
    (root / "obj").mkdir(parents=True)
    if where == "folder":
        (root / "obj" / "a").symlink_to(outside)
    else:
        (root / "obj" / "a").mkdir()
        (root / "obj" / "a" / "0.zip").symlink_to(outside / "0.zip")
    with PosixStore(root) as store:
        with pytest.raises(StoreError):
            store.open("obj/a/0.zip")
        if where == "folder":
            with pytest.raises(StoreError):
                store.put("obj/a/1.zip", [b"x"])
        store.delete(["obj/a/0.zip"])
    assert (outside / "0.zip").read_bytes() == b"secret"
    assert len(list(outside.iterdir())) == 1


def test_a_hard_link_and_a_pipe_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    os.link(tmp_path / "a", tmp_path / "b")
    os.mkfifo(tmp_path / "pipe")
    with PosixStore(tmp_path) as store:
        for name in ("a", "b", "pipe"):
            with pytest.raises(StoreError, match="not a regular file with one name"):
                store.open(name)


def test_many_folders_keep_the_descriptor_count_flat(tmp_path: Path) -> None:
    with PosixStore(tmp_path, create=True) as store:
        for n in range(300):
            store.put(f"obj/w{n}/0", [b"x"], durability="process")
        assert len(list(Path("/proc/self/fd").iterdir())) < 200
        assert content(store, "obj/w0/0") == b"x"


def test_a_folder_that_was_removed_and_made_again_is_seen(tmp_path: Path) -> None:
    with PosixStore(tmp_path, create=True) as store:
        store.put("obj/a/1", [b"x"])
        (tmp_path / "obj/a/1").unlink()
        (tmp_path / "obj/a").rmdir()
        store.put("obj/a/1", [b"y"])
        assert (tmp_path / "obj/a/1").read_bytes() == b"y"


def test_open_root_says_what_is_wrong_with_a_root(tmp_path: Path) -> None:
    with pytest.raises(ObjectMissing, match="opening the root"):
        open_root(str(tmp_path / "absent"), run="r")
    with pytest.raises(ConfigError, match=r"nosuchproto://bucket"):
        open_root("nosuchproto://key:secret@bucket/x?token=1", run="r")
    with pytest.raises(BadRef):
        open_root(str(tmp_path), run="../r")
    with open_root(f"file://{tmp_path}", run="r", create=True) as store:
        assert store.posix_path == str(tmp_path / "r")


def test_a_put_whose_reply_was_lost_is_a_success_and_another_object_is_not(bucket_endpoint: str) -> None:
    with ObjectStorageStore("s3://bucket/lost/run", endpoint=bucket_endpoint, region="us-east-1") as store:
        store.put("obj/a/1", [b"same"])
        store.put("obj/a/1", [b"sa", b"me"])
        with pytest.raises(ObjectExists):
            store.put("obj/a/1", [b"diff"])


def test_a_bucket_that_does_not_answer_is_unavailable_and_no_secret_is_shown(bucket_endpoint: str) -> None:
    del bucket_endpoint  # only its credentials in the environment
    store = ObjectStorageStore("s3://bucket/x/run", endpoint="http://127.0.0.1:9", region="us-east-1")
    with pytest.raises(StoreError) as caught:
        store.open("obj/a/1")
    assert "SENTINEL" not in f"{caught.value} {caught.value!r} {store.url}"
    with pytest.raises(ConfigError, match="s3://bucket/prefix"):
        ObjectStorageStore("s3://key:SENTINEL@bucket/x")
