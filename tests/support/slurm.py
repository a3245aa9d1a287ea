"""A real Slurm on one machine: one slurmctld and several slurmd, each in namespaces of its own, so that they are strangers as nodes are.

A node has its own host name, boot id, process table, ``/etc/hosts`` and network (a veth pair on a bridge, with an address that only the
bridge's members reach); the filesystem is shared, as Lustre would be. What is bound to loopback by mistake is reached by no other node,
and no node can look at another's processes. A node is lost by killing the first process of its namespace.

All folders, ports, keys and pids are this cluster's own; everything is stopped by pid.
"""

import contextlib
import ctypes
import os
import secrets
import shlex
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.support import needs

DEADLINE_S: Final = 60.0
PR_SET_PDEATHSIG: Final = 1
CPUS: Final = 8
"""Faked per node: steps of a job must fit beside each other."""

CONF: Final = """\
ClusterName=fsref
SlurmctldHost={host}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=15
CredType=cred/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=15
KillWait=20
InactiveLimit=0
MinJobAge=3600
MessageTimeout=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=0
{nodes}
PartitionName=both Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1
PartitionName=sampling Nodes={sampling} MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=training Nodes={training} MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9
"""


def _die_with_parent() -> None:
    """Of a test run that is killed nothing stays."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(argv)}: {done.stderr}"


class Network:
    """A bridge with one address here, and one network namespace per node."""

    def __init__(self, nodes: Sequence[str]) -> None:
        token = secrets.token_hex(3)
        self._bridge = f"fsb{token}"
        self._names = {node: f"fs{token}-{node}" for node in nodes}
        self._subnet = f"10.{64 + secrets.randbelow(128)}.{secrets.randbelow(256)}"
        self.address = f"{self._subnet}.1"
        self.addresses = {node: f"{self._subnet}.{11 + n}" for n, node in enumerate(nodes)}

    def open(self) -> None:
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{self.address}/24", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")
        for n, (node, name) in enumerate(self._names.items()):
            outer = f"{self._bridge}v{n}"
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", outer, "master", self._bridge, "up")
            _run("ip", "-n", name, "addr", "add", f"{self.addresses[node]}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")

    def inside(self, node: str) -> list[str]:
        """Prefix that runs a command in a node's network. (``ip netns exec`` would hide ``/sys/fs/cgroup``, which slurmd looks for.)"""
        return ["nsenter", f"--net=/run/netns/{self._names[node]}"]

    def close(self) -> None:
        for name in self._names.values():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], check=False, capture_output=True)


