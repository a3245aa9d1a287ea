"""Whole runs on a real Slurm: four nodes on this machine, strangers to each other."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slurm.conftest import Job

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(600)]
MakeJob = Callable[..., Job]


def roles(job: Job, words: str) -> Iterator[int]:
    """Processes of this run whose command line has these words, on whatever node (seen from the outermost process table)."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            argv = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(job.folder) in argv and re.search(words, argv) and not argv.startswith("srun"):
            yield int(entry.name)


def only(job: Job, words: str) -> int:
    """Of a role and what it forked the first: the one that the launcher started."""
    return min(roles(job, words))


def test_a_run_over_four_nodes_trains_to_the_end_and_is_proved_beside_another(job: MakeJob) -> None:
    """Two runs in one root at once; the second under torchrun, in a heterogeneous job. Each node's replica listens on its own address."""
    first = job("first").submit(slurm__check_nodes="true")
    second = job("second").submit(
        slurm__inference__partition="sampling",
        slurm__trainer__partition="training",
        slurm__inference__nodes=1,
        slurm__trainer__nodes=1,
        slurm__trainer__ranks_per_node=2,
        slurm__trainer__launch="torchrun",
        run__steps=2,
    )
    first.until(lambda: len(first.addresses()) == 2, "two replicas publish")
    hosts = {record["host"]: record["address"] for record in first.addresses()}
    assert set(hosts) == {"n1", "n2"}
    assert len({a.rpartition(":")[0] for a in hosts.values()}) == 2
    assert not any("127." in a or "0.0.0.0" in a for a in hosts.values())
    for run in (first, second):
        assert run.ended() == "COMPLETED", f"{run.log}\n{run.logs()}"
        run.proved()
    assert "4 nodes see each other's files within" in first.log
    assert first.trained() == {0, 1, 2}
    assert second.trained() == {0, 1}
    logs = {str(p.relative_to(first.folder / "logs")) for p in (first.folder / "logs").rglob("*.log")}
    expected = {"orchestrator.log", "job.log", "trainer/rank_0.log", "trainer/rank_1.log", "inference.n1.log", "inference.n2.log"}
    assert expected | {"envs/train/demo.n1.log", "envs/train/demo.n2.log", "nodes/n1.log", "nodes/n2.log"} <= logs


@pytest.mark.fault(13)
def test_a_replica_that_is_killed_is_adopted_and_taken_back_while_the_run_goes_on(job: MakeJob) -> None:
    run = job().submit(run__steps=4)
    run.until(run.trained, "a step is trained")
    os.kill(only(run, r"env-server .*--node n2"), signal.SIGKILL)
    assert run.ended() == "COMPLETED", f"{run.log}\n{run.logs()}"
    run.proved()
    assert "restart 1 of 3" in (run.folder / "logs/nodes/n2.log").read_text()
    dead = list((run.folder / "ledger").glob("env.demo-1-*.dead"))
    assert dead
    assert all((p.with_suffix(".adopted")).exists() for p in dead)
    assert run.trained() == {0, 1, 2, 3}


def test_a_trainer_killed_in_a_step_ends_the_job_with_the_reason_and_a_requeue_goes_on(job: MakeJob) -> None:
    run = job().submit(run__steps=4)
    run.until(run.trained, "a step is trained")
    os.kill(only(run, "fsref trainer"), signal.SIGKILL)
    run.until(lambda: run.cluster.state(run.number) == "FAILED", "the job fails")
    assert re.fullmatch(r"error: trainer failed: task \d on n[34] was ended: Killed; log: .*", run.log.splitlines()[-1]), run.log
    assert not run.processes()
    run.cluster.command("scontrol", "requeue", run.number)
    run.until(lambda: "start 2" in run.log, "it starts again")
    assert run.ended() == "COMPLETED", f"{run.log}\n{run.logs()}"
    assert "the run goes on: steps 0 to" in run.log
    run.proved()
    assert run.trained() == {0, 1, 2, 3}


def test_before_its_time_limit_the_run_stops_with_a_checkpoint_and_goes_on_by_itself(job: MakeJob) -> None:
    """The signal is sent here as Slurm sends it, to the batch process; waiting for a time limit would take minutes."""
    run = job().submit(run__steps=4, trainer__checkpoint_every=100)
    run.until(run.trained, "a step is trained")
    run.cluster.command("scancel", "--batch", "--signal=USR1", run.number)
    run.until(lambda: "the run goes on when Slurm starts the job again" in run.log, "it stops")
    assert not list((run.folder / "ledger").glob("*.dead"))  # every process has closed its journal itself
    assert re.search(r"\bdone .* double 0   lost 0   unexpected 0", run.log)
    assert list((run.folder / "checkpoints").glob("step_*"))
    run.until(lambda: "start 2" in run.log, "it starts again")
    assert run.ended() == "COMPLETED", f"{run.log}\n{run.logs()}"
    assert re.search(r"the run goes on: steps 0 to \d are in its newest checkpoint", run.log)
    run.proved()


def test_scancel_leaves_nothing_running_and_close_settles_the_run(job: MakeJob) -> None:
    run = job().submit(run__steps=50)
    run.until(run.trained, "a step is trained")
    refused = run.fsref("close")
    assert refused.returncode == 2
    assert "may be alive" in refused.stderr or f"job {run.number} of this run is RUNNING" in refused.stderr
    run.cluster.command("scancel", run.number)
    run.ended()
    assert not run.processes()
    closed = run.fsref("close", "--json")
    assert closed.returncode == 0, f"{closed.stdout}{closed.stderr}\n{run.log}"
    assert json.loads(closed.stdout)["verdict"] == "PROVED"
    run.proved()


@pytest.mark.fault(13)
def test_a_lost_node_ends_the_job_and_the_next_start_settles_what_it_left(job: MakeJob) -> None:
    run = job().submit(run__steps=4)
    run.until(run.trained, "a step is trained")
    run.cluster.lose_node("n2")
    run.until(lambda: run.cluster.state(run.number) == "PENDING", "the job is put back")
    run.cluster.start_node("n2")
    assert run.ended() == "COMPLETED", f"{run.log}\n{run.logs()}"
    run.proved()
