"""What the S3 store does when servers, networks and credentials fail: through a proxy that breaks requests, in front of a real server."""

import multiprocessing
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import obstore
import pytest
from numpy.typing import NDArray
from obstore import exceptions as failures

from fsref.config import StoreSection
from fsref.errors import (
    ConfigError,
    FsrefError,
    ObjectCorrupt,
    ObjectExists,
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from fsref.store import Credentials, Deletion, Store, open_root, probe
from fsref.store.base import ObjectFile
from fsref.store.bulkdelete import read_reply
from fsref.store.objectstorage import PUT_BYTES_MAX, ObjectStorageStore
from fsref.store.retry import Retries
from fsref.store.s3errors import BY_CLASS, from_obstore, of_reply
from tests.support.faultproxy import FaultProxy
from tests.support.faultystore import FaultyStore
from tests.support.s3servers import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server

pytestmark = pytest.mark.usefixtures("s3_credentials")
NAME = "obj/a/0000000000.zip"


class Stage:
    """A store behind a proxy, and the server behind both."""

    def __init__(self, server: S3Server, proxy: FaultProxy, driver: str) -> None:
        self.server, self.proxy, self.driver = server, proxy, driver
        self.root = f"s3://{BUCKET}/{uuid.uuid4().hex}"
        self.stores: list[Store] = []
        self.store = self.open()
        proxy.clear()

    def open(self, **values: object) -> ObjectStorageStore:
        settings = self.server.settings(endpoint=self.proxy.endpoint, driver=self.driver, **{"retry_s": 60.0, "stall_s": 5.0, **values})
        store = open_root(self.root, run="run", settings=settings)
        self.stores.append(store)
        return store  # type: ignore[return-value]  # both drivers count retries

    def there(self) -> list[str]:
        """Names that the server really holds."""
        prefix = f"{self.root.removeprefix(f's3://{BUCKET}/')}/run/"
        return [k.removeprefix(prefix) for k in self.server.keys(prefix)]

    def close(self) -> None:
        for store in self.stores:
            store.close()


def staged(server: S3Server, fault_proxy: Callable[[S3Server], FaultProxy], driver: str) -> Iterator[Stage]:
    stage = Stage(server, fault_proxy(server), driver)
    yield stage
    stage.close()


@pytest.fixture(params=["obstore", "fsspec"])
def both(request: pytest.FixtureRequest, moto: S3Server, fault_proxy: Callable[[S3Server], FaultProxy]) -> Iterator[Stage]:
    """Either driver."""
    yield from staged(moto, fault_proxy, request.param)


@pytest.fixture
def stage(moto: S3Server, fault_proxy: Callable[[S3Server], FaultProxy]) -> Iterator[Stage]:
    """The default driver."""
    yield from staged(moto, fault_proxy, "obstore")


@pytest.mark.fault(46)
def test_bursts_of_slow_down_are_waited_out_and_nothing_is_lost(both: Stage) -> None:
    for kind in ("PUT", "GET", "DELETE_MANY", "LIST"):
        both.proxy.add("status", kind, times=3)
    both.store.put(NAME, [b"data"])
    assert both.there() == [NAME]
    assert [e.name for e in both.store.list("obj")] == [NAME]
    out = np.empty(4, np.uint8)
    with both.store.open(NAME, byte_count=4) as file:
        file.read_into(0, out)
    assert out.tobytes() == b"data"
    assert both.store.delete([NAME]) == {NAME: Deletion.DONE}
    assert both.there() == []
    assert both.store.retries == 12
    assert both.proxy.counts() == {"PUT": 4, "GET": 4, "DELETE_MANY": 4, "LIST": 4}


@pytest.mark.fault(46)
def test_a_store_that_stays_overloaded_is_given_up_after_the_configured_attempts(both: Stage) -> None:
    store = both.open(retries_max=2)
    for kind in ("PUT", "GET", "DELETE_MANY"):
        both.proxy.add("status", kind, times=100)
    with pytest.raises(StoreUnavailable, match="given up after 3 attempts"):
        store.put(NAME, [b"data"])
    with pytest.raises(StoreUnavailable, match="given up after 3 attempts"):
        store.read(NAME, bytes_max=9) if both.driver == "obstore" else store.open(NAME, byte_count=4).read_into(0, np.empty(4, np.uint8))
    assert isinstance(store.delete([NAME])[NAME], StoreUnavailable)
    assert both.proxy.counts(NAME)["PUT"] == 3


def test_waits_double_with_jitter_and_end_when_the_store_is_closed() -> None:
    retries = Retries(retries_max=20, retry_s=1e9, wait_min_s=1.0)
    for attempt, ceiling in enumerate((1, 2, 4, 8, 10, 10)):
        waits = {retries.wait_s(attempt) for _ in range(50)}
        assert min(waits) >= ceiling / 2
        assert max(waits) <= ceiling
        assert len(waits) > 40
    retries.stop()

    def fails() -> None:
        raise StoreUnavailable("overloaded")

    with pytest.raises(StoreUnavailable, match="x, given up after 1 attempt: overloaded"):
        retries.run(fails, "x")


def test_no_further_attempt_begins_after_the_deadline() -> None:
    retries = Retries(retries_max=1000, retry_s=1e-9)
    calls: list[int] = []

    def fails() -> None:
        calls.append(1)
        raise StoreUnavailable("overloaded")

    with pytest.raises(StoreUnavailable):
        retries.run(fails, "x")
    assert len(calls) == 1
    assert retries.count == 0


@pytest.mark.fault(47)
@pytest.mark.parametrize("action", ["lost_reply", "reset_after", "duplicate"])
def test_a_put_whose_reply_was_lost_is_one_success(both: Stage, action: str) -> None:
    both.proxy.add(action, "PUT")  # type: ignore[arg-type]
    both.store.put(NAME, [b"da", b"ta"])
    assert both.there() == [NAME]
    assert both.store.read(NAME, bytes_max=9) == b"data"


@pytest.mark.fault(47)
def test_another_object_under_the_name_is_a_refusal_even_after_a_lost_reply(both: Stage) -> None:
    both.store.put(NAME, [b"first"])
    both.proxy.add("reset_before", "PUT")
    with pytest.raises(ObjectExists):
        both.store.put(NAME, [b"other"])
    assert both.store.read(NAME, bytes_max=9) == b"first"


@pytest.mark.fault(47)
def test_a_put_that_cannot_be_compared_is_unknown_and_neither_success_nor_refusal(stage: Stage) -> None:
    store = stage.open(retries_max=1)
    stage.proxy.add("lost_reply", "PUT")
    stage.proxy.add("status", "HEAD", times=100)
    with pytest.raises(StoreUnavailable):
        store.put(NAME, [b"data"])


@pytest.mark.fault(48)
@pytest.mark.parametrize("action", ["lost_reply", "reset_after", "reset_before", "duplicate"])
def test_a_removal_whose_reply_was_lost_is_done(both: Stage, action: str) -> None:
    names = [f"obj/a/{n}" for n in range(5)]
    for name in names:
        both.store.put(name, [b"x"])
    both.proxy.add(action, "DELETE_MANY")  # type: ignore[arg-type]
    assert both.store.delete(names) == dict.fromkeys(names, Deletion.DONE)
    assert both.there() == []


@pytest.mark.fault(49)
def test_keys_that_failed_in_a_reply_of_200_are_removed_by_further_requests(both: Stage) -> None:
    names = [f"obj/a/{n}" for n in range(6)]
    for name in names:
        both.store.put(name, [b"x"])
    both.proxy.add("key_errors", "DELETE_MANY", failing="[135]$", code="InternalError")
    both.proxy.add("key_errors", "DELETE_MANY", failing="3$")
    assert both.store.delete(names) == dict.fromkeys(names, Deletion.DONE)
    assert both.there() == []
    assert both.proxy.counts()["DELETE_MANY"] == 3


@pytest.mark.fault(49)
@pytest.mark.parametrize(("code", "kind"), [("AccessDenied", StoreDenied), ("InternalError", StoreUnavailable), ("Unheard", StoreError)])
def test_a_key_that_keeps_failing_is_never_done_and_the_others_are(both: Stage, code: str, kind: type[StoreError]) -> None:
    """s3fs#838: its own bulk removal reports success for these."""
    store = both.open(retries_max=1)
    for name in ("obj/a/1", "obj/a/2"):
        store.put(name, [b"x"])
    both.proxy.add("key_errors", "DELETE_MANY", failing="2$", code=code, times=100)
    outcome = store.delete(["obj/a/1", "obj/a/2"])
    assert outcome["obj/a/1"] is Deletion.DONE
    assert isinstance(outcome["obj/a/2"], kind)
    assert both.there() == ["obj/a/2"]


def test_a_key_that_a_reply_does_not_mention_or_only_hid_is_not_done() -> None:
    targets = [{"Key": k} for k in "abcd"]
    reply = {
        "Deleted": [{"Key": "a"}, {"Key": "b", "DeleteMarker": True, "DeleteMarkerVersionId": "1"}],
        "Errors": [{"Key": "c", "Code": "NoSuchKey"}],
    }
    found = read_reply(reply, targets, asked="removing")
    assert [found[k, ""] for k in "ac"] == [Deletion.DONE, Deletion.ABSENT]
    assert "keeps versions" in str(found["b", ""])
    assert isinstance(found["d", ""], StoreUnavailable)


def test_two_thousand_and_one_objects_are_removed_by_three_requests(stage: Stage) -> None:
    names = [f"obj/a/{n:04d}" for n in range(2001)]
    stage.store.put(names[-1], [b"x"])
    assert set(stage.store.delete(names).values()) == {Deletion.DONE}  # what is absent counts as removed on S3
    assert stage.proxy.counts() == {"PUT": 1, "DELETE_MANY": 3}
    assert stage.there() == []


def test_a_server_without_bulk_removal_is_asked_for_each(stage: Stage) -> None:
    store = stage.open(bulk_delete=False)
    stage.proxy.clear()
    for name in ("obj/a/1", "obj/a/2"):
        store.put(name, [b"x"])
    stage.proxy.add("status", "DELETE", key="2$", times=1)
    assert store.delete(["obj/a/1", "obj/a/2"]) == {"obj/a/1": Deletion.DONE, "obj/a/2": Deletion.DONE}
    assert stage.proxy.counts() == {"PUT": 2, "DELETE": 3}
    stage.proxy.add("status", "DELETE", status=403, code="AccessDenied")
    assert isinstance(store.delete(["obj/a/1"])["obj/a/1"], StoreDenied)


def test_an_object_costs_one_put_one_get_a_range_and_its_share_of_a_removal(both: Stage) -> None:
    names = [f"obj/a/{n}" for n in range(10)]
    for name in names:
        both.store.put(name, [b"0123456789"])
        with both.store.open(name, byte_count=10) as file:
            for start in (0, 5):
                file.read_into(start, np.empty(5, np.uint8))
    both.store.delete(names)
    assert both.proxy.counts() == {"PUT": 10, "GET": 20, "DELETE_MANY": 1}


Read = Callable[[ObjectFile, int, int], NDArray[np.uint8]]


def read_into(file: ObjectFile, offset: int, size: int) -> NDArray[np.uint8]:
    out = np.zeros(size, np.uint8)
    file.read_into(offset, out)
    return out


def read_view(file: ObjectFile, offset: int, size: int) -> NDArray[np.uint8]:
    return file.read_view(offset, size, lambda n: np.zeros(n, np.uint8))


READS: Final[list[Read]] = [read_into, read_view]


@pytest.mark.slow
@pytest.mark.fault(52)
@pytest.mark.parametrize("driver", ["obstore", "fsspec"])
def test_on_seaweedfs_too_a_read_that_breaks_off_gives_exact_bytes(
    weed: S3Server, fault_proxy: Callable[[S3Server], FaultProxy], driver: str
) -> None:
    for stage in staged(weed, fault_proxy, driver):
        assert_breaks_are_healed(stage, READS[0])
        assert_breaks_are_healed(stage, READS[1])


@pytest.mark.fault(52)
@pytest.mark.parametrize("read", READS)
def test_a_read_that_breaks_off_or_comes_short_gives_exact_bytes(both: Stage, read: Read) -> None:
    assert_breaks_are_healed(both, read)


def assert_breaks_are_healed(stage: Stage, read: Read) -> None:
    data = np.random.default_rng(1).integers(0, 256, 9 << 20, dtype=np.uint8)
    stage.store.replace(NAME, data.tobytes())
    stage.proxy.clear()
    for action, size in (("truncate", 0), ("truncate", 5_000_000), ("short", 100), ("reset_before", 0), ("reset_after", 0)):
        if (action, stage.driver) == ("short", "fsspec"):
            continue  # it is told that this was all; found as truncated below
        stage.proxy.add(action, "GET", size=size)  # type: ignore[arg-type]
        with stage.store.open(NAME, byte_count=len(data)) as file:
            out = read(file, 7, len(data) - 7)
        assert np.array_equal(out, data[7:]), (action, size)
    assert all(r.used == 1 for r in stage.proxy.rules)


@pytest.mark.slow
@pytest.mark.fault(52)
@pytest.mark.parametrize("read", READS)
def test_a_body_that_stands_still_is_asked_for_again(stage: Stage, read: Read) -> None:
    store = stage.open(stall_s=1.0)
    data = np.random.default_rng(1).integers(0, 256, 9 << 20, dtype=np.uint8)
    store.put(NAME, [data])
    stage.proxy.add("stall", "GET", size=6 << 20)
    with store.open(NAME, byte_count=len(data)) as file:
        out = read(file, 0, len(data))
    assert np.array_equal(out, data)
    assert stage.proxy.rules[0].used == 1
    assert stage.proxy.counts()["GET"] == 2


def test_a_body_that_comes_short_through_fsspec_is_truncated_never_zeros(
    moto: S3Server, fault_proxy: Callable[[S3Server], FaultProxy]
) -> None:
    for stage in staged(moto, fault_proxy, "fsspec"):
        stage.store.put(NAME, [b"0123456789"])
        stage.proxy.add("short", "GET", size=3)
        with stage.store.open(NAME, byte_count=10) as file, pytest.raises(ObjectCorrupt, match="truncated"):
            file.read_into(0, np.empty(10, np.uint8))


def test_an_object_of_another_size_than_its_reference_says_is_corrupt(stage: Stage) -> None:
    stage.store.put(NAME, [b"0123456789"])
    for size in (9, 11):
        with stage.store.open(NAME, byte_count=size) as file, pytest.raises(ObjectCorrupt, match="truncated or replaced"):
            file.read_into(0, np.empty(4, np.uint8))


@pytest.mark.slow
@pytest.mark.fault(40)
@pytest.mark.parametrize("kind", ["PUT", "GET", "DELETE_MANY", "LIST"])
def test_a_server_that_answers_nothing_is_given_up_in_the_configured_time(both: Stage, kind: str) -> None:
    store = both.open(stall_s=0.5, request_s=1.0, retries_max=1)
    store.put(NAME, [b"data"])
    both.proxy.add("hang", kind, times=100)
    if kind == "DELETE_MANY":
        assert isinstance(store.delete([NAME])[NAME], StoreUnavailable)
        assert both.there() == [NAME]
        return
    calls: dict[str, Callable[[], object]] = {"PUT": lambda: store.put("obj/b", [b"x"]), "LIST": lambda: list(store.list("obj")),
             "GET": lambda: store.open(NAME, byte_count=4).read_into(0, np.empty(4, np.uint8))}  # fmt: skip
    with pytest.raises(StoreUnavailable, match="given up after 2 attempts"):
        calls[kind]()


@pytest.mark.slow
def test_a_listing_that_breaks_off_goes_on_where_it_ended(stage: Stage) -> None:
    names = [f"obj/a/{n:04d}" for n in range(1005)]
    for name in names:
        stage.server.client.put_object(Bucket=BUCKET, Key=f"{stage.root.removeprefix(f's3://{BUCKET}/')}/run/{name}", Body=b"x")
    stage.proxy.add("status", "LIST", skip=1)
    assert [e.name for e in stage.store.list("obj")] == names
    assert stage.proxy.rules[0].used == 1


@pytest.mark.slow
@pytest.mark.fault(50)
def test_the_check_finds_a_store_that_ignores_create_only(stage: Stage) -> None:
    store = FaultyStore(stage.store)
    assert probe(store).create_only
    store.honours_create_only = False
    found = probe(store)
    assert not found.create_only
    assert found.usable
    assert any("run one recovery at a time" in text for text in found.shortcomings())


@pytest.mark.slow
@pytest.mark.fault(51)
@pytest.mark.parametrize("server_name", ["moto", "weed"])
def test_a_bucket_that_keeps_versions_is_refused_or_emptied_by_version(request: pytest.FixtureRequest, server_name: str) -> None:
    server: S3Server = request.getfixturevalue(server_name)
    bucket = server.make_bucket(f"versions-{uuid.uuid4().hex[:8]}")
    for status in ("Enabled", "Suspended"):
        server.client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": status})
        for driver in ("obstore", "fsspec"):
            with pytest.raises(ConfigError, match="keeps versions"):
                open_root(f"s3://{bucket}/x", run="run", settings=server.settings(driver=driver))
    server.client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    with open_root(f"s3://{bucket}/x", run="run", settings=server.settings(versions="delete")) as store:
        store.put("obj/a", [b"1"])
        store.put("obj/ab", [b"1"])
        for data in (b"1", b"2", b"3"):
            store.replace("control", data)
        assert store.delete(["obj/a", "control", "absent"]) == dict.fromkeys(("obj/a", "control", "absent"), Deletion.DONE)
        left = server.client.list_object_versions(Bucket=bucket)
        assert [v["Key"] for v in left.get("Versions", [])] == ["x/run/obj/ab"]
        assert left.get("DeleteMarkers", []) == []


@pytest.mark.slow
@pytest.mark.fault(51)
def test_a_bucket_that_locks_its_objects_is_refused(moto: S3Server) -> None:
    bucket = moto.make_bucket(f"locked-{uuid.uuid4().hex[:8]}", ObjectLockEnabledForBucket=True)
    rule = {"ObjectLockEnabled": "Enabled", "Rule": {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 1}}}
    moto.client.put_object_lock_configuration(Bucket=bucket, ObjectLockConfiguration=rule)
    for versions in ("refuse", "delete"):
        with pytest.raises(ConfigError, match=r"keeps versions|locks new objects"):
            open_root(f"s3://{bucket}/x", run="run", settings=moto.settings(versions=versions))


