"""The power of the ledger's filesystem is cut before or after every single change that a run makes to it.

What was not synced is gone then. W1: nothing that was removed lacks its decision. W2: no step that can be seen lacks its record. So nothing
is ever lost, and what is left is removed by the run's close.
"""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsref.errors import ObjectMissing
from fsref.journal import write_dead
from fsref.journal.read import LedgerReader
from fsref.reaper import Verdict, close_run, recover
from fsref.steps import read_info
from fsref.store import open_root
from tests.reaper.stage import RUN, Stage
from tests.support import disks

ROOT = Path(__file__).parents[2]


class Player:
    """The program of ``tests.reaper.power``."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.reaper.power"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._tell, self._hear = self.process.stdin, self.process.stdout

    def play(self, folder: Path, at: int, when: str) -> tuple[str, int]:
        """Until it stands still; returns ``cut`` or ``end``, and the pid that stands there."""
        self._tell.write(f"{folder} {at} {when}\n")
        word, pid = self._hear.readline().split()
        return word, int(pid)

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        assert self._hear.readline() == "gone\n"

    def close(self) -> None:
        self._tell.close()
        self._hear.close()
        self.process.wait(60)


@pytest.fixture(scope="module")
def player() -> Iterator[Player]:
    disks.own_mounts()  # before it starts, so that it sees the disks
    made = Player()
    yield made
    made.close()


def check(stage: Stage, where: object) -> None:
    """After the power came back."""
    found = stage.audit()
    assert found.violations == (), (where, found.render())
    reader = LedgerReader(stage.place)
    reader.refresh()
    assert [j.problem for j in reader.journals.values() if j.problem] == [], where
    try:
        info = read_info(stage.store, 0)
    except ObjectMissing:
        info = None
    shipped = {(f.step, f.n, f.checksum) for j in reader.journals.values() for f in j.fold.ships.values()}
    assert info is None or (0, info.n, info.sum) in shipped, (where, "W2: a visible step is on record")
    for inc in reader.journals:
        write_dead(stage.place, inc, by="launcher", why="power loss")


@pytest.mark.slow
@pytest.mark.fault(14)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_power_loss_at_any_change_loses_nothing_and_leaves_nothing(tmp_path: Path, player: Player, when: str) -> None:
    for at in itertools.count(1):
        with disks.ext4(tmp_path / "disk") as disk:
            Stage(disk.folder).store.close()  # the run exists before
            word, pid = player.play(disk.folder, at, when)
            disk.shut_down()
            player.kill(pid)
            disk.restart()
            stage = Stage(disk.folder)
            check(stage, (at, when))
            if at % 3 == 0:  # for a trainer that replays: a parked step's arrays are all there
                recover(stage.store, stage.ledger, run=stage.run, resume_step=-1, replay="keep")
                assert stage.audit().violations == (), at
            found = close_run(stage.store, stage.ledger, run=stage.run)
            assert (found.verdict, found.violations) == (Verdict.PROVED, ()), (at, when, found.render())
            assert stage.objects() == []
            stage.store.close()
        if word == "end":
            assert at > 60, "fewer changes than the run makes: the test cuts nothing"
            return


@pytest.mark.slow
@pytest.mark.fault(14)
def test_what_was_on_record_when_the_power_went_is_there_again(tmp_path: Path, player: Player) -> None:
    """The same run to its end: nothing is recovered, and the record is whole."""
    with disks.ext4(tmp_path / "disk") as disk:
        Stage(disk.folder).store.close()
        word, pid = player.play(disk.folder, 1 << 30, "after")
        assert word == "end"
        disk.shut_down()
        player.kill(pid)
        disk.restart()
        with open_root(str(disk.folder), run=RUN) as store:
            assert read_info(store, 0).n == 2
        stage = Stage(disk.folder)
        totals = stage.audit().totals
        assert totals.dropped_by == {"trained": 2, "filtered": 1, "never_sent": 2, "shutdown": 1}
        assert (totals.kept, totals.done, totals.live) == (6, 6, 0)
        stage.store.close()
