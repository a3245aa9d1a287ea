"""Command lines of SeaweedFS's servers. Pure: every port, folder and limit is an argument, nothing is looked up.

A pool has one head (master, filer, and a volume server of its own) and any number of members (a volume server each); every node has a
gateway that speaks S3. Gateways ask the head where an object is, and move its bytes to and from the volume servers themselves.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fsref.errors import ConfigError

GRPC_OFFSET: Final = 10_000
PORT_MAX: Final = 65_535
REPLICATIONS: Final = {"000": 1, "001": 2, "002": 3, "010": 2, "011": 3, "020": 3}
"""SeaweedFS's placements and the copies that each makes: the last digit counts copies on other nodes of a rack, the one before it copies
in other racks."""


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Where the servers of a node listen. Each has a second port for the servers among themselves."""

    master: int
    volume: int
    filer: int
    s3: int
    master_grpc: int
    volume_grpc: int
    filer_grpc: int
    s3_grpc: int

    @classmethod
    def at(cls, first: int) -> "Ports":
        """Four ports from ``first`` on, and the same four 10,000 higher. Raises ``ConfigError`` if they do not exist."""
        if not 1024 <= first <= PORT_MAX - GRPC_OFFSET - 3:
            raise ConfigError(f"a pool's first port is 1024 to {PORT_MAX - GRPC_OFFSET - 3}, not {first}")
        return cls.of([*range(first, first + 4), *range(first + GRPC_OFFSET, first + GRPC_OFFSET + 4)])

    @classmethod
    def of(cls, ports: list[int]) -> "Ports":
        """Eight ports, for example free ones."""
        names = ("master", "volume", "filer", "s3", "master_grpc", "volume_grpc", "filer_grpc", "s3_grpc")
        return cls(**dict(zip(names, ports, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Host:
    """One node's share of a pool."""

    address: str
    """The address that its servers bind and that other nodes reach."""
    folder: Path
    """All that it stores lies below; made by who starts it."""
    ports: Ports
    rack: str = "rack"
    """Nodes that fail together have the same; for placements that spread over racks."""
    volumes_max: int = 0
    """Volumes that it holds at most; 0: as many as fit its disk."""


def address_of(host: str, port: int, grpc: int) -> str:
    """``host:port``, with the second port where it does not follow from the first."""
    return f"{host}:{port}" if grpc == port + GRPC_OFFSET else f"{host}:{port}.{grpc}"


def head_argv(program: str, host: Host, *, replication: str, volume_mb: int) -> tuple[str, ...]:
    """Master, filer and volume server in one process."""
    return (program, "server", *_flags(_server(host, replication=replication, volume_mb=volume_mb) | {"s3": "false"}))


def server_argv(program: str, host: Host, *, volume_mb: int) -> tuple[str, ...]:
    """Everything in one process, for one machine: also the gateway."""
    p = host.ports
    s3: dict[str, object] = {
        "s3": "true",
        "s3.port": p.s3,
        "s3.port.grpc": p.s3_grpc,
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.iam": "false",
        "s3.localSocket": host.folder / "s3.sock",
    }
    return (program, "server", *_flags(_server(host, replication="000", volume_mb=volume_mb) | s3))


def _server(host: Host, *, replication: str, volume_mb: int) -> dict[str, object]:
    p = host.ports
    return {
        "dir": host.folder / "data",
        "ip": host.address,
        "ip.bind": host.address,
        "rack": host.rack,
        "master.port": p.master,
        "master.port.grpc": p.master_grpc,
        "master.defaultReplication": replication,
        "master.volumeSizeLimitMB": volume_mb,
        "master.electionTimeout": "1s",
        "master.telemetry": "false",
        "volume.port": p.volume,
        "volume.port.grpc": p.volume_grpc,
        "volume.max": host.volumes_max,
        "volume.preStopSeconds": 0,
        "filer": "true",
        "filer.port": p.filer,
        "filer.port.grpc": p.filer_grpc,
        "filer.defaultReplicaPlacement": replication,
        "filer.localSocket": host.folder / "filer.sock",
    }


def volume_argv(program: str, host: Host, *, master: str) -> tuple[str, ...]:
    """A member's volume server; ``master`` as ``address_of`` gives it."""
    flags: dict[str, object] = {
        "dir": host.folder / "data",
        "ip": host.address,
        "ip.bind": host.address,
        "rack": host.rack,
        "port": host.ports.volume,
        "port.grpc": host.ports.volume_grpc,
        "max": host.volumes_max,
        "master": master,
        "preStopSeconds": 0,
    }
    return (program, "volume", *_flags(flags))


def gateway_argv(program: str, host: Host, *, filer: str) -> tuple[str, ...]:
    """A node's S3 gateway; ``filer`` as ``address_of`` gives it."""
    flags: dict[str, object] = {
        "filer": filer,
        "ip": host.address,
        "ip.bind": host.address,
        "port": host.ports.s3,
        "port.grpc": host.ports.s3_grpc,
        "port.iceberg": 0,
        "port.lance": 0,
        "iam": "false",
        "localSocket": host.folder / "s3.sock",
    }
    return (program, "s3", *_flags(flags))


def _flags(flags: dict[str, object]) -> list[str]:
    return [f"-{name}={value}" for name, value in flags.items()]
