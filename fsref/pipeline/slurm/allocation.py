"""The nodes that a job got, and which of them does what.

Owns the reading of Slurm's environment variables inside a job and the choice of each node's address. Refuses to reach any of them.
"""

import fcntl
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from fsref.config import SlurmSection
from fsref.errors import ConfigError, RoleFailed
from fsref.pipeline.slurm.commands import NodeInfo, Slurm
from fsref.pipeline.slurm.hostlist import expand

SIOCGIFADDR: Final = 0x8915


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One node of the job."""

    name: str
    host: str
    """Its hostname, which its journals carry."""
    address: str
    """IPv4 address at which the others reach it."""


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a job."""

    job: str
    restarts: int
    """Starts of the same job before this one."""
    inference: tuple[Node, ...]
    trainer: tuple[Node, ...]
    components: tuple[str, ...] = ()
    """Of a heterogeneous job: the numbers of its two halves, which Slurm counts as jobs of their own."""

    @property
    def heterogeneous(self) -> bool:
        return bool(self.components)

    @property
    def jobs(self) -> tuple[str, ...]:
        """Every job number whose steps are this start's."""
        return self.components or (self.job,)

    @property
    def attempt(self) -> str:
        """The name of this start: ``<job>.<restarts>``."""
        return f"{self.job}.{self.restarts}"

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (*self.inference, *self.trainer)

    def node(self, name: str) -> Node:
        """By name; raises ``RoleFailed`` for one that is not of this job."""
        for found in self.nodes:
            if found.name == name:
                return found
        raise RoleFailed(f"node {name!r} is not among those of job {self.attempt}: {', '.join(n.name for n in self.nodes)}")


def read_allocation(environ: Mapping[str, str], section: SlurmSection, slurm: Slurm) -> Allocation:
    """In the job's batch process. Raises ``ConfigError`` outside of a job, or for an allocation of another shape than the config's."""
    job = environ.get("SLURM_JOB_ID", "")
    if not job:
        raise ConfigError("SLURM_JOB_ID is not set: this command runs inside a Slurm job, `fsref run` submits one")
    heterogeneous = int(environ.get("SLURM_HET_SIZE") or 0) > 1
    if heterogeneous:
        inference = slurm.hostnames(environ["SLURM_JOB_NODELIST_HET_GROUP_0"])
        trainer = slurm.hostnames(environ["SLURM_JOB_NODELIST_HET_GROUP_1"])
    else:
        inference, trainer = assign(slurm.hostnames(environ.get("SLURM_JOB_NODELIST", "")), section)
    for name, got, wanted in (("inference", inference, section.inference.nodes), ("trainer", trainer, section.trainer.nodes)):
        if len(got) != wanted:
            raise ConfigError(f"slurm.{name}.nodes is {wanted}, the job has {len(got)} for it: {', '.join(got) or 'none'}")
    infos = slurm.nodes([*inference, *trainer])
    addresses = resolve_addresses(infos)
    nodes = [Node(name=i.name, host=i.host, address=a) for i, a in zip(infos, addresses, strict=True)]
    return Allocation(
        job=job,
        restarts=int(environ.get("SLURM_RESTART_COUNT") or 0),
        inference=tuple(nodes[: len(inference)]),
        trainer=tuple(nodes[len(inference) :]),
        components=tuple(environ[f"SLURM_JOB_ID_HET_GROUP_{n}"] for n in (0, 1)) if heterogeneous else (),
    )


def assign(names: Sequence[str], section: SlurmSection) -> tuple[list[str], list[str]]:
    """Inference nodes and trainer nodes: those that a node list names do what it says, the others fill up inference first. Pure."""
    samples = [n for n in names if n in set(expand(section.inference.nodelist))]
    trains = [n for n in names if n in set(expand(section.trainer.nodelist))]
    for name in (n for n in names if n not in {*samples, *trains}):
        (samples if len(samples) < section.inference.nodes else trains).append(name)
    return [n for n in names if n in samples], [n for n in names if n in trains]


def resolve_addresses(infos: Sequence[NodeInfo]) -> list[str]:
    """Each node's IPv4 address. A node's own name often means loopback to itself: then the address that it shows the others is taken.

    Raises ``RoleFailed`` for a name that nobody knows.
    """
    found = [_resolve(i) for i in infos]
    others = [a for a in found if not a.startswith("127.")]
    return [_seen_by(others[0]) if a.startswith("127.") and others else a for a in found]


def _resolve(info: NodeInfo) -> str:
    try:
        return socket.gethostbyname(info.address)
    except OSError as e:
        raise RoleFailed(
            f"node {info.name}: its address {info.address!r} cannot be resolved here ({e}): mend the name service, or set slurm.interface"
        ) from e


def _seen_by(other: str) -> str:
    """The address that this machine uses towards another one; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((other, 9))
        return str(s.getsockname()[0])


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface of this machine. Raises ``ConfigError`` for one that is not there or has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            found = fcntl.ioctl(s.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as e:
            there = ", ".join(n for _, n in socket.if_nameindex())
            raise ConfigError(
                f"slurm.interface {name!r} has no IPv4 address on {socket.gethostname()} ({e.strerror}); there are {there}"
            ) from e
    return socket.inet_ntoa(found[20:24])
