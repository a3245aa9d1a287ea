"""What every node of a job sees of the folder that they share: measured by the nodes together, before a run or inside a job.

Each node writes, makes durable, renames over and reads; all look for all others' files; the first then asks each of the others several
times, through the folder alone, and times the answer: half of the round trip is how late one node sees what another wrote, and the clock
in the answer says how far theirs is from its own. No clock is compared without that bound.

Owns the exchange and its judgement. Everything lies in one folder of its own, which the first node removes.
"""

import contextlib
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from fsref.errors import ConfigError, StoreError
from fsref.pipeline.slurm.commands import ANSWER_S, Slurm
from fsref.pipeline.slurm.hostlist import expand
from fsref.store.posix import raise_mapped

_T = TypeVar("_T")
ROUNDS: Final = 3
POLL_S: Final = 0.005
LAG_S_MAX: Final = 30.0
"""Addresses, steps and weights are found by looking for names: each of them would be this late."""
VIEW_S: Final = 60.0
"""How long a node waits for the others' files."""
SPREAD_S_MAX: Final = 300.0
"""S3 refuses requests beyond 15 minutes; nothing else depends on clocks."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One node's part."""

    node: str
    host: str
    write_s: float
    """A file of 4 KiB written, made durable and renamed over another."""
    unseen: tuple[str, ...] = ()
    """Nodes whose files did not appear here in time."""
    problem: str = ""
    """Why it could not write, rename or read."""
    lag_s: float | None = None
    """How late, at worst, the first node and this one saw what the other wrote; None for the first."""
    clock_s: float | None = None
    """This node's clock minus the first one's."""
    clock_error_s: float = 0.0
    """Bound of the error of it."""

    @property
    def failure(self) -> str:
        """What keeps a run from working on this node; empty if nothing does."""
        if self.problem:
            return self.problem
        if self.unseen:
            return f"it does not see what {', '.join(self.unseen)} wrote: is the folder on a filesystem that all nodes share?"
        if self.lag_s is not None and self.lag_s > LAG_S_MAX:
            return f"it sees what others wrote {self.lag_s:.1f} s late: shorten the attribute cache of the mount (NFS: actimeo)"
        if self.clock_s is not None and abs(self.clock_s) - self.clock_error_s > SPREAD_S_MAX:
            return f"its clock is {self.clock_s:+.0f} s off: set the clocks"
        return ""


def look(folder: Path, nodes: str, slurm: Slurm, environ: Mapping[str, str]) -> tuple[list[View], int]:
    """Has the nodes exchange, by a step of the job around this process or in an allocation of its own: their views, and how many lack.

    ``nodes``: a node list, or ``all`` inside a job. Raises ``ConfigError``, ``RoleFailed``.
    """
    inside = bool(environ.get("SLURM_JOB_ID"))
    if nodes == "all" and not inside:
        raise ConfigError("--nodes all is for the inside of a job: name the nodes, as in --nodes 'gpu[01-04]'")
    wanted = "" if nodes == "all" else nodes
    count = len(expand(wanted)) if wanted else int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not there: make it first, on the filesystem that all nodes share")
    argv = [sys.executable, "-m", "fsref", "view", "--folder", str(folder), "--token", secrets.token_hex(8)]
    said = slurm.on_nodes(argv, nodes=wanted, count=count, inside=inside, timeout_s=4 * VIEW_S + ANSWER_S)
    views = msgspec.json.decode(said.strip().splitlines()[-1] if said.strip() else "[]", type=list[View])
    return views, count - len(views)


