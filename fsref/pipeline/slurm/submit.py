"""``fsref run`` with a ``[slurm]`` table: writes the job's script and config into the run's folder and hands them to Slurm.

Owns these files. Refuses to start a role: everything else happens in the job, also after a requeue.
"""

import datetime as dt
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fsref import config as settings
from fsref.config import Config
from fsref.pipeline.layout import mint_run_id
from fsref.pipeline.schema import check_names
from fsref.pipeline.slurm.commands import Slurm
from fsref.pipeline.slurm.plan import Task, job_tasks
from fsref.pipeline.slurm.script import render
from fsref.store.posix import raise_mapped


@dataclass(frozen=True)
class Submission:
    """A job before Slurm has it."""

    run_id: str
    tasks: tuple[Task, ...]
    script: str

    @property
    def script_path(self) -> Path:
        """In the folder of the run, of an array in that of its first."""
        return self.tasks[0].folder / "job.sbatch"


def make_submission(config: Config, *, now: dt.datetime) -> Submission:
    """Resolves and renders; touches nothing. Raises ``ConfigError``."""
    check_names(config)
    run_id = config.run.id or mint_run_id(now)
    tasks = tuple(job_tasks(config, run_id=run_id))
    return Submission(run_id, tasks, render(tasks, run_id=run_id))


def submit(submission: Submission, slurm: Slurm, say: Callable[[str], None]) -> str:
    """Writes and submits; returns the job's number. Raises ``StoreError`` for a folder that cannot be written, ``RoleFailed``."""
    for task in submission.tasks:
        for folder in (task.folder, Path(task.config.run.run_dir) / "logs"):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise_mapped(e, f"creating {folder}")
        _write(task.folder / "config.json", settings.dump(task.config))
    _write(submission.script_path, submission.script.encode())
    job = slurm.submit(submission.script_path)
    run_dir = submission.tasks[0].config.run.run_dir
    say(
        f"job {job} submitted: run {submission.run_id} in {run_dir}{f' and {len(submission.tasks) - 1} more' * (len(submission.tasks) > 1)}"
    )
    say(f"follow it: tail -F {run_dir}/logs/job.log; end it: scancel {job}, then fsref close {run_dir}")
    return job


def _write(path: Path, data: bytes) -> None:
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        staging.write_bytes(data)
        staging.replace(path)
    except OSError as e:
        raise_mapped(e, f"writing {path}")
