"""The job's script: a template of the folder ``slurm/`` with its blanks filled in.

The templates are text for people: ``@name`` is a blank, ``@@`` is one ``@``; a blank that is empty leaves no line behind. Owns which blanks
there are. Refuses logic in templates: what may be absent is a whole line that is made here.
"""

import shlex
import string
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Final

from fsref.config import SlurmSamplingSection, SlurmSection, SlurmTrainingSection
from fsref.errors import ConfigError
from fsref.pipeline.slurm.plan import Task, is_heterogeneous, section

PLAIN: Final = "job.sbatch"
HETEROGENEOUS: Final = "heterogeneous.sbatch"
TASK: Final = "${SLURM_ARRAY_TASK_ID}"


class JobTemplate(string.Template):
    """``@name``: the shell's own ``$`` stays what it is."""

    delimiter = "@"


def template(name: str) -> JobTemplate:
    """A template that ships with fsref; raises ``ConfigError`` for an installation without it."""
    package = Path(str(files("fsref")))
    for folder in (package / "slurm_templates", package.parent / "slurm"):
        if (folder / name).is_file():
            return JobTemplate((folder / name).read_text(encoding="utf-8"))
    raise ConfigError(f"the template {name} is not beside the package {package}: install fsref again")


def render(tasks: Sequence[Task], *, run_id: str) -> str:
    """The whole script of a job with these runs (several: an array)."""
    slurm = section(tasks[0].config)
    where = run_dir_pattern(tasks, "%a")
    config = f"{run_dir_pattern(tasks, TASK)}/slurm/config.json"
    values = {
        "run_id": run_id,
        "inference_nodes": str(slurm.inference.nodes),
        "trainer_nodes": str(slurm.trainer.nodes),
        "ranks_per_node": str(slurm.trainer.ranks_per_node),
        "job_name": slurm.job_name or f"fsref-{run_id}",
        "output": f"{where}/logs/job.log",
        "time": slurm.time,
        "signal_lead": str(slurm.signal_lead_s),
        "requeue": "--requeue" if slurm.requeue else "--no-requeue",
        "common": _directives(_common(slurm)),
        "modules": "\n".join(f"module load {shlex.quote(m)}" for m in slurm.modules),
        "setup": "\n".join(slurm.setup),
        "python": shlex.quote(slurm.python or sys.executable),
        "config": f'"{config}"',
    }
    if is_heterogeneous(slurm):
        values["inference"] = _directives(_component(slurm, slurm.inference))
        values["trainer"] = _directives(_component(slurm, slurm.trainer))
        text = template(HETEROGENEOUS).substitute(values)
    else:
        values["nodes"] = str(slurm.inference.nodes + slurm.trainer.nodes)
        values["all_nodes"] = _directives(_together(slurm))
        text = template(PLAIN).substitute(values)
    return _without_gaps(text)


def run_dir_pattern(tasks: Sequence[Task], number: str) -> str:
    """The folder of the run, or of the array's run with this number."""
    first = tasks[0].config.run
    if not section(tasks[0].config).array:
        return first.run_dir
    own = first.id.rpartition("-")[2]
    return f"{first.run_dir.removesuffix(own)}{number}"


def _common(slurm: SlurmSection) -> list[str]:
    options = [("account", slurm.account), ("qos", slurm.qos), ("array", slurm.array)]
    return [f"--{name}={value}" for name, value in options if value]


def _component(slurm: SlurmSection, part: SlurmSamplingSection | SlurmTrainingSection) -> list[str]:
    options = [("partition", part.partition or slurm.partition), ("nodelist", part.nodelist), ("exclude", slurm.exclude)]
    found = [f"--{name}={value}" for name, value in options if value]
    return [*found, *(["--exclusive"] if slurm.exclusive else []), *slurm.directives, *part.directives]


def _together(slurm: SlurmSection) -> list[str]:
    both = ",".join(filter(None, (slurm.inference.nodelist, slurm.trainer.nodelist)))
    options = [("partition", slurm.inference.partition or slurm.partition), ("nodelist", both), ("exclude", slurm.exclude)]
    found = [f"--{name}={value}" for name, value in options if value]
    return [*found, *(["--exclusive"] if slurm.exclusive else []), *slurm.directives, *slurm.inference.directives]


def _directives(options: Sequence[str]) -> str:
    return "\n".join(f"#SBATCH {o}" for o in options)


def _without_gaps(text: str) -> str:
    """Empty blanks leave runs of empty lines; one stays."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.strip() or (lines and lines[-1]):
            lines.append(line.rstrip())
    return "\n".join(lines).rstrip() + "\n"
