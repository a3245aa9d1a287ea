"""The job's script and its config, without a cluster."""

import datetime as dt
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from fsref import config as settings
from fsref.config import (
    Config,
    EnvSection,
    InferenceSection,
    OrchestratorSection,
    ParallelSection,
    RunSection,
    SlurmSamplingSection,
    SlurmSection,
    SlurmTrainingSection,
    TrainerSection,
)
from fsref.errors import ConfigError
from fsref.pipeline.slurm.commands import Slurm, SlurmAbsent
from fsref.pipeline.slurm.plan import job_tasks
from fsref.pipeline.slurm.submit import make_submission, submit

NOW = dt.datetime(2026, 1, 31, tzinfo=dt.UTC)
ROOT = Path(__file__).resolve().parents[2]


def config(tmp_path: Path, slurm: SlurmSection | None = None, **sections: object) -> Config:
    base = Config(
        run=RunSection(id="r1", root=str(tmp_path)),
        env=(EnvSection(name="demo"), EnvSection(name="far", serve_address="tcp://10.0.0.8:5000")),
        slurm=slurm or SlurmSection(inference=SlurmSamplingSection(nodes=3), trainer=SlurmTrainingSection(nodes=2)),
    )
    return replace(base, **sections)


def script(tmp_path: Path, slurm: SlurmSection, **sections: object) -> list[str]:
    return make_submission(config(tmp_path, slurm, **sections), now=NOW).script.splitlines()


def two_and_two(**changes: object) -> SlurmSection:
    base = SlurmSection(inference=SlurmSamplingSection(nodes=2), trainer=SlurmTrainingSection(nodes=2), python="/opt/py thon")
    return replace(base, **changes)


def test_the_script_asks_for_what_the_config_says(tmp_path: Path) -> None:
    lines = script(
        tmp_path,
        two_and_two(
            partition="gpu",
            account="rl",
            qos="high",
            time="01:30:00",
            signal_lead_s=90,
            exclude="gpu[09-10]",
            directives=("--mem=0",),
            modules=("cuda/12.8", "nccl"),
            setup=("source /etc/profile.d/x.sh", "ulimit -n 65536"),
        ),
    )
    for directive in (
        "--job-name=fsref-r1",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--time=01:30:00",
        f"--output={tmp_path}/r1/logs/job.log",
        "--open-mode=append",
        "--signal=B:USR1@90",
        "--requeue",
        "--partition=gpu",
        "--account=rl",
        "--qos=high",
        "--exclude=gpu[09-10]",
        "--exclusive",
        "--mem=0",
    ):
        assert lines.count(f"#SBATCH {directive}") == 1, directive
    end = lines.index("set -e")
    assert not [line for line in lines[end:] if line.startswith("#SBATCH")]  # Slurm reads none behind the first command
    assert lines[end + 1 :] == [
        "module load cuda/12.8",
        "module load nccl",
        "source /etc/profile.d/x.sh",
        "ulimit -n 65536",
        "",
        f"exec '/opt/py thon' -m fsref job --config \"{tmp_path}/r1/slurm/config.json\"",
    ]


def test_the_script_is_bash_without_a_blank_left(tmp_path: Path) -> None:
    text = make_submission(config(tmp_path), now=NOW).script
    assert "@" not in text.replace("USR1@300", "")
    subprocess.run([shutil.which("bash") or "bash", "-n"], input=text, text=True, check=True)


def test_two_partitions_make_a_heterogeneous_job(tmp_path: Path) -> None:
    one = SlurmSamplingSection(nodes=2, partition="sampling", directives=("--gpus-per-node=4",), nodelist="s[1-2]")
    lines = script(tmp_path, two_and_two(inference=one, partition="training", requeue=False))
    at = lines.index("#SBATCH hetjob")
    first, second = lines[:at], lines[at:]
    assert {"#SBATCH --nodes=2", "#SBATCH --partition=sampling", "#SBATCH --gpus-per-node=4", "#SBATCH --nodelist=s[1-2]"} <= set(first)
    assert {"#SBATCH --nodes=2", "#SBATCH --partition=training", "#SBATCH --no-requeue", "#SBATCH --signal=B:USR1@300"} <= set(second)
    assert "#SBATCH --gpus-per-node=4" not in second


def test_node_lists_of_both_kinds_are_asked_for_together(tmp_path: Path) -> None:
    one, two = SlurmSamplingSection(nodes=2, nodelist="a[1-2]"), SlurmTrainingSection(nodes=2, nodelist="b1")
    assert "#SBATCH --nodelist=a[1-2],b1" in script(tmp_path, two_and_two(inference=one, trainer=two))


