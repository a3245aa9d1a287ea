"""The orchestrator's side: episodes from all replicas of one source.

Owns which replicas there are (address files, or one served address), which of them live, which gets the next run (fewest in flight), and
the counts of each. A replica that dies ends its runs with ``ReplicaDown``; when its successor publishes a new address it is
taken back. Refuses to retry a run, to judge an episode, and to remove arrays: what it will not return goes to ``abandoned``.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from fsref import errors
from fsref.addresses import Address, find, gone, stale
from fsref.config import EnvSection
from fsref.episodes.branches import BranchSample, TraceResult, branch_samples, trace_result
from fsref.episodes.source import Target, Task, client_config, sampling_config
from fsref.episodes.wire_client import Abandoned, ServerRefused, WireClient
from fsref.errors import BadRef, FsrefError, ReplicaDown

_POLL_S: Final = 0.25
"""Between looks at the address files and at the replicas' processes."""

_ABORTED: Final = "Cancelled"
"""How an env server ends the runs that its own stop cuts off."""


@dataclass(frozen=True)
class Episode:
    """One finished episode. Whoever gets it owns ``objects`` and takes them in the ledger before anything else."""

    request_id: str
    replica: str
    """Label of the replica that ran it."""
    task: Task
    ok: bool
    errors: tuple[str, ...]
    traces: tuple[TraceResult, ...]
    samples: tuple[BranchSample, ...]
    """Exactly the branches that train (see ``training_branches``)."""
    objects: Mapping[str, int]
    """Every object that its env server kept for it, with its bytes."""
    wall_s: float

    @property
    def reward(self) -> float:
        """Mean reward of its trainable traces; 0 without any."""
        rewards = [t.reward for t in self.traces if t.trainable]
        return sum(rewards) / len(rewards) if rewards else 0.0


@dataclass(frozen=True)
class ReplicaCounts:
    """What one replica did for this process."""

    alive: bool
    in_flight: int
    finished: int
    """Episodes returned, failed ones included."""
    failed: int
    """Runs that ended with an error of the server or because it died."""
    cancelled: int
    deaths: int


@dataclass
class _Replica:
    label: str
    address: str
    client: WireClient
    record: Address | None
    alive: bool = False
    retired: bool = False
    in_flight: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    deaths: int = 0

    @property
    def node(self) -> str:
        """Where it runs; empty where that is not known."""
        return self.record.node if self.record is not None else ""

    watch: asyncio.Task[None] | None = None
    old: list[WireClient] = field(default_factory=list)


