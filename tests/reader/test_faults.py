"""Reading when the store fails: exact bytes after what heals, the right error after what does not, and never a wait without an end."""

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fsref.errors import ObjectCorrupt, ObjectMissing, StoreError, StoreUnavailable
from fsref.reader import Reader, allocate, failure_kind
from fsref.refs import Dense, Payload, PayloadRef, Schema, TokenRange, object_name
from fsref.store import Store, open_root
from fsref.writer import Writer
from tests.support.faultproxy import FaultProxy
from tests.support.faultystore import FaultyStore
from tests.support.payloads import Numbers, cut, payload, schema
from tests.support.s3servers import BUCKET, S3Server

SCHEMA = schema(layers=8)
TOKENS = 3000


class Stage:
    """One object on S3, a proxy in front, and readers."""

    def __init__(self, server: S3Server, proxy: FaultProxy) -> None:
        self.proxy = proxy
        settings = server.settings(endpoint=proxy.endpoint, stall_s=1.0)
        self.store = open_root(f"s3://{BUCKET}/{uuid.uuid4().hex}", run="run", settings=settings)
        self.arrays: Payload = payload(np.random.default_rng(3), SCHEMA, TOKENS)
        self.ref: PayloadRef = Writer(self.store, SCHEMA, Numbers()).put(self.arrays)
        proxy.clear()

    def read(self, **options: object) -> dict[str, object]:
        with Reader(self.store, SCHEMA, **options) as reader:  # type: ignore[arg-type]
            got = reader.read(self.ref)
        for name, data in got.items():
            rows, columns = cut(self.arrays.fields[name], 0, TOKENS)
            if isinstance(data, Dense):
                assert data.rows.tobytes() == rows.tobytes(), name
            else:
                assert data.counts.tobytes() == rows.astype(np.int32).tobytes(), name
                assert {n: v.tobytes() for n, v in data.columns.items()} == {n: v.tobytes() for n, v in columns.items()}, name
        return dict(got)


@pytest.fixture
def stage(moto: S3Server, fault_proxy: Callable[[S3Server], FaultProxy], s3_credentials: dict[str, str]) -> Iterator[Stage]:
    del s3_credentials
    made = Stage(moto, fault_proxy(moto))
    yield made
    made.store.close()


def test_a_sample_costs_one_ranged_get_and_nothing_else(stage: Stage) -> None:
    stage.read()
    assert stage.proxy.counts() == {"GET": 1}


@pytest.mark.fault(47)
def test_a_put_whose_replies_are_all_lost_is_withdrawn_and_never_kept(stage: Stage) -> None:
    numbers = Numbers()
    numbers.next_seq()  # the stage's own object has the first one
    stage.proxy.add("lost_reply", "PUT", times=100)
    stage.proxy.add("status", "HEAD", times=100)
    with pytest.raises(StoreUnavailable):
        Writer(stage.store, SCHEMA, numbers).put(stage.arrays)
    assert numbers.kept == []
    assert [e.name for e in stage.store.list("obj")] == [object_name(i) for i in stage.ref.object_ids]


@pytest.mark.fault(47)
def test_a_put_whose_reply_was_lost_is_kept_once(stage: Stage) -> None:
    numbers = Numbers()
    numbers.next_seq()  # the stage's own object has the first one
    stage.proxy.add("lost_reply", "PUT")
    ref = Writer(stage.store, SCHEMA, numbers).put(stage.arrays)
    assert len(numbers.kept) == 1
    assert len(list(stage.store.list("obj"))) == 2
    with Reader(stage.store, SCHEMA) as reader:
        assert reader.read(ref).keys() == stage.arrays.fields.keys()


@pytest.mark.fault(46)
def test_an_overloaded_store_is_retried_by_the_store_and_not_again_by_the_reader(stage: Stage) -> None:
    stage.proxy.add("status", "GET", times=3)
    stage.read()
    stage.proxy.clear()
    stage.proxy.add("status", "GET", times=100)
    with pytest.raises(StoreUnavailable) as caught:
        stage.read()
    assert failure_kind(caught.value) == "unavailable"
    assert stage.proxy.counts() == {"GET": 5}


@pytest.mark.fault(45)
def test_an_object_that_is_not_found_for_a_while_is_waited_for(stage: Stage) -> None:
    stage.proxy.add("status", "GET", status=404, code="NoSuchKey", times=3)
    stage.read()
    assert stage.proxy.counts() == {"GET": 4}


@pytest.mark.fault(45)
@pytest.mark.payload("G10")
def test_an_object_that_stays_not_found_is_missing_after_the_configured_attempts(stage: Stage) -> None:
    stage.proxy.add("status", "GET", status=404, code="NoSuchKey", times=100)
    with pytest.raises(ObjectMissing, match="given up after 3 attempts") as caught:
        stage.read(retries_max=2)
    assert failure_kind(caught.value) == "missing"
    assert stage.proxy.counts() == {"GET": 3}


