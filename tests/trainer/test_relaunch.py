"""Trainer ranks killed at each point of a step: those that follow read byte-identical arrays of every step after the checkpoint."""

import json
from pathlib import Path

import pytest

from tests.trainer.runs import SmallRun, start_ranks

STEPS = 4
POINTS = [
    pytest.param("T1", 0, "taken.after_append=kill:4", marks=pytest.mark.slow),
    pytest.param("T1 mid fetch", 1, "agree.before=kill:4", marks=pytest.mark.fault(10)),
    pytest.param("T2", 0, "agree.before=kill:4", marks=pytest.mark.slow),
    pytest.param("T3", 0, "used.after_append=kill:4"),
    pytest.param("T4", 0, "checkpoint.after=kill:1"),
    pytest.param("T5 recorded", 0, "drop_steps.after_sync=kill:1", marks=pytest.mark.slow),
    pytest.param("T5 removing", 0, "leader.after_delete=kill:1", marks=pytest.mark.fault(11)),
    pytest.param("T5 the other leader", 1, "leader.before_delete=kill:1", marks=[pytest.mark.slow, pytest.mark.fault(11)]),
]
"""What it is in the crash matrix of the ledger, whom it hits, and when: step 3 of 0 to 3, or the checkpoint of 2 steps."""


def digests(record: Path) -> list[tuple[int, int, str]]:
    return [tuple(json.loads(line)) for line in record.read_text().splitlines()]


@pytest.mark.fault(9)
@pytest.mark.parametrize(("name", "rank", "rule"), POINTS)
def test_a_relaunched_trainer_reads_the_bytes_that_the_killed_one_read(tmp_path: Path, name: str, rank: int, rule: str) -> None:
    del name
    run = SmallRun(tmp_path, data_ranks=2)
    for step in range(STEPS):
        run.publish_step(step)
    config = run.config(steps=STEPS, checkpoint_every=2)
    before, after = tmp_path / "before", tmp_path / "after"
    for at, process in enumerate(start_ranks(config, fail={rank: rule}, record=before)):
        if at == rank:
            process.process.join()
            assert process.process.exitcode == -9
        else:
            assert process.finish().startswith("RoleFailed")
    assert [p.finish() for p in start_ranks(config, record=after)] == ["ok", "ok"]
    read = {(r, s): d for r, s, d in digests(before)}
    again = digests(after)
    assert sorted((r, s) for r, s, _ in again) == [(r, s) for r in range(2) for s in range(2, STEPS)], "from the checkpoint, each once"
    compared = [(r, s) for r, s, d in again if (r, s) in read]
    assert {(r, s): d for r, s, d in again if (r, s) in compared} == {key: read[key] for key in compared}
    assert len({d for _, _, d in again}) == len(again), "different steps and ranks have different arrays: the digest sees them"
    if "checkpoint" not in rule and "drop" not in rule and "leader" not in rule:
        assert {(0, 2), (1, 2)} <= set(compared), "the killed ranks had read what is compared"
    assert run.present() == []
    assert run.verdict() == "PROVED"
    run.close()
