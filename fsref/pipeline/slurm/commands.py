"""Slurm's programs: what is asked of them, and what their answers mean.

Owns every call of them and the reading of their output. Refuses to guess: what Slurm did not say is not known.
"""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fsref.errors import ConfigError, RoleFailed

ANSWER_S: Final = 60.0
OVER: Final = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"}
)
"""States in which no process of a job is left."""
_UNKNOWN: Final = "Invalid job id"


class SlurmAbsent(ConfigError):
    """This machine has no Slurm commands."""


@dataclass(frozen=True)
class JobState:
    """What Slurm says about a job."""

    state: str
    """One word: PENDING, RUNNING, COMPLETING, COMPLETED ...; UNKNOWN for a job that it has forgotten, which is long over."""
    restarts: int = 0

    def over(self, restarts: int) -> bool:
        """Whether the start with this number of restarts before it has ended everywhere."""
        return self.state == "UNKNOWN" or self.state in OVER or (restarts < self.restarts and self.state != "COMPLETING")


@dataclass(frozen=True)
class NodeInfo:
    """A node as Slurm knows it."""

    name: str
    host: str
    """Its own hostname."""
    address: str
    """Name or address at which others reach it."""


class Slurm:
    """Asks the cluster that the environment (``SLURM_CONF``) names."""

    def submit(self, script: Path) -> str:
        """``sbatch``; the job's number. Raises ``RoleFailed`` with what it says, ``SlurmAbsent``."""
        answer = self._ask("sbatch", "--parsable", str(script))
        return answer.strip().partition(";")[0]

    def hostnames(self, nodes: str) -> list[str]:
        """A node list expanded, in Slurm's order."""
        return self._ask("scontrol", "show", "hostnames", nodes).split()

    def nodes(self, names: Sequence[str]) -> list[NodeInfo]:
        """In the order of ``names``."""
        found = {}
        for line in self._ask("scontrol", "--oneliner", "show", "node", ",".join(names)).splitlines():
            words = dict(re.findall(r"(\w+)=(\S*)", line))
            if name := words.get("NodeName"):
                found[name] = NodeInfo(name, words.get("NodeHostName") or name, words.get("NodeAddr") or name)
        return [found.get(n) or NodeInfo(n, n, n) for n in names]

    def job(self, job: str) -> JobState:
        """How it is with a job. Raises ``RoleFailed`` where the controller does not answer."""
        done = self._run("scontrol", "--oneliner", "show", "job", job)
        if done.returncode and _UNKNOWN in done.stderr:
            return JobState("UNKNOWN")
        lines = self._checked(done).splitlines()
        words = dict(re.findall(r"(\w+)=(\S*)", next((x for x in lines if f"JobId={job} " in x), lines[0] if lines else "")))
        if "JobState" not in words:
            raise RoleFailed(f"scontrol show job {job} gives no state: {' '.join(lines)[:200]!r}")
        return JobState(words["JobState"], int(words.get("Restarts") or 0))

    def steps(self, jobs: Sequence[str], name: str) -> list[str]:
        """The running steps of these jobs with this name: ``<job>.<number>``."""
        done = self._run("squeue", "--noheader", "--steps", f"--jobs={','.join(jobs)}", "--format=%i %j")
        if done.returncode and _UNKNOWN in done.stderr:
            return []
        return [line.split()[0] for line in self._checked(done).splitlines() if line.split()[1:] == [name]]

    def kill_step(self, step: str) -> None:
        """SIGKILL to every process of it; one that has ended by now is no error."""
        self._run("scancel", "--signal=KILL", step)

    def on_nodes(self, argv: Sequence[str], *, nodes: str, count: int, inside: bool, timeout_s: float) -> str:
        """Runs a command once on each node, in a step of the job around it (``inside``) or in an allocation of its own; its stdout.

        ``nodes``: a node list, or empty for any ``count`` nodes. Raises ``RoleFailed`` with what it said.
        """
        options = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--cpu-bind=none", "--job-name=fsref-doctor"]
        options += [f"--nodelist={nodes}"] if nodes else []
        options += ["--overlap"] if inside else []
        return self._checked(self._run("srun", *options, *argv, timeout_s=timeout_s))

    def requeue(self, job: str) -> None:
        """The job is ended here and starts again when there is room."""
        self._ask("scontrol", "requeue", job)

    def _ask(self, *argv: str) -> str:
        return self._checked(self._run(*argv))

    def _checked(self, done: "subprocess.CompletedProcess[str]") -> str:
        if done.returncode:
            raise RoleFailed(f"{' '.join(done.args)} failed: {' '.join(done.stderr.split())[:400] or f'exit code {done.returncode}'}")
        return done.stdout

    def _run(self, *argv: str, timeout_s: float = ANSWER_S) -> "subprocess.CompletedProcess[str]":
        try:
            return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=timeout_s, stdin=subprocess.DEVNULL)
        except FileNotFoundError as e:
            raise SlurmAbsent(
                f"the program {argv[0]} is not here: submit from a login node of the cluster, or drop the [slurm] table"
            ) from e
        except subprocess.TimeoutExpired as e:
            raise RoleFailed(f"{' '.join(argv)} did not answer within {timeout_s:g} s: is the controller up (scontrol ping)?") from e
