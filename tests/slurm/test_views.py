"""What nodes see of a shared folder: the exchange itself, with threads in place of nodes."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from fsref.cli.check import seen, shared_folder
from fsref.errors import ConfigError
from fsref.pipeline.slurm import views
from fsref.pipeline.slurm.commands import Slurm
from fsref.pipeline.slurm.views import View, exchange, look


def together(folders: list[Path], *, count: int = 0, deadline_s: float = 60.0) -> list[View]:
    """Each folder is what one node has mounted; the first node's answer."""
    with ThreadPoolExecutor(len(folders)) as pool:
        parts = [
            pool.submit(exchange, f, token="t", node=f"n{i}", number=i, count=count or len(folders), deadline_s=deadline_s)
            for i, f in enumerate(folders)
        ]
        found = [p.result() for p in parts]
    assert found[1:] == [[]] * (len(folders) - 1)
    return found[0]


def test_nodes_that_share_a_folder_see_each_other_and_leave_nothing(tmp_path: Path) -> None:
    found = together([tmp_path] * 3)
    assert [v.node for v in found] == ["n0", "n1", "n2"]
    assert not any(v.failure for v in found)
    assert found[0].lag_s is None
    for view in found[1:]:
        assert view.lag_s is not None
        assert view.clock_s is not None
        assert abs(view.clock_s) <= view.clock_error_s + 0.5  # one clock here, stepped at most a little by the machine
        assert "sees the others within" in seen(view)
    assert not list(tmp_path.iterdir())


def test_a_node_with_another_folder_is_missing_and_named_by_those_who_wait_for_it(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    shared = tmp_path / "shared"
    shared.mkdir()
    found = together([shared, shared, own], deadline_s=2.0)
    assert [v.node for v in found] == ["n0", "n1"]
    assert found[0].unseen == ("task 2",)
    assert "is the folder on a filesystem that all nodes share?" in found[0].failure
    assert not list(shared.iterdir())


def test_a_node_that_cannot_write_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "_try", lambda _, number: (0.0, "it cannot write") if number else (0.001, ""))
    found = together([tmp_path] * 2)
    assert [v.failure for v in found] == ["", "it cannot write"]


def test_what_is_late_or_has_another_time_is_a_failure() -> None:
    view = View(node="n1", host="n1", write_s=0.001, lag_s=0.01, clock_s=1.0, clock_error_s=0.01)
    assert not view.failure
    assert "sees what others wrote 31.0 s late" in msgspec.structs.replace(view, lag_s=31.0).failure
    assert "its clock is -4000 s off" in msgspec.structs.replace(view, clock_s=-4000.0).failure
    assert not msgspec.structs.replace(view, clock_s=-310.0, clock_error_s=20.0).failure  # cannot be told apart from a slow answer


def test_all_nodes_are_those_of_the_job_around(tmp_path: Path) -> None:
    class Recorded(Slurm):
        def on_nodes(self, argv: object, *, nodes: str, count: int, inside: bool, timeout_s: float) -> str:
            del argv, timeout_s
            assert (nodes, count, inside) == asked
            return msgspec.json.encode([View(node="n1", host="n1", write_s=0.1)]).decode()

    asked = ("", 4, True)
    found, missing = look(tmp_path, "all", Recorded(), {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "4"})
    assert ([v.node for v in found], missing) == (["n1"], 3)
    asked = ("n[1-2]", 2, False)
    assert look(tmp_path, "n[1-2]", Recorded(), {})[1] == 1
    with pytest.raises(ConfigError, match="--nodes all is for the inside of a job"):
        look(tmp_path, "all", Recorded(), {})
    with pytest.raises(ConfigError, match=r"nowhere is not there: make it first"):
        look(tmp_path / "nowhere", "n1", Recorded(), {})


def test_the_folder_that_is_looked_at(tmp_path: Path) -> None:
    assert shared_folder(str(tmp_path), "") == tmp_path
    assert shared_folder("s3://bucket/runs", str(tmp_path / "runs/r1")) == tmp_path / "runs"
    with pytest.raises(ConfigError, match=r"name the one for addresses, logs and weights in run\.run_dir"):
        shared_folder("s3://bucket/runs", "")