def test_an_array_is_one_run_per_task_in_folders_of_their_own(tmp_path: Path) -> None:
    submission = make_submission(config(tmp_path, two_and_two(array="1,3%1")), now=NOW)
    runs = [t.config.run for t in submission.tasks]
    assert [(r.id, r.run_dir, r.seed) for r in runs] == [("r1-1", f"{tmp_path}/r1-1", 1), ("r1-3", f"{tmp_path}/r1-3", 3)]
    assert f"#SBATCH --output={tmp_path}/r1-%a/logs/job.log" in submission.script
    assert "#SBATCH --array=1,3%1" in submission.script
    assert f'--config "{tmp_path}/r1-${{SLURM_ARRAY_TASK_ID}}/slurm/config.json"' in submission.script


def test_each_inference_node_runs_one_replica_of_what_the_launcher_starts(tmp_path: Path) -> None:
    found = job_tasks(config(tmp_path), run_id="r1")[0].config
    assert [e.replicas for e in found.env] == [3, 1]
    assert (found.orchestrator.env_server_replicas, found.inference.servers, found.inference.address) == (3, 3, "")


def test_inference_that_runs_elsewhere_is_not_started(tmp_path: Path) -> None:
    found = job_tasks(config(tmp_path, inference=InferenceSection(address="http://10.0.0.7:8000")), run_id="r1")[0].config
    assert (found.inference.servers, found.inference.address) == (0, "http://10.0.0.7:8000")


@pytest.mark.parametrize(
    ("slurm", "sections", "said"),
    [
        (two_and_two(), {"trainer": TrainerSection(parallel=ParallelSection(data=3))}, "starts 2 x 1 ranks, trainer.parallel has 3"),
        (two_and_two(), {"env": (EnvSection(name="demo", replicas=3),)}, "each of the 2 inference nodes runs one"),
        (two_and_two(), {"orchestrator": OrchestratorSection(env_server_replicas=5)}, "the job has 2 inference nodes"),
        (two_and_two(), {"run": RunSection(id="r1", root="/tmp/a b")}, "has a blank or one of"),
        (two_and_two(), {"run": RunSection(id="r1", root="/r", attempt="1.0")}, "set by the launcher of the job"),
        (two_and_two(exclude="a1", inference=SlurmSamplingSection(nodes=2, nodelist="a[1-2]")), {}, "a1, which slurm.exclude rules out"),
        (two_and_two(inference=SlurmSamplingSection(nodes=2, nodelist="a[1-3]")), {}, "names 3 nodes, slurm.inference.nodes is 2"),
        (
            two_and_two(inference=SlurmSamplingSection(nodes=2, nodelist="a1"), trainer=SlurmTrainingSection(nodes=2, nodelist="a1")),
            {},
            "a1 is in the node list of inference and of the trainer",
        ),
        (two_and_two(array="0-1", inference=SlurmSamplingSection(nodes=2, partition="x")), {}, "no arrays of heterogeneous jobs"),
    ],
)
def test_what_does_not_fit_a_job_is_refused_before_anything_is_made(
    tmp_path: Path, slurm: SlurmSection, sections: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        make_submission(config(tmp_path, slurm, **sections), now=NOW)
    assert not list(tmp_path.iterdir())


def test_a_dry_run_prints_the_script_and_makes_nothing(tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "fsref",
        "run",
        str(ROOT / "configs/slurm.toml"),
        "--dry-run",
        "--run.id=r1",
        f"--run.root={tmp_path}/runs",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("#!/bin/bash\n")
    assert "exec " in done.stdout.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_without_slurm_a_job_is_refused_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(SlurmAbsent, match=r"sbatch is not here: submit from a login node"):
        submit(make_submission(config(tmp_path), now=NOW), Slurm(), print)


def test_what_is_submitted_is_written_into_the_runs_folder(tmp_path: Path) -> None:
    class Accepts(Slurm):
        def submit(self, script: Path) -> str:
            assert script.read_text().startswith("#!/bin/bash")
            return "77"

    said: list[str] = []
    submission = make_submission(config(tmp_path), now=NOW)
    assert submit(submission, Accepts(), said.append) == "77"
    assert settings.load(tmp_path / "r1/slurm/config.json") == submission.tasks[0].config
    assert (tmp_path / "r1/logs").is_dir()  # Slurm makes no folder for its output
    assert said[0] == f"job 77 submitted: run r1 in {tmp_path}/r1"
