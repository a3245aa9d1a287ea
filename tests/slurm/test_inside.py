"""What runs inside a job, without a cluster: who does what, where it listens, which steps there are, who is dead, why a step failed."""

import socket
from pathlib import Path
from typing import Final

import msgspec
import pytest

from fsref.config import Config, EnvSection, SlurmSamplingSection, SlurmSection, SlurmTrainingSection
from fsref.errors import ConfigError, RoleFailed, RunBusy
from fsref.journal import create_run
from fsref.pipeline.layout import Part
from fsref.pipeline.logs import why_of_step
from fsref.pipeline.slurm import allocation as allocations
from fsref.pipeline.slurm.allocation import Allocation, Node, assign, interface_address, read_allocation, resolve_addresses
from fsref.pipeline.slurm.attempts import declare_ended, read_attempt, write_attempt
from fsref.pipeline.slurm.commands import JobState, NodeInfo, Slurm
from fsref.pipeline.slurm.plan import resolve_job
from fsref.pipeline.slurm.rank import Task
from fsref.pipeline.slurm.steps import steps
from fsref.reaper import EnvHolder
from fsref.refs import Schema, top_logprobs
from fsref.store import open_root

SECTION: Final = SlurmSection(inference=SlurmSamplingSection(nodes=2), trainer=SlurmTrainingSection(nodes=2))


class Cluster(Slurm):
    """Answers without a cluster."""

    def __init__(self, **states: JobState) -> None:
        self.states = states

    def hostnames(self, nodes: str) -> list[str]:
        return nodes.split(",")

    def nodes(self, names: object) -> list[NodeInfo]:
        assert isinstance(names, list)
        return [NodeInfo(n, f"{n}.example", f"10.0.0.{i}") for i, n in enumerate(names)]

    def job(self, job: str) -> JobState:
        return self.states[f"job{job}"]


def allocation(job: str = "7", restarts: int = 0, host: str = "n") -> Allocation:
    nodes = [Node(name=f"n{i}", host=f"{host}{i}", address=f"10.0.0.{i}") for i in range(4)]
    return Allocation(job=job, restarts=restarts, inference=tuple(nodes[:2]), trainer=tuple(nodes[2:]))


def test_the_first_nodes_sample_and_the_rest_train() -> None:
    assert assign(["a", "b", "c", "d"], SECTION) == (["a", "b"], ["c", "d"])


def test_node_lists_say_which_node_does_what() -> None:
    section = msgspec.structs.replace(
        SECTION,
        inference=SlurmSamplingSection(nodes=2, nodelist="n4"),
        trainer=SlurmTrainingSection(nodes=2, nodelist="n[1-2]"),
    )
    assert assign(["n1", "n2", "n3", "n4"], section) == (["n3", "n4"], ["n1", "n2"])


def test_an_allocation_is_read_from_slurms_environment() -> None:
    env = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "a,b,c,d", "SLURM_RESTART_COUNT": "2"}
    found = read_allocation(env, SECTION, Cluster())
    assert (found.attempt, [n.name for n in found.inference], [n.name for n in found.trainer]) == ("12.2", ["a", "b"], ["c", "d"])
    assert found.node("c") == Node(name="c", host="c.example", address="10.0.0.2")


