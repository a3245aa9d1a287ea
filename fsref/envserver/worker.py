"""One env-server worker: verifiers' server, which keeps the arrays of every train episode before its reply leaves.

Where it hooks in (verifiers.md of the design names the failure that each guards against; docs/env-servers.md has the table):

- ``env.run_slot`` of the server's environment: traces are known from their first moment, and the finished episode is kept while its
  stream of deltas is still open, so that references leave in the last one;
- ``_run``: whatever ends a request without a reply gives its objects up; the reply's head lists them;
- ``frontend.send_multipart``: hands the right to the client exactly when the reply goes to the transport, takes it back if that refuses,
  and cancels the run of a client that is gone;
- ``_handle``: a cancel that comes after the reply is a nack; a new orchestrator's session, in a health check, a run or a word of the
  broker, ends the incarnation and begins another (``sessions``).

Owns that wiring. What to keep is ``payloads``, how ``keep``, who may remove the ledger's holder.
"""

import asyncio
import functools
import logging
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import msgpack
import zmq
from verifiers.v1.serve.delta import unpack
from verifiers.v1.serve.server import EnvServer

from fsref.config import parse
from fsref.envserver.keep import KeepJob, Kept
from fsref.envserver.payloads import branch_payload
from fsref.envserver.resources import Resources, Settings, model_folder, section
from fsref.envserver.sessions import Sessions
from fsref.envserver.tokenizer import warm
from fsref.episodes.branches import KEY, Branch, head_of, info_of, training_branches
from fsref.episodes.session import Hello, read_hello
from fsref.errors import ConfigError, Fenced, FsrefError, JournalPoisoned, StoreError
from fsref.refs import Payload, PayloadRef

logger = logging.getLogger(__name__)


@dataclass
class _Request:
    """One run request while it is served."""

    request_id: str
    traces: list[str] = field(default_factory=list)
    """Every trace minted for it, those of abandoned attempts too."""
    job: KeepJob | None = None
    objects: dict[str, int] = field(default_factory=dict)


_request: ContextVar[_Request] = ContextVar("fsref_request")
_hello: ContextVar["Hello | ConfigError | None"] = ContextVar("fsref_hello", default=None)
END_S: Final = 30.0
"""How long cancelled runs and the writes under way may take to end when a new session begins; after that the worker stops."""


