"""``run.json``: created once, checked ever after."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from fsref.errors import BadRef, RunMismatch, StoreUnavailable
from fsref.journal import create_run, read_run
from fsref.refs import Schema, sampling_mask, top_logprobs
from fsref.store import open_root

ONE = Schema((top_logprobs(),))


def test_a_run_is_created_once_and_opened_again(tmp_path: Path) -> None:
    with open_root(str(tmp_path), run="r1", create=True) as store:
        made = create_run(store, "r1", ONE)
        assert create_run(store, "r1", ONE) == made == read_run(store)
        assert len(made.run_uuid) == 32


def test_of_many_that_create_a_run_at_once_all_get_the_same(tmp_path: Path) -> None:
    for attempt in range(10):
        together = threading.Barrier(8)

        def create(at: Path, together: threading.Barrier) -> str:
            with open_root(str(at), run="r1", create=True) as store:
                together.wait()
                return create_run(store, "r1", ONE).run_uuid

        at = tmp_path / str(attempt)
        with ThreadPoolExecutor(8) as pool:
            found = [f.result() for f in [pool.submit(create, at, together) for _ in range(8)]]
        with open_root(str(at), run="r1") as store:
            assert {*found} == {read_run(store).run_uuid}
        assert [p.name for p in (at / "r1").iterdir()] == ["run.json"]


@pytest.mark.parametrize("left", [b"", b"{"])
def test_a_launcher_that_was_killed_while_it_wrote_the_file_is_taken_over(tmp_path: Path, left: bytes) -> None:
    with open_root(str(tmp_path), run="r1", create=True) as store:
        (tmp_path / "r1/.run.tmp").write_bytes(left)
        made = create_run(store, "r1", ONE, wait_s=0.0)
        assert read_run(store) == made
    assert [p.name for p in (tmp_path / "r1").iterdir()] == ["run.json"]


def test_a_name_that_stays_taken_without_a_file_is_an_error_in_the_end(tmp_path: Path) -> None:
    with open_root(str(tmp_path), run="r1", create=True) as store:
        (tmp_path / "r1/.run.tmp").mkdir()  # what cannot be removed as a file
        with pytest.raises(StoreUnavailable, match="its name is taken and it is not there"):
            create_run(store, "r1", ONE, wait_s=0.0)


@pytest.mark.payload("F7")
def test_another_schema_or_another_run_is_refused(tmp_path: Path) -> None:
    with open_root(str(tmp_path), run="r1", create=True) as store:
        create_run(store, "r1", ONE)
        with pytest.raises(RunMismatch, match="other fields or codec"):
            create_run(store, "r1", Schema((top_logprobs(), sampling_mask())))
        with pytest.raises(RunMismatch, match="holds the run 'r1'"):
            create_run(store, "r2", ONE)


def test_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    with open_root(str(tmp_path), run="r1", create=True) as store, pytest.raises(RunMismatch, match="holds no run"):
        read_run(store)


def test_an_illegal_run_id_is_refused_before_any_file(tmp_path: Path) -> None:
    with open_root(str(tmp_path), run="r1", create=True) as store:
        with pytest.raises(BadRef):
            create_run(store, "../r1", ONE)
        assert list(tmp_path.rglob("*.json")) == []


@pytest.mark.parametrize("change", [{"format": 2}, {"run_uuid": "short"}, {"run": "A"}, {"more": 1}])
@pytest.mark.fault(66)
def test_a_file_of_another_form_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    with open_root(str(tmp_path), run="r1", create=True) as store:
        create_run(store, "r1", ONE)
        data = msgspec.json.decode(store.read("run.json", bytes_max=1 << 20)) | change
        store.replace("run.json", msgspec.json.encode(data))
        with pytest.raises(RunMismatch):
            read_run(store)