def test_the_components_of_a_heterogeneous_job_are_the_kinds_of_nodes() -> None:
    env = {"SLURM_JOB_ID": "12", "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "a,b", "SLURM_JOB_NODELIST_HET_GROUP_1": "c,d"}
    env |= {"SLURM_JOB_ID_HET_GROUP_0": "12", "SLURM_JOB_ID_HET_GROUP_1": "13"}
    found = read_allocation(env, SECTION, Cluster())
    assert found.heterogeneous
    assert found.jobs == ("12", "13")
    assert [n.name for n in found.trainer] == ["c", "d"]


def test_outside_of_a_job_or_with_another_count_of_nodes_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="SLURM_JOB_ID is not set"):
        read_allocation({}, SECTION, Cluster())
    with pytest.raises(ConfigError, match=r"slurm\.trainer\.nodes is 2, the job has 1 for it: c"):
        read_allocation({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a,b,c"}, SECTION, Cluster())


def test_a_name_that_means_loopback_here_becomes_the_address_that_others_see(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"me": "127.0.1.1", "other": "10.9.9.9"}
    monkeypatch.setattr(socket, "gethostbyname", addresses.__getitem__)
    monkeypatch.setattr(allocations, "_seen_by", lambda other: f"towards {other}")
    infos = [NodeInfo(n, n, n) for n in addresses]
    assert resolve_addresses(infos) == ["towards 10.9.9.9", "10.9.9.9"]
    assert resolve_addresses(infos[:1]) == ["127.0.1.1"]  # alone, nobody else must reach it


def test_a_name_that_nobody_knows_is_named() -> None:
    with pytest.raises(RoleFailed, match=r"node x: its address 'no\.such\.host\.invalid' cannot be resolved"):
        resolve_addresses([NodeInfo("x", "x", "no.such.host.invalid")])


def test_the_address_of_an_interface() -> None:
    assert interface_address("lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"slurm\.interface 'ib77' has no IPv4 address on .*there are .*lo"):
        interface_address("ib77")


def test_the_steps_of_a_job(tmp_path: Path) -> None:
    config = Config(env=(EnvSection(name="demo"), EnvSection(name="exam", split="eval")), slurm=SECTION)
    resolved = resolve_job(msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, root=str(tmp_path))), run_id="r1")
    nodes, ranks, orchestrator = steps(resolved, allocation())
    assert [r.part for r in (nodes, ranks, orchestrator)] == [Part.INFERENCE, Part.TRAINER, Part.ORCHESTRATOR]
    assert {p.name for p in nodes.addresses} == {f"{e}.n{i}.address" for e in ("demo", "exam") for i in (0, 1)}
    assert {"--nodelist=n0,n1", "--ntasks=2", "--kill-on-bad-exit=1", "--overlap"} <= set(nodes.command.argv)
    assert "--nodelist=n2,n3" in ranks.command.argv
    assert "--nodelist=n2" in orchestrator.command.argv
    assert f"--output={tmp_path}/r1/logs/orchestrator.log" in orchestrator.command.argv


def test_a_heterogeneous_jobs_steps_name_their_component(tmp_path: Path) -> None:
    config = Config(env=(EnvSection(name="demo"),), slurm=SECTION)
    resolved = resolve_job(msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, root=str(tmp_path))), run_id="r1")
    found = steps(resolved, msgspec.structs.replace(allocation(), components=("7", "8")))
    assert [a for r in found for a in r.command.argv if a.startswith("--het-group")] == ["--het-group=0", "--het-group=1", "--het-group=1"]


def test_a_task_outside_of_a_step_is_refused() -> None:
    with pytest.raises(RoleFailed, match=r"SLURM_PROCID.* is not set"):
        Task.read({})


