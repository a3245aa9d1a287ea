"""Physical removal: what can be named, what a listing is worth, how failures are told."""

import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fsref.errors import BadRef, StoreError, StoreUnavailable
from fsref.reaper import delete_objects
from fsref.reaper.delete import RETRY_MAX_S, back_off_s, delete_once
from fsref.reaper.listing import list_objects
from fsref.refs import object_name
from fsref.store.base import Deletion
from tests.reaper.stage import Stage

INC = "env.a.0000000000000001"
HOSTILE = ["../../canary", "/etc/passwd", f"{INC}/../../../canary", f"{INC}/0.zip", f"file:///{INC}/0", f"{INC}/%2e%2e", f"{INC}/1\x00"]
HOSTILE += [f"r2/{INC}/0", f"{INC}/0\n", "", INC]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.text(max_size=60), st.sampled_from(HOSTILE), st.from_regex(r"[a-z./%-]{1,40}/[0-9./]{1,12}", fullmatch=True)))
@example(HOSTILE[0])
def test_an_id_outside_the_grammar_never_reaches_the_store(stage: Stage, object_id: str) -> None:
    stage.store.deletes.clear()
    with pytest.raises(BadRef):
        delete_once(stage.store, [object_id])
    assert stage.store.deletes == []


def test_only_the_named_object_goes(stage: Stage) -> None:
    for seq in range(3):
        stage.store.put(object_name(f"{INC}/{seq}"), [b"x"])
    canary = stage.root / "canary"
    canary.write_bytes(b"keep me")
    outcome = delete_objects(stage.store, [f"{INC}/1", f"{INC}/1"])
    assert (outcome.done, outcome.absent, outcome.failed) == ((f"{INC}/1",), (), {})
    assert stage.objects() == [object_name(f"{INC}/0"), object_name(f"{INC}/2")]
    assert canary.exists()


@pytest.mark.parametrize(("fast_s", "helpers"), [(0.0, 3), (1e9, 0)])
def test_many_objects_of_a_slow_store_are_removed_side_by_side(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, fast_s: float, helpers: int
) -> None:
    for seq in range(300):
        stage.store.put(object_name(f"{INC}/{seq}"), [b"x"], durability="process")
    delete, seen = stage.store.delete, list[str]()

    def seen_delete(names: Sequence[str]) -> dict[str, Deletion | StoreError]:
        seen.append(threading.current_thread().name)
        return delete(names)

    monkeypatch.setattr(stage.store, "delete", seen_delete)
    monkeypatch.setattr("fsref.reaper.delete.FAST_S", fast_s)
    outcome = delete_once(stage.store, [f"{INC}/{seq}" for seq in range(301)], threads=4)
    assert (len(outcome.done), outcome.absent, outcome.failed, stage.objects()) == (301, (f"{INC}/300",), {}, [])
    assert (seen.count("fsref-delete"), len(seen)) == (helpers, helpers + 2)


@pytest.mark.parametrize("thread", [threading.current_thread().name, "fsref-delete"])
def test_a_bug_of_a_backend_is_raised_to_the_caller(stage: Stage, monkeypatch: pytest.MonkeyPatch, thread: str) -> None:
    def broken(names: Sequence[str]) -> dict[str, Deletion | StoreError]:
        if threading.current_thread().name == thread:
            raise RuntimeError(f"{len(names)} names")
        return dict.fromkeys(names, Deletion.DONE)

    monkeypatch.setattr(stage.store, "delete", broken)
    monkeypatch.setattr("fsref.reaper.delete.FAST_S", 0.0)
    with pytest.raises(RuntimeError, match="names"):
        delete_once(stage.store, [f"{INC}/{seq}" for seq in range(301)], threads=4)


def test_an_absence_counts_at_the_first_attempt_only(stage: Stage) -> None:
    assert delete_objects(stage.store, [f"{INC}/7"]).absent == (f"{INC}/7",)
    stage.store.delete_failures = 1
    again = delete_objects(stage.store, [f"{INC}/7"])
    assert (again.done, again.absent, again.retries) == ((f"{INC}/7",), (), 1)


def test_what_keeps_failing_is_returned_with_its_reason(stage: Stage) -> None:
    stage.store.put(object_name(f"{INC}/0"), [b"x"])
    stage.store.delete_failures = 1_000_000
    outcome = delete_objects(stage.store, [f"{INC}/0"], deadline_s=0.2)
    assert outcome.done == ()
    assert isinstance(outcome.failed[f"{INC}/0"], StoreUnavailable)
    stopped = threading.Event()
    stopped.set()
    assert list(delete_objects(stage.store, [f"{INC}/0"], stop=stopped).failed) == [f"{INC}/0"]


def test_the_back_off_grows_and_is_bounded() -> None:
    rng = random.Random(1)
    waits = [[back_off_s(attempt, rng=rng) for _ in range(50)] for attempt in (0, 3, 60)]
    assert max(waits[0]) <= 0.1 < min(waits[1])
    assert RETRY_MAX_S / 2 <= min(waits[2]) <= max(waits[2]) <= RETRY_MAX_S
    assert len(set(waits[2])) > 10


def test_a_listing_sorts_objects_staging_files_and_foreign_names(stage: Stage) -> None:
    for name in (f"obj/{INC}/0000000003.zip", f"obj/{INC}/.0000000004.tmp", f"obj/{INC}/4.zip", "obj/env.x/0000000000.zip", "obj/a"):
        stage.store.put(name, [b"x"])
    view = list_objects(stage.store)
    assert view.present == {INC: {3}}
    assert view.staging == (f"obj/{INC}/.0000000004.tmp",)
    assert set(view.foreign) == {f"obj/{INC}/4.zip", "obj/env.x/0000000000.zip", "obj/a"}


def test_listings_from_several_threads_are_all_complete(stage: Stage) -> None:
    for seq in range(1500):
        Path(stage.root / "r1" / "obj" / INC).mkdir(parents=True, exist_ok=True)
        (stage.root / "r1" / object_name(f"{INC}/{seq}")).write_bytes(b"x")
    counts: list[int] = []

    def work() -> None:
        counts.extend(len(list_objects(stage.store).present[INC]) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [1500] * 20