@pytest.mark.fault(43)
def test_a_flipped_bit_on_the_way_is_read_once_more_and_one_that_stays_is_corrupt(stage: Stage) -> None:
    stage.proxy.add("flip", "GET", size=100)
    stage.read()
    assert stage.proxy.counts() == {"GET": 2}
    stage.proxy.clear()
    stage.proxy.add("flip", "GET", size=100, times=100)
    with pytest.raises(ObjectCorrupt, match="given up after 2 attempts") as caught:
        stage.read()
    assert failure_kind(caught.value) == "corrupt"
    assert stage.proxy.counts() == {"GET": 2}


@pytest.mark.fault(52)
@pytest.mark.parametrize("action", ["truncate", "short", "reset_before", "reset_after"])
def test_a_connection_that_breaks_gives_exact_bytes(stage: Stage, action: str) -> None:
    stage.proxy.add(action, "GET", size=1000)  # type: ignore[arg-type]
    stage.read()
    assert stage.proxy.counts() == {"GET": 2}


@pytest.mark.slow
@pytest.mark.fault(52)
def test_a_stream_that_stands_still_gives_exact_bytes(stage: Stage) -> None:
    stage.proxy.add("stall", "GET", size=1000)
    stage.read()
    assert stage.proxy.counts() == {"GET": 2}


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[FaultyStore]:
    with FaultyStore(open_root(str(tmp_path), run="run", create=True)) as store:
        yield store


def put(store: Store, run_schema: Schema, seed: int) -> tuple[PayloadRef, Payload]:
    arrays = payload(np.random.default_rng(seed), run_schema, 64)
    return Writer(store, run_schema, _NUMBERS, durability="process").put(arrays), arrays


_NUMBERS = Numbers()


@pytest.mark.fault(40)
@pytest.mark.parametrize("operation", ["read_into", "open"])
def test_a_read_that_hangs_ends_at_the_deadline_and_its_thread_and_buffers_are_given_up(hanging: FaultyStore, operation: str) -> None:
    (bad, bad_arrays), (good, good_arrays) = put(hanging, SCHEMA, 1), put(hanging, SCHEMA, 2)
    gate = hanging.hang(operation, name=bad.object_ids[0].split("/")[-1].zfill(10))  # type: ignore[arg-type]
    reader = Reader(hanging, SCHEMA, threads=1, deadline_s=0.5, abandon_s=0.5)
    plan = reader.plan(bad, fields=["routed_experts"])
    out = allocate(plan, SCHEMA, "routed_experts")
    with pytest.raises(StoreUnavailable, match="nothing came within"):
        reader.read_into(plan, {"routed_experts": out})
    assert gate.entered.is_set()
    assert reader.counters.abandoned == 1
    reader_2 = Reader(hanging, SCHEMA, threads=1)  # an undisturbed one, for the comparison
    expected = reader_2.read(good, tokens=TokenRange(0, 64))["routed_experts"]
    got = reader.read(good, tokens=TokenRange(0, 64))["routed_experts"]  # by the thread that took its place
    assert isinstance(got, Dense)
    assert isinstance(expected, Dense)
    gate.release()
    assert gate.left.wait(30)  # what it reads now goes into the given-up buffers only
    assert got.rows.tobytes() == expected.rows.tobytes() == good_arrays.fields["routed_experts"].rows.tobytes()  # type: ignore[union-attr]
    reader.close()
    reader_2.close()
    assert reader.counters.abandoned == 1
    assert bad_arrays is not good_arrays


@pytest.mark.fault(40)
def test_a_reader_closes_in_time_although_a_read_hangs(hanging: FaultyStore) -> None:
    ref, _ = put(hanging, SCHEMA, 1)
    gate = hanging.hang("read_into")
    reader = Reader(hanging, SCHEMA, threads=1, abandon_s=0.2)
    plans = [reader.plan(ref, fields=["routed_experts"]) for _ in range(3)]
    futures = [f for p in plans for f in reader.submit(p, {"routed_experts": allocate(p, SCHEMA, "routed_experts")})]
    assert gate.entered.wait(30)
    reader.close()
    assert reader.counters.abandoned == 1
    assert len(reader.collect(futures)) == 3  # all of them ended, as failures
    gate.release()


HANGS = """
import sys, threading
sys.path.insert(0, ".")
from fsref.store.threads import Threads
pool = Threads(2, name="x")
entered = threading.Event()
def hang():
    entered.set()
    threading.Event().wait()
pool.submit(hang)
entered.wait()
print("abandoned", pool.close(deadline_s=0.1))
"""


@pytest.mark.fault(40)
def test_a_process_ends_although_a_thread_is_stuck() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "abandoned 1\n"


def test_a_posix_read_error_is_still_retried_by_the_reader(hanging: FaultyStore) -> None:
    ref, _ = put(hanging, SCHEMA, 1)
    hanging.fail("read_into", StoreUnavailable("EIO"), times=2)
    with Reader(hanging, SCHEMA) as reader:
        reader.read(ref)
        assert reader.counters.retries == 2
    hanging.clear()
    hanging.fail("open", StoreError("something else"))
    with Reader(hanging, SCHEMA) as reader, pytest.raises(StoreError, match="something else"):
        reader.read(ref)
