"""Starting, finding and stopping the servers of one node of a pool.

The servers outlive the command that starts them: each is in a session of its own, with a log, and is named in ``pool.json`` by pid and
start time, so that a reused pid is never signalled. Owns that file. Refuses to start what runs, and to remove data.
"""

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from fsref.config import StoreSection
from fsref.errors import ConfigError, RoleFailed, RunBusy, StoreError
from fsref.journal.identity import boot_id, process_start
from fsref.pool.commands import REPLICATIONS, Host, address_of, gateway_argv, head_argv, volume_argv
from fsref.pool.health import answers, get_json
from fsref.pool.program import key_variables, weed_program
from fsref.store import Credentials
from fsref.store.s3bucket import make_bucket

STATE: Final = "pool.json"
LOCK: Final = "pool.lock"
POLL_S: Final = 0.1
KILL_S: Final = 10.0
LOG_TAIL_BYTES: Final = 4096
Stage = tuple[str, tuple[str, ...], Callable[[], bool]]
"""A server's name, its command line, and whether it serves (a ``StoreError`` is no)."""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """One server process."""

    name: str
    pid: int
    start: int
    """Its start time in clock ticks since boot."""


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``pool.json`` says of a node."""

    address: str
    master: str
    """The pool's master, ``host:port``."""
    endpoint: str
    """The node's own S3 gateway."""
    replication: str = ""
    """Of a head: the copies that the pool keeps."""
    boot_id: str = ""
    programs: tuple[Program, ...] = ()

    def alive(self) -> tuple[Program, ...]:
        """Those that run, in the order of their start."""
        if self.boot_id != boot_id():
            return ()
        return tuple(p for p in self.programs if process_start(p.pid) == p.start)


def start(host: Host, *, replication: str, volume_mb: int, keys: Credentials, bucket: str, wait_s: float) -> Node:
    """Starts the head of a pool and its gateway and makes ``bucket``; returns when an object can be stored.

    Raises ``ConfigError`` for a placement that does not exist, ``RunBusy`` if servers of this folder run, ``RoleFailed`` with a server's
    last words; then none of them is left.
    """
    if replication not in REPLICATIONS:
        raise ConfigError(f"replication {replication!r} is none of {', '.join(REPLICATIONS)}: 000 is one copy, 001 two on different nodes")
    program, p = weed_program(), host.ports
    filer = address_of(host.address, p.filer, p.filer_grpc)
    node = Node(
        address=host.address,
        master=f"{host.address}:{p.master}",
        endpoint=f"http://{host.address}:{p.s3}",
        replication=replication,
        boot_id=boot_id(),
    )

    def stores() -> bool:
        make_bucket(bucket, settings=StoreSection(endpoint=node.endpoint, retries_max=0), credentials=keys)
        return True

    stages: list[Stage] = [
        ("head", head_argv(program, host, replication=replication, volume_mb=volume_mb), lambda: _serves(host, p.filer)),
        ("gateway", gateway_argv(program, host, filer=filer), stores),
    ]
    return _start(host, node, stages, keys=keys, wait_s=wait_s)


def join(host: Host, *, head: str, keys: Credentials, wait_s: float) -> Node:
    """Adds this node's disk to the pool whose head is at address ``head`` with the same ports, and starts a gateway of its own here.

    Returns when the master lists the node. Raises ``RunBusy``, ``RoleFailed``; then no server of it is left.
    """
    program, p = weed_program(), host.ports
    node = Node(address=host.address, master=f"{head}:{p.master}", endpoint=f"http://{host.address}:{p.s3}", boot_id=boot_id())
    stages: list[Stage] = [
        (
            "volume",
            volume_argv(program, host, master=address_of(head, p.master, p.master_grpc)),
            lambda: f"{host.address}:{p.volume}" in str(get_json(node.master, "/dir/status")),
        ),
        ("gateway", gateway_argv(program, host, filer=address_of(head, p.filer, p.filer_grpc)), lambda: _serves(host, p.s3)),
    ]
    return _start(host, node, stages, keys=keys, wait_s=wait_s)


def _serves(host: Host, port: int) -> bool:
    return answers(f"{host.address}:{port}", "/healthz")