class KeepingServer(EnvServer):  # type: ignore[misc]  # verifiers is untyped
    """A lone server, or one worker of a pool."""

    settings: ClassVar[Settings]
    """Set by ``install`` before verifiers makes a server."""
    live: ClassVar["KeepingServer | None"] = None
    failed: ClassVar[FsrefError | None] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._warm()
        super().__init__(*args, **kwargs)
        self._own = Resources.open(self.settings, worker=worker_index(self.address))
        self._unsent: dict[str, _Request] = {}
        self._session = Sessions(self._own, self._end_all)
        self._active: dict[str, asyncio.Task[Any]] = {}
        """Runs that were admitted, by request id."""
        self._puts: set[Future[Kept]] = set()
        type(self).live = self
        self.env.run_slot = functools.partial(self._run_slot, self.env.run_slot)
        self.frontend.send_multipart = functools.partial(self._send, self.frontend.send_multipart)

    def _warm(self) -> None:
        """Before the socket binds: a pool's broker queues requests until then."""
        config = parse(self.settings.config_json)
        warm(model_folder(config), torch=section(config, self.settings.env).torch)

    @classmethod
    def run_server(cls, address_queue: Any = None, **kwargs: Any) -> None:
        """Serves until SIGTERM. Raises the ledger's error that made it stop, so that the process ends with a failure."""
        try:
            super().run_server(address_queue=address_queue, **kwargs)
        finally:
            if cls.live is not None:
                cls.live.close()
        if cls.failed is not None:
            raise cls.failed

    def close(self) -> None:
        """Ends threads, drops what was never sent, closes the journal."""
        self._own.close()

    async def _run_slot(self, inner: Any, slot: Any, ctx: Any, *args: Any, on_trace: Any = None, **kwargs: Any) -> Any:
        request = _request.get()

        def minted(trace: Any) -> None:
            request.traces.append(trace.id)
            self._own.capture.open(trace.id)
            if on_trace is not None:
                on_trace(trace)

        try:
            episode = await inner(slot, ctx, *args, on_trace=minted, **kwargs)
            await self._keep(request, episode)
        finally:
            self._own.capture.forget(request.traces)
        return episode

    async def _keep(self, request: _Request, episode: Any) -> None:
        for trace in episode.traces:
            failure = self._own.capture.failure(trace.id)
            if failure is not None and not trace.ok:
                raise failure
        if not episode.ok:
            return
        request.job = KeepJob(functools.partial(self._payloads, episode.traces), self._own.writer, self._own.holder)
        try:
            put = request.job.start(self._own.writers)
            self._puts.add(put)
            put.add_done_callback(self._puts.discard)
            kept = await asyncio.wrap_future(put)
        except asyncio.CancelledError:
            request.job.give_up()
            raise
        except (JournalPoisoned, Fenced) as e:
            self._stop(e)
            raise
        for trace in episode.traces:
            refs = {index: ref for (trace_id, index), ref in kept.items() if trace_id == trace.id}
            if refs:
                trace.info[KEY] = info_of(self._own.run.run, refs)
        request.objects = _objects(list(kept.values()))

    def _payloads(self, traces: list[Any]) -> Iterator[tuple[Branch, Payload]]:
        """In a thread: the branches that train, with what their turns carried. A branch without arrays is left out if none are needed."""
        own = self._own
        needed = tuple(n for n in own.config.run.fields if n in {f.name for f in own.run.schema.fields})
        for trace in traces:
            for branch in training_branches(trace):
                payload = branch_payload(own.capture, branch, schema=own.run.schema, needed=needed, missing=own.config.run.missing)
                if payload.fields:
                    yield branch, payload

    async def _run(self, req: Any, client_id: bytes, request_id: bytes) -> Any:
        request = _Request(request_id.decode())
        await self._admit()
        task = asyncio.current_task()
        assert task is not None
        self._active[request.request_id] = task
        task.add_done_callback(lambda _: self._active.pop(request.request_id, None))
        token = _request.set(request)
        try:
            response = await super()._run(req, client_id, request_id)
        except BaseException:
            self._give_up(request)
            raise
        finally:
            _request.reset(token)
        if request.objects:
            response.head = {**(response.head or {}), KEY: head_of(request.objects)}
            self._unsent[request.request_id] = request
        return response

    async def _handle(self, client_id: bytes, request_id: bytes, method: bytes, payload: bytes) -> None:
        if method in (b"health", b"run", b"session"):
            hello = _read(payload)
            _hello.set(hello)
            if isinstance(hello, Hello) and method != b"run":
                await self._hear(hello)
            if method == b"session":
                return  # from our broker, which waits for no answer
        if method == b"cancel" and (target := cancel_target(payload)) and target not in self._running:
            self._nack(target)
        await super()._handle(client_id, request_id, method, payload)

    async def _admit(self) -> None:
        """A run waits until its session is the current one. Raises ``ConfigError`` for a client of another version, ``Fenced`` for an
        orchestrator that was declared dead.
        """
        hello = _hello.get()
        if isinstance(hello, ConfigError):
            raise hello
        if hello is None:
            raise ConfigError(
                "the run names no session: this env server keeps arrays and serves fsref's orchestrator and eval command only"
            )
        try:
            await self._session.enter(hello)
        except (JournalPoisoned, StoreError) as e:
            self._stop(e)
            raise

    async def _hear(self, hello: Hello) -> None:
        for request_id in hello.acks:
            self._own.holder.delivered(request_id)
        try:
            await self._session.enter(hello)
        except Fenced as e:
            logger.warning("%s", e)
        except (JournalPoisoned, StoreError) as e:
            self._stop(e)

    async def _end_all(self) -> None:
        """Cancels every admitted run and waits until none can keep any more: then, and only then, the incarnation may end."""
        tasks = set(self._active.values())
        for task in tasks:
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=END_S)
            if late:
                raise StoreError(f"{len(late)} runs of the session before did not end within {END_S:g} s of their cancel")
        if self._puts:
            _, busy = await asyncio.to_thread(wait, set(self._puts), END_S)
            if busy:
                raise StoreError(f"{len(busy)} writes of the session before did not end within {END_S:g} s")
        for request in self._unsent.values():
            self._give_up(request)
        self._unsent.clear()

    async def _send(self, inner: Any, frames: list[Any], *args: Any, **kwargs: Any) -> Any:
        request_id, kind = bytes(frames[1]).decode(), bytes(frames[2])
        request = self._unsent.pop(request_id, None) if kind == b"reply" else None
        if request is not None:
            if unpack(frames[3]).get("success"):
                self._own.holder.sent(request_id, request.objects)
            else:  # verifiers could not encode the reply and sends an error in its place
                self._give_up(request)
                request = None
        try:
            return await inner(frames, *args, **kwargs)
        except zmq.ZMQError:
            if request is not None:
                self._nack(request_id)
            elif kind == b"delta" and (task := self._running.get(request_id)) is not None:
                task.cancel()  # the client is gone: nobody will take this episode
            raise

    def _nack(self, request_id: str) -> None:
        """The client will never surface this reply."""
        if (request := self._unsent.pop(request_id, None)) is not None:
            self._give_up(request)
            return
        try:
            count = self._own.holder.nack(request_id)
        except (JournalPoisoned, Fenced) as e:
            self._stop(e)
            return
        if count:
            logger.info("request %s: its client gave the reply up, %d objects are removed", request_id, count)

    def _give_up(self, request: _Request) -> None:
        if request.job is None:
            return
        try:
            request.job.give_up()
        except (JournalPoisoned, Fenced) as e:
            self._stop(e)

    def _stop(self, error: FsrefError) -> None:
        """This process must neither keep nor remove any more."""
        logger.error("this worker stops: %s", error)
        if type(self).failed is None:
            type(self).failed = error
            os.kill(os.getpid(), signal.SIGTERM)


def _read(payload: bytes) -> "Hello | ConfigError | None":
    """What a request says about its session; an error is kept for the run's own reply."""
    try:
        return read_hello(payload)
    except ConfigError as e:
        return e


def worker_index(address: str) -> int:
    """A pool's worker listens on ``ipc://.../<index>``; a lone server, which is its own only worker, on TCP."""
    return int(address.rsplit("/", 1)[-1]) if address.startswith("ipc://") else 0


def cancel_target(payload: bytes) -> str:
    """The request id that a cancel names; empty if the payload is no cancel (verifiers answers that)."""
    try:
        found = msgpack.unpackb(payload, raw=False)
    except (msgpack.UnpackException, ValueError):
        return ""
    target = found.get("request_id") if isinstance(found, dict) else None
    return target if isinstance(target, str) else ""


def _objects(refs: list[PayloadRef]) -> dict[str, int]:
    return {s.object_id: s.byte_count for ref in refs for s in ref.segments}