class Cluster:
    """Open while its context is. ``nodes`` are up; the first half is also the partition ``sampling``, the second ``training``."""

    def __init__(self, folder: Path, *, nodes: Sequence[str] = ("n1", "n2", "n3", "n4")) -> None:
        self.folder, self.nodes = folder, tuple(nodes)
        self._network = Network(self.nodes)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> "Cluster":
        try:
            self._network.open()
            self._write()
            self._start("munged", ["munged", "--foreground", "--force", f"--key-file={self.folder}/munge.key", *self._munge_files()])
            self._until((self.folder / "munge.sock").exists, "munged")
            self._start("slurmctld", ["slurmctld", "-D", "-f", str(self.folder / "slurm.conf"), "-i", "-c"])
            for node in self.nodes:
                self.start_node(node)
            self._until(lambda: self.states() == dict.fromkeys(self.nodes, "idle"), "all nodes idle")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _munge_files(self) -> list[str]:
        return [f"--socket={self.folder}/munge.sock", f"--pid-file={self.folder}/munge.pid", f"--seed-file={self.folder}/munge.seed"]

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        (self.folder / "state").mkdir()
        hosts = [f"{a} {n}" for n, a in self._network.addresses.items()]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts]) + "\n")
        with socket.socket() as s:
            s.bind((self._network.address, 0))
            port = s.getsockname()[1]
        for node in self.nodes:
            (self.folder / f"boot.{node}").write_text(f"{uuid.uuid4()}\n")
        half = len(self.nodes) // 2
        nodes = [f"NodeName={n} NodeHostname={n} NodeAddr={a} CPUs={CPUS} RealMemory=16000" for n, a in self._network.addresses.items()]
        (self.folder / "slurm.conf").write_text(
            CONF.format(
                host=socket.gethostname(),
                address=self._network.address,
                folder=self.folder,
                port=port,
                nodes="\n".join(nodes),
                sampling=",".join(self.nodes[:half]),
                training=",".join(self.nodes[half:]),
            )
        )

    def _start(self, name: str, argv: Sequence[str]) -> None:
        program = needs.program(argv[0]) if "/" not in argv[0] else argv[0]
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                [program, *argv[1:]],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self.env,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509  one system call, no lock
            )

    def start_node(self, node: str) -> None:
        """Boots a node: new processes, a new boot id."""
        (self.folder / f"spool.{node}").mkdir(exist_ok=True)
        (self.folder / f"boot.{node}").write_text(f"{uuid.uuid4()}\n")
        boot = "; ".join(
            [
                "set -e",
                f"hostname {node}",
                f"mount --bind {self.folder}/hosts /etc/hosts",
                f"mount --bind {self.folder}/boot.{node} /proc/sys/kernel/random/boot_id",
                f"exec {needs.program('slurmd')} -D -N {node} -f {self.folder}/slurm.conf",
            ]
        )
        inner = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", boot]
        self._start(f"slurmd.{node}", [*self._network.inside(node), *inner])

    def lose_node(self, node: str) -> None:
        """Every process of the node dies at once, slurmd included."""
        daemon = self._daemons.pop(f"slurmd.{node}")
        daemon.kill()  # unshare, whose child is the first process of the namespace
        daemon.wait(DEADLINE_S)

    def close(self) -> None:
        """Stops everything by pid: nodes (with all that runs on them), controller, munge, network."""
        for name in [*(f"slurmd.{n}" for n in self.nodes), "slurmctld", "munged"]:
            daemon = self._daemons.pop(name, None)
            if daemon is not None:
                daemon.kill()
                daemon.wait(DEADLINE_S)
        self._network.close()

    def _until(self, ready: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not ready():
            dead = [name for name, d in self._daemons.items() if d.poll() is not None]
            if dead or time.monotonic() >= end:
                raise AssertionError(f"Slurm: {what}: {dead or 'no daemon'} ended\n{self.said()}")
            time.sleep(0.1)

    def said(self) -> str:
        """The ends of the daemons' logs, for a failing test."""
        logs = [p for p in sorted(self.folder.glob("*.log")) + sorted(self.folder.glob("*.out")) if p.stat().st_size]
        return "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-1500:]}" for p in logs)

    def command(self, *argv: str, check: bool = True, env: Mapping[str, str] | None = None) -> str:
        """Runs a Slurm client here, as on a login node; returns its stdout."""
        done = subprocess.run(argv, capture_output=True, text=True, check=False, env={**self.env, **(env or {})}, timeout=DEADLINE_S)
        assert not check or done.returncode == 0, f"{shlex.join(argv)}: {done.stderr}{done.stdout}"
        return done.stdout

    def states(self) -> dict[str, str]:
        """Node to state, as ``sinfo`` says."""
        lines = self.command("sinfo", "-N", "-h", "-p", "both", "-o", "%N %t", check=False).splitlines()
        return dict(line.split(maxsplit=1) for line in lines)

    def state(self, job: str) -> str:
        """State of a job (``PENDING``, ``RUNNING``, ``COMPLETED`` ...); empty if Slurm does not know it."""
        for word in self.command("scontrol", "-o", "show", "job", job, check=False).split():
            if word.startswith("JobState="):
                return word.partition("=")[2]
        return ""


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster of four nodes; skips a machine without Slurm, munge or the right to make namespaces."""
    needs.root()
    for name in ("slurmctld", "slurmd", "sbatch", "munged", "ip"):
        needs.program(name)
    with Cluster(folder) as found:
        yield found