class EpisodeClient:
    """Runs episodes of one ``[[env]]`` source. Start it, close it; a context manager. One event loop."""

    def __init__(
        self, *, env: EnvSection, envs_dir: Path, run: str, run_uuid: str, session: str, abandoned: Abandoned, attempt: str = ""
    ) -> None:
        """``session``: the consumer's incarnation; env workers begin a new one of their own when another orchestrator's comes.

        ``attempt``: only replicas of this start of the job are connected to.
        ``abandoned(request_id, {object id: bytes})`` is called on the event loop for a reply that arrived and is not returned.
        """
        self._env, self._envs_dir, self._run, self._run_uuid, self._abandoned = env, envs_dir, run, run_uuid, abandoned
        self._session, self._attempt = session, attempt
        self._replicas: dict[str, _Replica] = {}
        self._changed = asyncio.Condition()
        self._wait_s = 120.0
        self._finder: asyncio.Task[None] | None = None

    async def start(self, *, deadline_s: float) -> None:
        """Waits until every replica is published and healthy. Raises ``ReplicaDown`` that says which are missing."""
        self._wait_s = deadline_s
        if self._env.serve_address:
            self._connect(f"{self._env.name}-served", self._env.serve_address, None)
        else:
            self._finder = asyncio.create_task(self._find())
        needed = 1 if self._env.serve_address else self._env.replicas
        try:
            async with asyncio.timeout(deadline_s), self._changed:
                await self._changed.wait_for(lambda: sum(r.alive for r in self._replicas.values()) >= needed)
        except TimeoutError:
            found = {label: "healthy" if r.alive else "not healthy" for label, r in self._replicas.items()}
            where = self._env.serve_address or f"{self._envs_dir}/{self._env.split}/{self._env.name}.*.address"
            raise ReplicaDown(
                f"env {self._env.name!r}: {needed} replicas needed within {deadline_s:g} s, found {found or 'none'} at {where}; "
                f"see logs/envs/{self._env.split}/{self._env.name}.*.log"
            ) from None

    async def run(self, task: Task, *, target: Target, sampling: Mapping[str, Any]) -> Episode:
        """One episode on the replica with the fewest runs in flight; waits while all are at ``concurrent_max``.

        The caller owns ``objects`` of what it gets: take them in the ledger before the next await, and await this call directly, never
        through a task whose result can get lost. A failed episode is returned, not raised. Raises ``ReplicaDown`` (run it
        again), ``asyncio.CancelledError`` (the server was told, or ``abandoned`` was called), or the error of this package that the
        server ended the episode with: missing arrays, a wrong payload, a store or ledger failure.
        """
        settings = sampling_config(sampling)
        start = time.monotonic()
        async with self._slot() as replica:
            client = client_config(target, node=replica.node)
            try:
                request_id, objects, found = await replica.client.episode(
                    client=client, model=target.model, sampling=settings, task_data=dict(task.data)
                )
            except ServerRefused as e:
                if e.kind == _ABORTED:
                    raise ReplicaDown(f"replica {replica.label} aborted the run, which nobody cancelled: it is stopping") from e
                replica.failed += 1
                _raise_known(e, replica.label)
                return _failed(task, replica.label, f"{e.kind}: {e.detail}", time.monotonic() - start)
            except (ValidationError, RuntimeError) as e:  # malformed; its objects were abandoned
                replica.failed += 1
                if isinstance(e, ReplicaDown):
                    raise
                return _failed(task, replica.label, f"{type(e).__name__}: {e}", time.monotonic() - start)
            except asyncio.CancelledError:
                replica.cancelled += 1
                raise
            replica.finished += 1
        try:
            return _episode(
                found,
                run=self._run,
                request_id=request_id,
                objects=objects,
                task=task,
                replica=replica.label,
                wall_s=time.monotonic() - start,
            )
        except BadRef:
            self._abandoned(request_id, objects)
            raise

    def counts(self) -> dict[str, ReplicaCounts]:
        """Counts by replica label."""
        return {
            label: ReplicaCounts(
                alive=r.alive, in_flight=r.in_flight, finished=r.finished, failed=r.failed, cancelled=r.cancelled, deaths=r.deaths
            )
            for label, r in self._replicas.items()
        }

    @property
    def bytes_received(self) -> int:
        """Bytes of all frames from env servers."""
        return sum(c.bytes_received for r in self._replicas.values() for c in (r.client, *r.old))

    @property
    def bytes_sent(self) -> int:
        """Bytes of all frames to env servers."""
        return sum(c.bytes_sent for r in self._replicas.values() for c in (r.client, *r.old))

    async def close(self) -> None:
        """Ends runs in flight with ``ReplicaDown`` (their servers are told) and closes every connection."""
        tasks = [t for t in (self._finder, *(r.watch for r in self._replicas.values())) if t is not None]
        for t in tasks:
            t.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for r in self._replicas.values():
            r.alive = False
            r.client.fail(ReplicaDown(f"the client of replica {r.label} was closed"))
            await r.client.close()

    async def __aenter__(self) -> "EpisodeClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[_Replica]:
        """The live replica with the fewest runs in flight, one of which is the caller's for the time of the block."""
        replica: _Replica | None = None
        try:
            async with asyncio.timeout(None) as deadline, self._changed:
                while (replica := self._least()) is None:
                    alive = any(r.alive for r in self._replicas.values())
                    if alive:
                        deadline.reschedule(None)
                    elif deadline.when() is None:
                        deadline.reschedule(asyncio.get_running_loop().time() + self._wait_s)
                    await self._changed.wait()
                replica.in_flight += 1
        except TimeoutError:
            raise ReplicaDown(f"env {self._env.name!r}: no live replica for {self._wait_s:g} s") from None
        try:
            yield replica
        finally:
            replica.in_flight -= 1
            self._notify_soon()

    def _least(self) -> _Replica | None:
        free = [r for r in self._replicas.values() if r.alive and r.in_flight < self._env.concurrent_max]
        return min(free, key=lambda r: r.in_flight) if free else None

    def _notify_soon(self) -> None:
        """Wakes waiters without an await, so that a slot can be given back while its holder is being cancelled."""
        task = asyncio.get_running_loop().create_task(self._notify())
        _running.add(task)
        task.add_done_callback(_running.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _find(self) -> None:
        """Connects to replicas as their address files appear or change, and anew to one that was given up and lives."""
        while True:
            try:
                found = await asyncio.to_thread(find, self._envs_dir, split=self._env.split, name=self._env.name)
            except OSError:  # the next look will do; what was not seen is not withdrawn
                await asyncio.sleep(_POLL_S)
                continue
            for replica in self._replicas.values():
                if replica.alive and replica.label not in {record.label for _, record in found}:
                    self._withdrawn(replica)
            for _, record in found:
                known = self._replicas.get(record.label)
                if known is not None and known.record == record and known.watch is not None and not known.watch.done():
                    continue
                if not stale(record, run_uuid=self._run_uuid, attempt=self._attempt):
                    await self._replace(record)
            await asyncio.sleep(_POLL_S)

    def _withdrawn(self, replica: _Replica) -> None:
        """It stopped, or its launcher saw it dead: on another node that is seen here long before enough health checks are missed."""
        if replica.watch is not None:
            replica.watch.cancel()
        self._down(replica, "its address was withdrawn")

    async def _replace(self, record: Address) -> None:
        known = self._replicas.get(record.label)
        if known is None:
            self._connect(record.label, record.address, record)
            return
        if known.watch is not None:
            known.watch.cancel()
        self._down(known, "it is connected to anew")
        await known.client.close()
        known.old.append(known.client)
        known.client = WireClient(record.address, session=self._session, abandoned=self._abandoned)
        known.address, known.record = record.address, record
        known.watch = asyncio.create_task(self._watch(known))

    def _connect(self, label: str, address: str, record: Address | None) -> None:
        replica = _Replica(label, address, WireClient(address, session=self._session, abandoned=self._abandoned), record)
        self._replicas[label] = replica
        replica.watch = asyncio.create_task(self._watch(replica))

    async def _watch(self, replica: _Replica) -> None:
        """Keeps ``alive`` true to the facts: a process that is gone is down at once, a silent one after ``misses_max`` checks."""
        missed = 0
        while True:
            if replica.record is not None and gone(replica.record):
                self._down(replica, f"its process {replica.record.pid} is gone")
                return  # a successor publishes a new record
            if await replica.client.health(timeout=self._env.health_s):
                missed = 0
                if not replica.alive:
                    replica.alive = True
                    await self._notify()
            else:
                missed += 1
                if missed >= self._env.misses_max:
                    self._down(replica, f"{missed} health checks of {self._env.health_s:g} s missed")
            await asyncio.sleep(_POLL_S)

    def _down(self, replica: _Replica, why: str) -> None:
        if replica.alive:
            replica.alive = False
            replica.deaths += 1
        replica.client.fail(ReplicaDown(f"env server {replica.label} at {replica.address} is down: {why}"))
        self._notify_soon()


_running: set[asyncio.Task[None]] = set()
"""Strong references to fire-and-forget tasks; the loop holds weak ones only."""

_KNOWN: Final = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, FsrefError) and kind is not FsrefError
}