REFUSALS = [(401, "Unauthorized"), (403, "AccessDenied"), (403, "ExpiredToken"), (400, "ExpiredToken"), (403, "InvalidAccessKeyId"),
    (403, "SignatureDoesNotMatch"), (403, "RequestTimeTooSkewed")]  # fmt: skip


@pytest.mark.fault(53)
def test_refused_credentials_are_a_typed_error_at_once_and_show_no_secret(both: Stage) -> None:
    both.store.put(NAME, [b"data"])
    file = both.store.open(NAME, byte_count=4)
    calls: tuple[Callable[[], object], ...] = (
        lambda: both.store.put("b", [b"x"]),
        lambda: file.read_into(0, np.empty(4, np.uint8)),
        lambda: list(both.store.list("obj")),
    )
    for status, code in REFUSALS:
        both.proxy.clear()
        both.proxy.add("status", status=status, code=code, times=100)
        for call in calls:
            with pytest.raises(StoreDenied) as found:
                call()
            assert_clean(found.value)
        outcome = both.store.delete([NAME])[NAME]
        assert isinstance(outcome, StoreDenied)
        assert_clean(outcome)
        assert both.proxy.counts() == {"PUT": 1, "GET": 1, "LIST": 1, "DELETE_MANY": 1}, code  # not tried again