def test_a_job_is_over_only_when_slurm_says_so() -> None:
    assert JobState("COMPLETED").over(0)
    assert JobState("UNKNOWN").over(0)
    assert not JobState("RUNNING").over(0)
    assert not JobState("COMPLETING", 1).over(0)  # of a requeue: its processes may still be ending
    assert JobState("PENDING", 1).over(0)
    assert not JobState("PENDING", 1).over(1)


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A run in which a process on this host left its journal open; its folder."""
    schema = Schema((top_logprobs(),))
    with open_root(str(tmp_path), run="r1", create=True) as store:
        run = create_run(store, "r1", schema)
        for label in ("demo-0-0", "demo-1-0"):
            holder = EnvHolder(store, tmp_path / "r1/ledger", run=run, label=label)
            if label == "demo-1-0":
                holder.close()
    return tmp_path / "r1"


def dead(folder: Path) -> list[str]:
    return [p.name.split(".")[1] for p in (folder / "ledger").glob("*.dead")]


def test_what_an_ended_job_left_open_on_its_hosts_is_declared_dead(left: Path) -> None:
    host = socket.gethostname()
    write_attempt(left, msgspec.structs.replace(allocation(), inference=(Node(name="n0", host=host, address="10.0.0.1"),)))
    with open_root(str(left.parent), run="r1") as store:
        declare_ended(store, left, Cluster(job7=JobState("CANCELLED")))
    assert dead(left) == ["demo-0-0"]  # the other one closed its journal


def test_journals_of_other_hosts_stay_undecided(left: Path) -> None:
    write_attempt(left, allocation(host="elsewhere"))
    with open_root(str(left.parent), run="r1") as store:
        assert declare_ended(store, left, Cluster(job7=JobState("CANCELLED"))) == []
    assert dead(left) == []


def test_nothing_is_declared_while_any_job_of_the_run_goes_on(left: Path) -> None:
    host = socket.gethostname()
    for job in ("7", "8"):
        write_attempt(left, msgspec.structs.replace(allocation(job), inference=(Node(name="n0", host=host, address="10.0.0.1"),)))
    cluster = Cluster(job7=JobState("CANCELLED"), job8=JobState("RUNNING"))
    with open_root(str(left.parent), run="r1") as store, pytest.raises(RunBusy, match=r"job 8 of this run is RUNNING: .*scancel 8"):
        declare_ended(store, left, cluster)
    assert dead(left) == []


def test_a_heterogeneous_job_is_over_when_both_halves_are(left: Path) -> None:
    here = (Node(name="n0", host=socket.gethostname(), address="10.0.0.1"),)
    write_attempt(left, msgspec.structs.replace(allocation(), inference=here, components=("7", "8")))
    with open_root(str(left.parent), run="r1") as store:
        with pytest.raises(RunBusy, match="is COMPLETING"):
            declare_ended(store, left, Cluster(job7=JobState("COMPLETED"), job8=JobState("COMPLETING")))
        assert declare_ended(store, left, Cluster(job7=JobState("COMPLETED"), job8=JobState("COMPLETED")))


def test_a_requeued_job_knows_that_its_earlier_start_is_over(left: Path) -> None:
    host = socket.gethostname()
    now = msgspec.structs.replace(allocation(restarts=1), inference=(Node(name="n0", host=host, address="10.0.0.1"),))
    write_attempt(left, msgspec.structs.replace(now, restarts=0))
    with open_root(str(left.parent), run="r1") as store:
        assert len(declare_ended(store, left, Cluster(), current=now)) == 1  # without asking
    write_attempt(left, now)
    assert read_attempt(left, "7.1") == now


def test_a_killed_task_is_the_reason_not_the_peers_that_miss_it(tmp_path: Path) -> None:
    own, rank = tmp_path / "trainer.log", tmp_path / "rank_1.log"
    own.write_text("old\nsrun: error: n3: task 0: Killed\nsrun: error: n4: task 1: Exited with exit code 1\n")
    rank.write_text("error: trainer rank 1: all_reduce over 2 ranks failed, another rank is gone or stuck\n")
    assert why_of_step(own, 4, {rank: 0}) == f"failed: task 0 on n3 was ended: Killed; log: {own}"


def test_of_several_failures_the_one_that_explains_itself_is_told(tmp_path: Path) -> None:
    own, logs = tmp_path / "trainer.log", [tmp_path / f"rank_{n}.log" for n in range(3)]
    own.write_text("srun: error: n3: task 0: Exited with exit code 1\n")
    logs[0].write_text("error: trainer rank 0: another rank failed while waiting for step_000001; its log says why\n")
    logs[1].write_text("error: of an earlier start\n")
    logs[2].write_text("error: step_000001: no micro batch can be fetched\n")
    starts = {logs[0]: 0, logs[1]: logs[1].stat().st_size, logs[2]: 0}
    assert why_of_step(own, 0, starts) == f"failed: error: step_000001: no micro batch can be fetched; log: {logs[2]}"


def test_a_step_that_says_nothing_has_no_reason(tmp_path: Path) -> None:
    assert why_of_step(tmp_path / "none.log", 0, {tmp_path / "neither.log": 0}) == ""
