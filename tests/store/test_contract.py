"""One contract, every backend: the checks look around the store where they can."""

import copy
import os
import pickle
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fsref.config import StoreSection
from fsref.errors import BadRef, ConfigError, ObjectCorrupt, ObjectExists, ObjectMissing, StoreError
from fsref.store import Buffer, Capabilities, Deletion, Store, open_root, probe
from fsref.store.posix import PosixStore
from tests.support.s3servers import BUCKET, S3Server

BACKENDS = ["posix", "fsspec-file", "fsspec-memory", "obstore-moto", "obstore-weed", "s3fs-moto", "s3fs-weed"]


@pytest.fixture(params=BACKENDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    kind, _, where = request.param.partition("-")
    if where in {"moto", "weed"}:
        server: S3Server = request.getfixturevalue(where)
        request.getfixturevalue("s3_credentials")
        settings = server.settings(driver="obstore" if kind == "obstore" else "fsspec")
        made = open_root(f"s3://{BUCKET}/{uuid.uuid4().hex}", run="run", settings=settings)
    elif kind == "posix":
        made = open_root(str(tmp_path), run="run", create=True)
    elif where == "file":
        made = open_root(str(tmp_path), run="run", settings=StoreSection(driver="fsspec"))
    else:
        made = open_root(f"memory://{uuid.uuid4().hex}", run="run")
    with made:
        yield made


def on_s3(store: Store) -> bool:
    return store.url.startswith("s3://")


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
            half = len(out) // 2
            outs = [np.zeros(n, np.uint8) for n in (half, 0, len(out) - half)]
            file.read_scattered(start, outs)
            assert b"".join(o.tobytes() for o in outs) == whole[start:]
            for size in (0, half, len(out)):
                assert file.read_view(start, size, lambda n: np.zeros(n, np.uint8)).tobytes() == whole[start : start + size]


def test_a_read_beyond_the_end_is_corruption_not_a_short_result(store: Store) -> None:
    store.put("x", [b"12345"])
    with store.open("x") as file:
        for start, size in ((0, 6), (4, 2), (5, 1), (99, 1)):
            with pytest.raises(ObjectCorrupt, match="truncated"):
                file.read_into(start, np.empty(size, np.uint8))
            with pytest.raises(ObjectCorrupt, match="truncated"):
                file.read_scattered(start, [np.empty(size - 1, np.uint8), np.empty(1, np.uint8)])
            with pytest.raises(ObjectCorrupt, match="truncated"):
                file.read_view(start, size, lambda n: np.empty(n, np.uint8))


@pytest.mark.payload("F8")
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


@pytest.mark.payload("F11")
def test_each_removal_has_its_own_outcome(store: Store) -> None:
    store.put("obj/a/1", [b"1"])
    store.put("obj/a/2", [b"2"])
    absent = Deletion.DONE if on_s3(store) else Deletion.ABSENT  # S3 does not tell
    assert store.delete(["obj/a/1", "obj/a/9", "zzz/1"]) == {"obj/a/1": Deletion.DONE, "obj/a/9": absent, "zzz/1": absent}
    assert [e.name for e in store.list("obj")] == ["obj/a/2"]
    assert store.delete(["obj/a/1"]) == {"obj/a/1": absent}


def test_a_listing_has_every_object_below_the_prefix_and_no_other(store: Store) -> None:
    for name in ("obj/a/1", "obj/b/2", "obj/b/.3.tmp", "objects/x", "steps/s/S.json"):
        store.put(name, [name.encode()])
    assert {(e.name, e.byte_count) for e in store.list("obj")} == {("obj/a/1", 7), ("obj/b/2", 7), ("obj/b/.3.tmp", 12)}
    assert list(store.list("nothing")) == []


def test_clearing_a_prefix_removes_all_of_it_and_nothing_beside_it(store: Store) -> None:
    for name in ("obj/a/1", "obj/b/.3.tmp", "obj/c", "objects/x", "steps/s/S.json"):
        store.put(name, [b"x"])
    assert store.remove_all("obj") == 3
    assert list(store.list("obj")) == []
    assert [e.name for prefix in ("objects", "steps") for e in store.list(prefix)] == ["objects/x", "steps/s/S.json"]
    assert store.remove_all("obj") == 0


ILLEGAL = ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/./b", "a\x00b", "a\nb",
    "ü", "a/" + "b" * 300, "%2e%2e/x", "a b"]  # fmt: skip


@pytest.mark.fault(54)
def test_an_illegal_name_is_refused_before_any_io(store: Store) -> None:
    for name in ILLEGAL:
        calls = (
            lambda n=name: store.put(n, [b""]),
            lambda n=name: store.replace(n, b""),
            lambda n=name: store.open(n),
            lambda n=name: store.open(n, byte_count=1),
            lambda n=name: store.read(n, bytes_max=1),
            lambda n=name: store.delete([n]),
            lambda n=name: list(store.list(n)),
        )
        for call in calls:
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
            for k in range(5):
                name, data = f"obj/w{n}/{k}", bytes([n]) * (1000 + k)
                store.put(name, [data], durability="process")
                assert content(store, name) == data
        except BaseException as e:  # noqa: BLE001 - handed to the test's thread
            errors.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert errors == []
    assert len(list(store.list("obj"))) == 20


def test_a_file_opened_with_its_known_size_reads_like_any_other(store: Store) -> None:
    store.put("x", [b"12345"])
    with store.open("x", byte_count=5) as file:
        out = np.empty(3, np.uint8)
        file.read_into(1, out)
        assert (file.byte_count, out.tobytes()) == (5, b"234")
        assert file.read_view(1, 3, lambda n: np.empty(n, np.uint8)).tobytes() == b"234"


def test_what_is_absent_shows_at_the_first_read_at_the_latest(store: Store) -> None:
    with pytest.raises(ObjectMissing), store.open("nothing", byte_count=5) as file:
        file.read_into(0, np.empty(5, np.uint8))
    with pytest.raises(ObjectMissing), store.open("nothing", byte_count=5) as file:
        file.read_view(0, 5, lambda n: np.empty(n, np.uint8))


def test_the_check_of_a_store_finds_what_it_does_and_leaves_nothing(store: Store) -> None:
    found = probe(store)
    kind = "posix" if isinstance(store, PosixStore) else store.url.partition("://")[0]
    expected = Capabilities(
        create_only=kind in {"s3", "memory"},
        list_after_write=True,
        bulk_delete_max=1000 if kind == "s3" else 1,
        delete_works=True,
        versioning="off" if kind == "s3" else "none",
    )
    assert found == expected
    assert (found.shortcomings() == ()) is found.create_only
    assert list(store.list("probe")) == []


def test_a_store_is_not_pickled_or_copied_because_that_would_carry_its_credentials(store: Store) -> None:
    for carry in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="open one per process"):
            carry(store)


def test_many_objects_are_listed_and_removed(store: Store) -> None:
    names = [f"obj/a/{n:04d}" for n in range(30)]
    for name in names:
        store.put(name, [b"x"], durability="process")
    assert sorted(e.name for e in store.list("obj")) == names
    assert set(store.delete(names).values()) == {Deletion.DONE}
    assert list(store.list("obj")) == []


@pytest.mark.payload("F21")
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
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))  # those of servers that the session's other tests share among them

    with PosixStore(tmp_path, create=True) as store:
        before = descriptors()
        for n in range(600):
            store.put(f"obj/w{n}/0", [b"x"], durability="process")
        assert descriptors() - before < 200
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