def node_of(folder: Path) -> Node | None:
    """The node whose servers were started in ``folder``; None if there is none. Raises ``ConfigError`` for a damaged ``pool.json``."""
    try:
        return msgspec.json.decode((folder / STATE).read_bytes(), type=Node)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as e:
        raise ConfigError(f"{folder / STATE} cannot be read: {e}") from e


def stop(folder: Path, *, grace_s: float) -> tuple[str, ...]:
    """Stops this node's servers by pid, the gateway first: SIGTERM, ``grace_s`` seconds, SIGKILL. Returns the names of those that ran;
    data stays. Raises ``RoleFailed`` if one does not die.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder of a pool's node")
    with _locked(folder):
        node = node_of(folder)
        if node is None:
            return ()
        ran = node.alive()
        _end(node, grace_s=grace_s)
        (folder / STATE).unlink()
        return tuple(p.name for p in ran)


def _start(
    host: Host,
    node: Node,
    stages: Sequence[Stage],
    *,
    keys: Credentials,
    wait_s: float,
) -> Node:
    """One server after the other, each ready before the next one starts."""
    (host.folder / "data").mkdir(parents=True, exist_ok=True)
    with _locked(host.folder):
        found = node_of(host.folder)
        if found is not None and found.alive():
            raise RunBusy(f"servers of a pool run in {host.folder} already (pid {found.alive()[0].pid}): stop them first")
        environment, end = {**os.environ, **key_variables(keys)}, time.monotonic() + wait_s
        started = node
        try:
            for name, argv, ready in stages:
                program = _spawn(name, argv, host.folder / f"{name}.log", environment)
                started = msgspec.structs.replace(started, programs=(*started.programs, program))
                _write(host.folder, started)
                _wait(program, host.folder / f"{name}.log", ready, end=end)
        except BaseException:  # also a Ctrl-C: nothing half started stays
            _end(started, grace_s=0.0)
            (host.folder / STATE).unlink(missing_ok=True)
            raise
        return started


def _spawn(name: str, argv: Sequence[str], log: Path, environment: dict[str, str]) -> Program:
    with log.open("ab") as out:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, env=environment, cwd=log.parent
        )
    process.returncode = 0  # it is left running on purpose: whoever stops it finds it by pid and start time
    return Program(name=name, pid=process.pid, start=process_start(process.pid) or 0)


def _wait(program: Program, log: Path, ready: Callable[[], bool], *, end: float) -> None:
    while not _ready(ready):
        if process_start(program.pid) != program.start:
            raise RoleFailed(f"{program.name} of the pool ended: {_last_line(log)}; log: {log}")
        if time.monotonic() >= end:
            raise RoleFailed(f"{program.name} of the pool is not ready in time; log: {log}")
        time.sleep(POLL_S)


def _ready(ready: Callable[[], bool]) -> bool:
    try:
        return ready()
    except StoreError:
        return False


def _end(node: Node, *, grace_s: float) -> None:
    """SIGTERM to all, the last started first, then SIGKILL."""
    for program in reversed(node.alive()):
        _signal(program, signal.SIGTERM)
    end = time.monotonic() + grace_s
    while node.alive() and time.monotonic() < end:
        time.sleep(POLL_S)
    end = time.monotonic() + KILL_S
    while left := node.alive():
        if time.monotonic() >= end:
            raise RoleFailed(f"{', '.join(f'{p.name} (pid {p.pid})' for p in left)} does not die")
        for program in left:
            _signal(program, signal.SIGKILL)
        time.sleep(POLL_S)


def _signal(program: Program, number: int) -> None:
    """Through a descriptor of the process, whose identity is checked after it is open."""
    try:
        descriptor = os.pidfd_open(program.pid)
    except ProcessLookupError:
        return
    try:
        if process_start(program.pid) == program.start:
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)


def _write(folder: Path, node: Node) -> None:
    staging = folder / f".{STATE}.tmp"
    staging.write_bytes(msgspec.json.encode(node))
    staging.replace(folder / STATE)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / LOCK).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunBusy(f"another command is at work on the pool's node in {folder}") from None
        yield


def _last_line(log: Path) -> str:
    data = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
    return data.rpartition("\n")[2][:400]
