"""Which run, step or object is meant."""

import os
from pathlib import Path

import pytest

from fsref import config as settings
from fsref.config import Config, RunSection, StoreSection
from fsref.errors import ConfigError
from fsref.inspection.find import expand, find_run, parse_object, parse_short, parse_step, shorten
from tests.inspection.conftest import Run

INC = "env.demo-0-0.0123456789abcdef"


def make_run(folder: Path, *, age: int = 0) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").touch()
    os.utime(folder / "run.json", (1000 - age, 1000 - age))
    return folder


def test_an_explicit_run_is_a_folder_or_an_id(tmp_path: Path) -> None:
    make_run(tmp_path / "runs/first")
    make_run(tmp_path / "elsewhere/second")
    for name, root in (
        ("first", "runs"),
        ("runs/first", "runs"),
        ("elsewhere/second", "elsewhere"),
        (str(tmp_path / "runs/first"), "runs"),
    ):
        found = find_run(name, here=tmp_path)
        assert (found.root, found.run) == (str(tmp_path / root), name.rsplit("/", 1)[-1])


def test_else_the_one_at_hand_else_the_newest(tmp_path: Path) -> None:
    make_run(tmp_path / "runs/zz-old", age=10)
    make_run(tmp_path / "runs/aa-new")
    assert find_run("", here=tmp_path).run == "aa-new"
    assert find_run("", here=tmp_path / "runs/zz-old").run == "zz-old"


def test_no_match_lists_the_runs_the_newest_first(tmp_path: Path) -> None:
    make_run(tmp_path / "runs/old", age=10)
    make_run(tmp_path / "runs/new")
    with pytest.raises(ConfigError, match=r"no run 'nw': .*the newest first: new, old$"):
        find_run("nw", here=tmp_path)
    with pytest.raises(ConfigError, match=r"there are no runs under"):
        find_run("nw", here=tmp_path / "runs/old")
    with pytest.raises(ConfigError, match=r"which run\?.*name one with --run"):
        find_run("", here=tmp_path / "runs")


def test_a_run_folder_of_a_remote_root_says_where_the_run_is(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    config = Config(
        run=RunSection(id="r1", root="s3://bucket/x", run_dir=str(tmp_path)), store=StoreSection(endpoint="http://127.0.0.1:9000")
    )
    (tmp_path / "config.json").write_bytes(settings.dump(config))
    found = find_run(str(tmp_path), here=tmp_path)
    assert (found.root, found.run, found.run_dir) == ("s3://bucket/x", "r1", tmp_path)
    assert found.section.endpoint == "http://127.0.0.1:9000"
    assert found.ledger_dir == tmp_path / "ledger"


def test_a_url_of_an_object_store_names_no_folder_of_journals(tmp_path: Path) -> None:
    found = find_run("s3://bucket/x/r1/", here=tmp_path)
    assert (found.root, found.run, found.run_dir) == ("s3://bucket/x", "r1", None)
    assert found.ledger_dir is None
    with found.writable_ledger() as folder:
        assert folder.parent.is_dir()
    assert not folder.parent.exists()


def test_the_url_of_a_folder_is_that_folder(run: Run) -> None:
    found = find_run(f"file://{run.folder}", here=run.root)
    assert found.ledger_dir == run.folder / "ledger"


def test_a_run_that_was_moved_is_read_where_it_is(run: Run) -> None:
    moved = run.root.parent / "archive"
    moved.mkdir()
    run.folder.rename(moved / "r1")
    assert find_run(str(moved / "r1"), here=run.root).root == str(moved)


def test_a_config_of_another_version_does_not_keep_from_looking(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r1")
    (folder / "config.json").write_text('{"future": 1}')
    assert find_run(str(folder), here=tmp_path).section == StoreSection()


@pytest.mark.parametrize(("what", "step"), [("step_000012", 12), ("steps/step_000012/", 12), ("step_12", None), ("x", None), ("", None)])
def test_steps_are_named_as_their_folders(what: str, step: int | None) -> None:
    assert parse_step(what) == step


@pytest.mark.parametrize(
    ("what", "found"),
    [
        (f"{INC}/7", ("", f"{INC}/7")),
        (f"obj/{INC}/0000000007.zip", ("", f"{INC}/7")),
        (f"/data/runs/r1/obj/{INC}/0000000007.zip", ("", f"{INC}/7")),
        (f"s3://b/runs/r1/obj/{INC}/0000000007.zip", ("", f"{INC}/7")),
        (f"fsref:r1/{INC}/7", ("r1", f"{INC}/7")),
        (f"fsref:r1/{INC}/7,fsref:r1/{INC}/8", ("r1", f"{INC}/7")),
        (f"{INC}/007", None),
        (f"{INC}/../7", None),
        ("demo-0-0/7", None),
        ("step_000012", None),
    ],
)
def test_objects_are_named_by_id_name_path_or_text(what: str, found: tuple[str, str] | None) -> None:
    assert parse_object(what) == found


def test_short_forms_stand_for_one_producer_or_are_refused(run: Run) -> None:
    assert parse_short("demo-0-0/1")
    assert not parse_short("runs/first")
    with run.store() as store:
        assert expand("demo-0-0/1", run.place, store) == run.refs[1].object_ids[0]
        with pytest.raises(ConfigError, match="is of no producer of this run"):
            expand("demo-9-9/1", run.place, store)
        (run.folder / "ledger/env.demo-0-0.ffffffffffffffff.jnl").touch()
        with pytest.raises(ConfigError, match="several producers have it"):
            expand("demo-0-0/1", run.place, store)


def test_ids_are_shortened_where_that_is_clear() -> None:
    other = INC.replace("0123", "ffff")
    assert shorten([f"{INC}/1", "env.demo-1-0.0123456789abcdef/2"]) == {
        f"{INC}/1": "demo-0-0/1",
        "env.demo-1-0.0123456789abcdef/2": "demo-1-0/2",
    }
    assert shorten([f"{INC}/1", f"{other}/2"]) == {f"{INC}/1": f"{INC}/1", f"{other}/2": f"{other}/2"}