def exchange(folder: Path, *, token: str, node: str, number: int, count: int, deadline_s: float) -> list[View]:
    """Every node's view, on the first (``number`` 0); an empty list on the others. ``token`` is new for each exchange.

    A node that never comes is missing from the list. Raises ``StoreError`` if this node cannot use the folder at all.
    """
    place = folder / f".fsref-view-{token}"
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise_mapped(e, f"creating {place} on node {node}")
    end = time.monotonic() + deadline_s
    write_s, problem = _try(place, number)
    _put(place, f"hello.{number}", node.encode())
    names = {n: _get(place, f"hello.{n}", end) for n in range(count)}
    unseen = tuple(f"task {n}" for n, name in names.items() if name is None)
    mine = View(node=node, host=socket.gethostname(), write_s=write_s, unseen=unseen, problem=problem)
    if number:
        _put(place, f"view.{number}", msgspec.json.encode(mine))
        _answer(place, number, end + deadline_s)
        return []
    try:
        return [mine, *_ask(place, [n for n, name in names.items() if n and name is not None], end + deadline_s)]
    finally:
        _put(place, "over", b"")
        for n in range(1, count):
            if names[n] is not None:
                _get(place, f"bye.{n}", end + deadline_s)
        shutil.rmtree(place, ignore_errors=True)


def _try(place: Path, number: int) -> tuple[float, str]:
    """Write, fsync, rename over, read; the seconds and what went wrong."""
    first, second = place / f"try.{number}.1", place / f"try.{number}.2"
    data = os.urandom(4096)
    start = time.perf_counter()
    try:
        second.write_bytes(b"older")
        with first.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        first.rename(second)
        took_s = time.perf_counter() - start
        if second.read_bytes() != data:
            return took_s, "a file that was renamed over another does not read back as written"
        second.unlink()
    except OSError as e:
        return time.perf_counter() - start, f"it cannot write in {place.parent}: {e.strerror}"
    return took_s, ""


def _ask(place: Path, others: list[int], end: float) -> list[View]:
    """The views of the others with lag and clock."""
    lag: dict[int, float] = {}
    clock: dict[int, tuple[float, float]] = {}
    for turn in range(ROUNDS):
        asked, asked_at = time.monotonic(), time.time()
        _put(place, f"ask.{turn}", b"")
        waiting = set(others)
        while waiting and time.monotonic() < end:
            for n in sorted(waiting):
                answer = _read(place / f"answer.{turn}.{n}")
                if answer is None:
                    continue
                waiting.discard(n)
                half = (time.monotonic() - asked) / 2
                lag[n] = max(lag.get(n, 0.0), half)
                if n not in clock or half < clock[n][1]:
                    clock[n] = float(answer) - (asked_at + half), half
            time.sleep(POLL_S)
    views = []
    for n in others:
        data = _get(place, f"view.{n}", end)
        if data is not None:
            offset, error = clock.get(n, (None, 0.0))
            late = lag.get(n, LAG_S_MAX * 2)
            views.append(msgspec.structs.replace(msgspec.json.decode(data, type=View), lag_s=late, clock_s=offset, clock_error_s=error))
    return views


def _answer(place: Path, number: int, end: float) -> None:
    """Answers every question until the first node says that it is over."""
    turn = 0
    while time.monotonic() < end:
        if turn < ROUNDS and _read(place / f"ask.{turn}") is not None:
            _put(place, f"answer.{turn}.{number}", repr(time.time()).encode())
            turn += 1
        elif _read(place / "over") is not None:
            break
        else:
            time.sleep(POLL_S)
    with contextlib.suppress(StoreError):
        _put(place, f"bye.{number}", b"")


def _put(place: Path, name: str, data: bytes) -> None:
    staging = place / f".{name}"
    try:
        staging.write_bytes(data)
        staging.rename(place / name)
    except OSError as e:
        raise_mapped(e, f"writing {place / name}")


def _get(place: Path, name: str, end: float) -> bytes | None:
    """The file once it is there; None after the deadline."""
    return _until(lambda: _read(place / name), end)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:  # not there yet; or ESTALE, which the next look heals
        return None


def _until(found: Callable[[], _T | None], end: float) -> _T | None:
    while (value := found()) is None and time.monotonic() < end:
        time.sleep(POLL_S)
    return value
