"""The bodies of ``fsref pool start``, ``join``, ``health`` and ``stop``."""

import os
import sys
from pathlib import Path

import msgspec

from fsref.errors import ConfigError
from fsref.pool import Health, Host, Node, Ports, check, join, node_of, start, stop
from fsref.store import Credentials

KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
FIRST_PORT = 9333
"""What ``--first-port`` is by default."""


def start_main(
    folder: Path,
    *,
    address: str,
    replication: str,
    bucket: str,
    first_port: int,
    rack: str,
    volume_mb: int,
    volumes_max: int,
    wait_s: float,
) -> None:
    """Starts the head and prints what other nodes and the config of a run need."""
    host = _host(folder, address=address, first_port=first_port, rack=rack, volumes_max=volumes_max)
    node = start(host, replication=replication, volume_mb=volume_mb, keys=_keys(), bucket=bucket, wait_s=wait_s)
    _say(f"the pool's head serves at {node.endpoint}, replication {replication}, bucket {bucket}")
    _say(f"on other nodes: fsref pool join --head {address} --address THEIRS --folder {folder}{_port_option(first_port)}")
    _told(node)


def join_main(folder: Path, *, address: str, head: str, first_port: int, rack: str, volumes_max: int, wait_s: float) -> None:
    """Adds this node."""
    host = _host(folder, address=address, first_port=first_port, rack=rack, volumes_max=volumes_max)
    node = join(host, head=head, keys=_keys(), wait_s=wait_s)
    _say(f"{address} is in the pool of {head}")
    _told(node)


def health_main(folder: Path | None, *, master: str, nodes: int, json: bool) -> int:
    """Prints the pool's state; 1 if something is wrong."""
    if folder is not None:
        node = node_of(folder)
        if node is None:
            raise ConfigError(f"no server of a pool was started in {folder}: name the pool by --master HOST:PORT")
        master = node.master
    if not master:
        raise ConfigError("which pool? Name this node's --folder, or --master HOST:PORT")
    found = check(master)
    problems = found.problems(nodes=nodes)
    if json:
        answer = {"ok": not problems, "master": master, "disks": found.disks, "problems": problems}
        _say(msgspec.json.format(msgspec.json.encode(answer), indent=1).decode())
    else:
        _say("\n".join([*_lines(found), *(f"problem: {p}" for p in problems)]))
    return int(bool(problems))


def stop_main(folder: Path, *, grace_s: float) -> None:
    """Stops this node's servers."""
    ran = stop(folder, grace_s=grace_s)
    _say(f"stopped {', '.join(ran)}; data stays in {folder}" if ran else f"no server of a pool ran in {folder}")


def _host(folder: Path, *, address: str, first_port: int, rack: str, volumes_max: int) -> Host:
    return Host(address=address, folder=folder.absolute(), ports=Ports.at(first_port), rack=rack, volumes_max=volumes_max)


def _keys() -> Credentials:
    found = [os.environ.get(name, "") for name in KEYS]
    if not all(found):
        raise ConfigError(f"set {' and '.join(KEYS)} in the environment, the same on every node: the pool's gateways let in who has them")
    return Credentials(*found)


def _port_option(first_port: int) -> str:
    return "" if first_port == FIRST_PORT else f" --first-port {first_port}"


def _told(node: Node) -> None:
    _say(f"roles on this node: store.endpoint = {node.endpoint!r}, or AWS_ENDPOINT_URL_S3={node.endpoint} in their environment")
    _say("processes: " + ", ".join(f"{p.name} pid {p.pid}" for p in node.programs))


def _lines(found: Health) -> list[str]:
    lines = [f"pool of {found.master}: {len(found.disks)} nodes, {_gib(found.bytes_free)} of {_gib(found.bytes_total)} free"]
    for d in found.disks:
        state = f"{_gib(d.bytes_free)} of {_gib(d.bytes_total)} free" if d.answers else "does not answer"
        lines.append(f"  {d.address:<22} rack {d.rack:<10} volumes {d.volumes:>4}  {state}")
    return lines


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