def _raise_known(refused: ServerRefused, label: str) -> None:
    """Raises the server's error again if it is one of this package: a failure of the run's machinery, not of the episode."""
    kind = _KNOWN.get(refused.kind)
    if kind is not None:
        raise kind(f"{refused.detail} (env server {label})") from refused


def _failed(task: Task, replica: str, error: str, wall_s: float) -> Episode:
    return Episode(request_id="", replica=replica, task=task, ok=False, errors=(error,), traces=(), samples=(), objects={}, wall_s=wall_s)


def _episode(found: Any, *, run: str, request_id: str, objects: Mapping[str, int], task: Task, replica: str, wall_s: float) -> Episode:
    traces = tuple(trace_result(t) for t in found.traces)
    samples = tuple(s for t in found.traces for s in branch_samples(t, run=run)) if found.ok else ()
    named = {o for s in samples if s.ref is not None for o in s.ref.object_ids}
    if not named <= set(objects):
        raise BadRef(f"episode of request {request_id}: references name {sorted(named - set(objects))[:3]}, which the reply does not list")
    own = tuple(f"{e.type}: {e.message}" for e in found.errors)
    return Episode(
        request_id=request_id,
        replica=replica,
        task=task,
        ok=bool(found.ok),
        errors=own + tuple(e for t in traces for e in t.errors),
        traces=traces,
        samples=samples,
        objects=objects,
        wall_s=wall_s,
    )
