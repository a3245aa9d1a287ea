"""Ranks as processes of one node: what one fetched is there for the others, and whoever dies or stops holds up nobody."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fsref.failpoints import VARIABLE
from fsref.nodecache import NodeCache

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
NAME = f"fsref-cache-{os.geteuid()}-run"


class Child:
    """One rank's process."""

    def __init__(self, folder: Path, *, bytes_max: int, wait_s: float, failpoints: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.nodecache.child", str(folder), str(bytes_max), str(wait_s)],
            cwd=ROOT, env={**os.environ, VARIABLE: failpoints}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.member = -1

    def ready(self) -> "Child":
        self.member = self.answer()["member"]
        return self

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait(DEADLINE_S)}"
        return dict(json.loads(line))

    def ask(self, **command: Any) -> dict[str, Any]:
        self.tell(**command)
        return self.answer()

    def stopped(self) -> None:
        """Waits until it has stopped itself."""
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(DEADLINE_S)


def _kill(children: list[Child]) -> None:
    for child in children:
        child.process.kill()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., list[Child]]]:
    children: list[Child] = []

    def begin(*failpoints: str, bytes_max: int = 1 << 20, wait_s: float = DEADLINE_S) -> list[Child]:
        begun = [Child(tmp_path, bytes_max=bytes_max, wait_s=wait_s, failpoints=f) for f in failpoints]
        children.extend(begun)
        watchdog = threading.Timer(DEADLINE_S, _kill, [begun])
        watchdog.daemon = True
        watchdog.start()
        return [c.ready() for c in begun]

    yield begin
    for child in children:
        child.end()


READ = ["env.x/1", 0, 8, 5000]


def test_siblings_share_and_the_last_one_leaves_nothing(start: Callable[..., list[Child]], tmp_path: Path) -> None:
    a, b = start("", "")
    assert {a.member, b.member} == {0, 1}
    first, second = a.ask(read=READ), b.ask(read=["env.x/1", 4, 8, 5000])
    assert (first["fetched"], second["fetched"], second["shared"]) == ([*range(8)], [8, 9, 10, 11], 4)
    assert first["right"]
    assert second["right"]
    a.ask(close=True)
    assert (tmp_path / NAME).exists()
    b.ask(close=True)
    assert list(tmp_path.iterdir()) == []


def test_a_step_is_freed_when_every_process_has_released_it_or_is_dead(start: Callable[..., list[Child]]) -> None:
    a, b = start("", "")
    a.ask(read=READ, step=3)
    assert a.ask(release=3)["held"] == 40_000
    assert b.ask(release=3)["held"] == 0
    a.ask(read=["env.x/2", 0, 8, 5000], step=4)
    assert a.ask(release=4)["held"] == 40_000
    b.process.kill()
    b.process.wait(DEADLINE_S)
    assert a.ask(release=4)["held"] == 0


@pytest.mark.fault(10)
@pytest.mark.parametrize("point", ["nodecache.fetch.claimed=kill", "nodecache.leave.placed=kill:3"])
def test_a_rank_that_is_killed_while_it_fetches_is_replaced_at_once(start: Callable[..., list[Child]], tmp_path: Path, point: str) -> None:
    a, b, c = start(point, "", "")
    a.tell(read=READ)
    assert a.process.wait(DEADLINE_S) == -signal.SIGKILL
    got = b.ask(read=READ)
    assert got["right"]
    assert got["fetched"] == [*range(8)]  # what a left before its death in the middle of a change is not trusted
    assert c.ask(read=READ)["shared"] == 8
    for child in (b, c):
        child.ask(close=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault(10)
def test_siblings_that_wait_for_a_rank_go_on_when_it_is_killed(start: Callable[..., list[Child]]) -> None:
    a, b, c = start("", "", "")
    a.ask(hold=True)
    a.tell(read=READ)
    assert a.answer() == {"fetching": True}
    b.tell(read=READ)
    c.tell(read=READ)
    a.process.kill()
    got = [b.answer(), c.answer()]
    assert all(g["right"] for g in got)
    assert sorted([*got[0]["fetched"], *got[1]["fetched"]]) == [*range(8)]  # once, by whoever saw it first
    assert sum(g["takeovers"] for g in got) == 8


@pytest.mark.fault(40)
def test_a_rank_that_hangs_while_it_fetches_holds_up_siblings_to_the_deadline_only(start: Callable[..., list[Child]]) -> None:
    a, b = start("", "", wait_s=0.3)
    a.ask(hold=True)
    a.tell(read=READ)
    assert a.answer() == {"fetching": True}
    got = b.ask(read=READ)
    assert (got["right"], got["fetched"], got["takeovers"]) == (True, [*range(8)], 8)
    late = a.ask(go=True)
    assert (late["right"], late["fetched"]) == (True, [*range(8)])
    assert b.ask(read=READ)["shared"] == 8


@pytest.mark.fault(40)
def test_a_rank_that_is_stopped_with_the_nodes_lock_costs_siblings_one_bounded_wait(start: Callable[..., list[Child]]) -> None:
    a, b = start("nodecache.leave.placed=pause:1", "")
    a.tell(read=READ)
    a.stopped()
    got = b.ask(read=READ)
    assert (got["right"], got["fetched"], got["bypasses"]) == (True, [*range(8)], 8)
    a.process.send_signal(signal.SIGCONT)
    assert a.answer()["right"]


def test_what_killed_ranks_left_is_removed_by_the_next_run(start: Callable[..., list[Child]], tmp_path: Path) -> None:
    a, b = start("", "nodecache.leave.placed=kill")
    b.tell(read=READ)
    b.process.wait(DEADLINE_S)
    a.process.kill()
    a.process.wait(DEADLINE_S)
    assert (tmp_path / NAME).exists()
    with NodeCache(tmp_path, name="next", bytes_max=1 << 20, wait_s=1) as cache:
        assert [p.name for p in tmp_path.iterdir()] == [cache.path.name]


def test_a_rank_that_is_killed_while_it_makes_the_file_leaves_one_that_the_next_makes_anew(
    start: Callable[..., list[Child]], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="it ended with -9"):
        start("nodecache.open.empty=kill")
    assert (tmp_path / NAME).exists()
    (a,) = start("")
    assert a.ask(read=READ)["right"]
    assert a.ask(read=READ)["shared"] == 8


def test_ranks_that_all_want_everything_at_once_fetch_each_chunk_once(start: Callable[..., list[Child]]) -> None:
    ranks = start("", "", "", bytes_max=8 << 20)
    fetched: list[int] = []
    for n in range(40):
        for rank in ranks:
            rank.tell(read=[f"env.x/{n}", 0, 12, 3000], step=n)
        answers = [rank.answer() for rank in ranks]
        assert all(a["right"] for a in answers)
        fetched += [c for a in answers for c in a["fetched"]]
    assert len(fetched) == 40 * 12