def assert_clean(*errors: BaseException) -> None:
    """No key id, secret or signature in what a log would show of these errors, their causes and contexts."""
    for error in errors:
        chain: list[BaseException] = []
        at: BaseException | None = error
        while at is not None and at not in chain:
            chain.append(at)
            at = at.__cause__ or at.__context__
        text = "".join("".join(traceback.format_exception(e, chain=False)) + repr(e) for e in chain)
        for secret in (SECRET_KEY, "SENTINEL", ACCESS_KEY, "Authorization", "X-Amz-", "Signature="):
            assert secret not in text, secret


@pytest.mark.fault(53)
def test_wrong_keys_are_refused_by_a_real_server(weed: S3Server) -> None:
    keys = Credentials(ACCESS_KEY, "SENTINEL-but-wrong")
    with pytest.raises(StoreDenied) as caught:
        open_root(f"s3://{BUCKET}/x", run="run", settings=weed.settings(), credentials=keys)
    assert_clean(caught.value)
    assert "SENTINEL" not in f"{keys!r} {keys}"


def test_keys_come_from_the_caller_a_profile_or_a_file_and_none_is_an_error_that_says_so(
    weed: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    file = tmp_path / "keys"
    file.write_text(f"[fsref]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n")
    root = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    for driver in ("obstore", "fsspec"):
        with open_root(root, run=driver, settings=weed.settings(driver=driver), credentials=Credentials(ACCESS_KEY, SECRET_KEY)) as store:
            store.put("a", [b"1"])
        given = weed.settings(driver=driver, profile="fsref", credentials_file=str(file))
        with open_root(root, run=driver, settings=given) as store:
            assert store.read("a", bytes_max=1) == b"1"
            assert SECRET_KEY not in f"{store!r} {vars(store)!r}"
        with pytest.raises(StoreDenied, match="no credentials found"):
            open_root(root, run=driver, settings=weed.settings(driver=driver))


def test_the_environments_proxy_is_used_only_where_the_config_says_so(both: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with both.open() as store:
        store.put(NAME, [b"data"])
        assert store.delete([NAME]) == {NAME: Deletion.DONE}
    with pytest.raises(StoreUnavailable):
        both.open(proxy="environment", retries_max=0)
    with pytest.raises(StoreUnavailable):
        both.open(proxy="http://127.0.0.1:9", retries_max=0)


def test_an_object_that_a_single_put_cannot_take_is_refused_before_any_request(both: Stage) -> None:
    huge = np.empty(PUT_BYTES_MAX + 1, np.uint8)  # never touched, so no memory
    with pytest.raises(StoreError, match="bytes_object_max"):
        both.store.put(NAME, [huge])
    assert both.proxy.counts() == {}


def test_a_bucket_that_is_not_there_is_an_error_that_names_it(both: Stage) -> None:
    for action, code in (("status", "NoSuchBucket"),):
        both.proxy.add(action, "GET", status=404, code=code)  # type: ignore[arg-type]
        with pytest.raises(StoreError, match="make the bucket") as caught:
            both.store.open(NAME, byte_count=4).read_into(0, np.empty(4, np.uint8))
        assert not isinstance(caught.value, ObjectMissing)


def test_a_bucket_that_does_not_answer_is_unavailable_when_it_is_opened() -> None:
    settings = StoreSection(endpoint="http://127.0.0.1:9", retries_max=1)
    with pytest.raises(StoreUnavailable, match="given up after 2 attempts"):
        open_root("s3://bucket/x", run="run", settings=settings)
    root = f"s3://key:{SECRET_KEY}@bucket/x"
    with pytest.raises(ConfigError, match="s3://bucket/prefix") as caught:
        open_root(root, run="run", settings=settings)
    assert_clean(caught.value)


def classes(module: object) -> list[type[Exception]]:
    return [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, Exception)]


def test_every_error_class_of_obstore_has_its_own_mapping() -> None:
    known = [*classes(failures), FileNotFoundError]
    assert len(known) > 8
    assert {c.__name__ for c in known} - set(BY_CLASS) == set()
    for kind in known:
        found = from_obstore(kind("secret=SENTINEL http://x?X-Amz-Signature=1"), "asked")
        assert isinstance(found, FsrefError)
        assert_clean(found)
    assert type(from_obstore(KeyError("x"), "asked")) is StoreError
    assert obstore.exceptions is failures


REPLIES: list[tuple[int, str, type]] = [
    (503, "SlowDown", StoreUnavailable), (500, "", StoreUnavailable), (429, "", StoreUnavailable),
    (409, "ConditionalRequestConflict", StoreUnavailable), (507, "", StoreFull), (403, "QuotaExceeded", StoreFull),
    (403, "AccessDenied", StoreDenied), (416, "InvalidRange", ObjectCorrupt), (301, "PermanentRedirect", StoreError),
    (404, "NoSuchBucket", StoreError), (400, "EntityTooLarge", StoreError), (404, "NoSuchKey", type(None)),
    (412, "PreconditionFailed", type(None)),
]  # fmt: skip


@pytest.mark.parametrize(("status", "code", "kind"), REPLIES)
def test_a_reply_says_what_a_caller_can_do(status: int, code: str, kind: type) -> None:
    assert type(of_reply("asked", status=status, code=code)) is kind


def test_a_store_cannot_be_handed_to_another_process(stage: Stage) -> None:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=print, args=(stage.store,))
    with pytest.raises(TypeError, match="open one per process"):
        process.start()
