"""Address files: how an env-server replica, or the inference of a node, says where it listens.

``<run_dir>/envs/<split>/<name>.<node>.address`` is a small JSON record, published by rename; inference of a job publishes
``<run_dir>/inference/<node>.address``. A record of another run, of another start of its job, or of a process that is gone, is stale and
never connected to. Owns the record, its place and that judgement; refuses to open sockets.
"""

import os
import secrets
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from fsref.errors import BadRef
from fsref.journal.identity import boot_id, process_start

VERSION: Final = 1
_BYTES_MAX: Final = 4096


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """One running replica."""

    v: int = VERSION
    run: str
    run_uuid: str
    """Of run.json: a folder that was reused for another run does not match."""
    address: str
    """``tcp://host:port``, of inference ``http://host:port``."""
    label: str
    """``<name>-<replica>``; its workers' incarnations are labelled ``<label>-<worker>``."""
    host: str
    boot_id: str
    pid: int
    pstart: int
    """Start time of the process in clock ticks since boot: pids are reused."""
    nonce: str
    """New with every start, so that a restarted replica differs even on the same port."""
    node: str = ""
    """The node's name as it stands in the file's name."""
    attempt: str = ""
    """Which start of a job it belongs to; empty outside of jobs."""


def here(*, run: str, run_uuid: str, address: str, label: str, node: str = "", attempt: str = "") -> Address:
    """The record of this process."""
    pid = os.getpid()
    return Address(
        run=run,
        run_uuid=run_uuid,
        address=address,
        label=label,
        host=socket.gethostname(),
        boot_id=boot_id(),
        pid=pid,
        pstart=process_start(pid) or 0,
        nonce=secrets.token_hex(8),
        node=node,
        attempt=attempt,
    )


def address_path(envs_dir: Path, *, split: str, name: str, node: str) -> Path:
    """``<envs_dir>/<split>/<name>.<node>.address``."""
    return envs_dir / split / f"{name}.{node}.address"


def inference_path(run_dir: Path, node: str) -> Path:
    """``<run_dir>/inference/<node>.address``."""
    return run_dir / "inference" / f"{node}.address"


def publish(path: Path, record: Address) -> None:
    """Writes the record so that readers see all of it or the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.{record.nonce}")
    staging.write_bytes(msgspec.json.encode(record))
    staging.rename(path)


def withdraw(path: Path, record: Address) -> None:
    """Removes the file if it still holds ``record``."""
    if read(path) == record:
        path.unlink(missing_ok=True)


def read(path: Path) -> Address | None:
    """The record in a file; ``None`` if there is no file. Raises ``BadRef`` for anything else than a record."""
    try:
        with path.open("rb") as file:
            data = file.read(_BYTES_MAX)
    except FileNotFoundError:
        return None
    try:
        record = msgspec.json.decode(data, type=Address)
    except (msgspec.DecodeError, ValueError) as e:
        raise BadRef(f"{path} is not an address file: {e}") from e
    if record.v != VERSION:
        raise BadRef(f"{path} has format {record.v}, this version reads {VERSION}")
    return record


def find(envs_dir: Path, *, split: str, name: str) -> list[tuple[Path, Address]]:
    """Every published replica of a source, by file name; files with other contents are left out (they are another's, or half a copy).

    Raises ``OSError`` where the folder cannot be looked through just now (a shared filesystem says ESTALE for what was just replaced): look
    again; nothing is known of who is missing.
    """
    return _records((envs_dir / split).glob(f"{name}.*.address"))


def find_inference(run_dir: Path) -> list[tuple[Path, Address]]:
    """The published inference servers of a job, by node. Raises ``OSError`` as ``find``."""
    return _records((run_dir / "inference").glob("*.address"))


def _records(paths: Iterable[Path]) -> list[tuple[Path, Address]]:
    found = []
    for path in sorted(paths):
        try:
            record = read(path)
        except BadRef:
            continue
        if record is not None:
            found.append((path, record))
    return found


def stale(record: Address, *, run_uuid: str, attempt: str = "") -> bool:
    """True if the record is of another run, of another start of its job, or of a process of this machine that is gone."""
    return record.run_uuid != run_uuid or record.attempt != attempt or gone(record)


def gone(record: Address) -> bool:
    """True only if the process provably ended: same host, and another boot or no such process with that start time.

    What cannot be read is unknown, never gone.
    """
    if record.host != socket.gethostname() or not record.pstart:
        return False
    here_now = boot_id()
    if record.boot_id and here_now and record.boot_id != here_now:
        return True
    try:
        stat = Path(f"/proc/{record.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    fields = stat.rpartition(")")[2].split()
    return fields[0] in "ZX" or int(fields[19]) != record.pstart
