"""Whole runs on a real Slurm: four nodes on this machine, strangers to each other."""

from collections.abc import Callable

import pytest

from tests.slurm.conftest import Job

pytestmark = [pytest.mark.slow, pytest.mark.slurm]
MakeJob = Callable[..., Job]


def test_a_run_over_four_nodes_trains_to_the_end_and_is_proved(job: MakeJob) -> None:
    run = job().submit()
    assert run.ended() == "COMPLETED", f"{run.log}\n{run.logs()}"
    run.proved()
