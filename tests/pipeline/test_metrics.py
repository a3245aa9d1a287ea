"""The rows that the live table shows."""

import io
import json
from pathlib import Path

from rich.console import Console

from fsref.events import Event, JsonLines
from fsref.pipeline.board import LiveBoard, PlainBoard
from fsref.pipeline.metrics import TITLES, Follower, show_bytes


def write(path: Path, role: str, step: int, **metrics: float) -> None:
    hook = JsonLines(path)
    hook(Event(role=role, step=step, metrics={k.replace("__", "/"): v for k, v in metrics.items()}))
    hook.close()


def row(follower: Follower, step: int) -> dict[str, str]:
    return dict(zip(TITLES, follower.cells(step), strict=True))


def test_a_step_joins_orchestrator_and_trainer(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, "orchestrator", 3, reward__mean=0.5, memory__rss_bytes=1 << 30, payload__bytes_kept=2048, payload__bytes_removed=512)
    write(path, "trainer", 3, mismatch_kl__mean=1e-4, payload__bytes_removed=512, payload__fetch_time_exposed=0.002, reward__mean=9.0)
    follower = Follower(path)
    assert follower.read() == [3]
    assert follower.complete(3)
    found = row(follower, 3)
    assert (found["reward"], found["mismatch KL"], found["orch RSS"]) == ("0.5000", "1.00e-04", "1.0 GiB")
    assert (found["kept"], found["removed"], found["fetch exposed"]) == ("2.0 KiB", "1.0 KiB", "2.0 ms")
    assert (found["fetched"], found["dropped mb"]) == ("-", "-")


def test_lines_are_read_once_and_torn_ones_when_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    assert follower.read() == []
    line = json.dumps({"role": "trainer", "step": 0, "payload/bytes_fetched": 1024})
    path.write_text(line[:20])
    assert follower.read() == []
    with path.open("a") as file:
        file.write(line[20:] + "\nnot json\n[]\n" + json.dumps({"role": "trainer", "step": -1, "payload/bytes_fetched": 7}) + "\n")
    assert follower.read() == [0]
    assert follower.read() == []
    assert row(follower, 0)["fetched"] == "1.0 KiB"


def test_without_a_terminal_each_finished_step_is_one_line(tmp_path: Path) -> None:
    path, out = tmp_path / "metrics.jsonl", io.StringIO()
    follower = Follower(path)
    with PlainBoard(out) as board:
        write(path, "orchestrator", 0, reward__mean=0.25)
        board.refresh(follower)
        assert out.getvalue() == ""
        write(path, "trainer", 0, mismatch_kl__mean=1e-4)
        board.refresh(follower)
        board.refresh(follower)
    assert len(out.getvalue().splitlines()) == 1
    assert "step 0  reward 0.2500  mismatch KL 1.00e-04" in out.getvalue()


def test_the_live_table_ends_with_all_columns_and_the_progress(tmp_path: Path) -> None:
    path, out = tmp_path / "metrics.jsonl", io.StringIO()
    follower = Follower(path)
    with LiveBoard(Console(file=out, force_terminal=True, width=160), title="run r1", steps=24) as board:
        board.say("starting")
        write(path, "orchestrator", 0, reward__mean=0.25)
        write(path, "trainer", 0, mismatch_kl__mean=1e-4, payload__dropped_micro_batches=0)
        board.refresh(follower)
    text = out.getvalue()
    assert all(title in text for title in TITLES)
    assert "1 of 24 steps trained" in text
    assert "0.2500" in text


def test_bytes_read_well() -> None:
    assert [show_bytes(n) for n in (0, 412, 1536, 3 << 20, 1 << 50)] == ["0 B", "412 B", "1.5 KiB", "3.0 MiB", "1024.0 TiB"]
