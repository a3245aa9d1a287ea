"""Removal by ids alone: whatever is asked for, nothing but ``obj/<inc>/<seq>.zip`` of the own run can go (points 1 and 2)."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsref.errors import BadRef, NotHolder, StoreDenied, StoreError
from fsref.reaper import EnvHolder, delete_objects
from fsref.refs import object_name, split_object_id
from fsref.store.posix import PosixStore
from tests.reaper.stage import Stage

INC = "env.math-0-0.0123456789abcdef"
OTHER = "orc.main.00000000000000ff"
NASTY = [
    "..",
    ".",
    "/",
    "//",
    "\\",
    "\x00",
    "\n",
    "%2e%2e",
    "%2f",
    "file://",
    "s3://",
    "~",
    "*",
    "$HOME",
    ":",
    "@",
    " ",
    "\u2024\u2024",
    "\udcff",
]
PIECES = st.sampled_from(
    [*NASTY, INC, OTHER, "obj", "steps", "ledger", "run.json", "0", "7", "07", "0000000007", "7.zip", "-1", "9" * 11, "r2", ""]
)
IDS = st.one_of(
    st.lists(PIECES, min_size=1, max_size=6).map("/".join),
    st.lists(PIECES, min_size=1, max_size=6).map("".join),
    st.text(max_size=40),
    st.builds(lambda inc, seq: f"{inc}/{seq}", st.sampled_from([INC, OTHER, "env.x.zzz", f"../{INC}"]), st.integers(-2, 30)),
)


@contextmanager
def canaries() -> Iterator[tuple[Path, PosixStore]]:
    """A root with two runs and files everywhere around the objects; the first run's store."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for path in (
            "canary", "run.json", "7.zip", "r2/run.json", f"r2/obj/{INC}/0000000007.zip", "r1/run.json", "r1/7.zip", "r1/0000000007.zip",
            f"r1/obj/{INC}/0000000007.zip", f"r1/obj/{INC}/7.zip", f"r1/obj/{INC}/0000000007", f"r1/obj/{INC}/sub/0000000007.zip",
            f"r1/obj/{OTHER}/0000000000.zip", "r1/obj/0000000007.zip", "r1/steps/step_000000/STEP.json", f"r1/ledger/{OTHER}.jnl",
        ):  # fmt: skip
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(path)
        with PosixStore(root / "r1") as store:
            yield root, store


def files(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}


@pytest.mark.fault(54)
@settings(max_examples=300, deadline=None)
@given(st.lists(IDS, min_size=1, max_size=4))
def test_whatever_is_asked_for_only_the_named_objects_go(ids: list[str]) -> None:
    with canaries() as (root, store):
        before = files(root)
        legal = set()
        for object_id in ids:
            try:
                split_object_id(object_id)
                legal.add(f"r1/{object_name(object_id)}")
            except BadRef:
                pass
        try:
            delete_objects(store, ids, deadline_s=0.0)
        except BadRef:
            assert files(root) == before  # one bad id, and nothing is touched
        else:
            assert files(root) == before - legal


def test_an_id_of_another_run_has_no_form_that_is_accepted() -> None:
    with canaries() as (root, store):
        before = files(root)
        for object_id in (f"fsref:r2/{INC}/7", f"r2/{INC}/7", f"../r2/obj/{INC}/7", f"{INC}/../../../r2/obj/{INC}/7"):
            with pytest.raises(BadRef):
                delete_objects(store, [object_id])
        assert files(root) == before


@pytest.mark.payload("F11")
def test_a_holder_removes_only_what_it_holds_of_its_own_run(stage: Stage) -> None:
    env: EnvHolder = stage.env()
    mine = stage.put(env, 1)
    for object_id, error in ((f"{INC}/0", NotHolder), ("../../x", BadRef), (f"{env.inc}/99", NotHolder)):
        with pytest.raises(error):
            env.discard([*mine, object_id])
    assert len(stage.objects()) == 1  # a bad id spoils the call, and nothing goes
    env.close()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.store.close()


def test_files_with_two_names_and_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with PosixStore(tmp_path / "r1", create=True) as store:
        store.put(f"obj/{INC}/0000000000.zip", [b"x"])
        folder = tmp_path / "r1" / "obj" / INC
        os.link(folder / "0000000000.zip", folder / "0000000001.zip")
        os.mkfifo(folder / "0000000002.zip")
        (folder / "0000000003.zip").mkdir()
        (folder / "0000000004.zip").symlink_to("/etc/hostname")
        for n in range(5):
            with pytest.raises(StoreError) as refused:
                store.open(f"obj/{INC}/{n:010d}.zip")
            assert isinstance(refused.value, StoreDenied), n


def test_a_listing_goes_only_so_deep(tmp_path: Path) -> None:
    with PosixStore(tmp_path / "r1", create=True) as store:
        deep = tmp_path / "r1" / "obj"
        for _ in range(200):
            deep = deep / "d"
        deep.mkdir(parents=True)
        assert len(list(store.list("obj"))) == 1
