"""Ranks that are killed at every point of a step, over gloo; what they left is trained by the next ones from the same bytes."""

import signal
from pathlib import Path

import pytest

from fsref.trainer import checkpoint
from tests.trainer.runs import SmallRun, start_ranks

STEPS = 4
KILLS = [
    # rank, where it dies, versions of the newest checkpoint then, objects that are left
    (1, "agree.before=kill", 0, 16),  # T6: before its first all-reduce
    (0, "taken.after_append=kill:2", 0, 16),  # T1
    (0, "agree.before=kill:2", 0, 16),  # T2
    (0, "used.after_append=kill:2", 0, 16),  # T3
    (0, "checkpoint.after=kill", 2, 16),  # T4
    (0, "drop_steps.after_sync=kill", 2, 16),  # T5: the next trainer took the steps over and dropped them, nobody has removed yet
    (0, "done_steps.before_append=kill", 4, 0),  # T5: at the end, every leader has removed its share
]


def small_run(folder: Path) -> SmallRun:
    run = SmallRun(folder, data_ranks=2, seed=5)
    for step in range(STEPS):
        run.publish_step(step, micro_batches=1)
    return run


@pytest.mark.fault(9, 10)
def test_ranks_that_are_killed_at_every_point_end_with_the_weights_of_a_run_that_was_not(tmp_path: Path) -> None:
    whole, killed = small_run(tmp_path / "whole"), small_run(tmp_path / "killed")
    settings = {"steps": STEPS, "checkpoint_every": 2}
    assert [r.finish() for r in start_ranks(whole.config(**settings))] == ["ok", "ok"]
    for rank, point, version, left in KILLS:
        ranks = start_ranks(killed.config(**settings), {rank: point})
        assert ranks[rank].died() == -signal.SIGKILL, point
        assert ranks[1 - rank].finish().startswith("RoleFailed"), point
        newest = checkpoint.newest(killed.run_dir / "checkpoints")
        assert (newest.version if newest else 0, len(killed.present())) == (version, left), point
    assert [r.finish() for r in start_ranks(killed.config(**settings))] == ["ok", "ok"]
    assert killed.weights(STEPS) == whole.weights(STEPS)
    for run in (whole, killed):
        assert run.present() == []
        assert run.verdict() == "PROVED"
        run.close()
