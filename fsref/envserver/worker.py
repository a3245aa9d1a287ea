"""One env-server worker: verifiers' server, which keeps the arrays of every train episode before its reply leaves.

Where it hooks in (verifiers.md of the design names the failure that each guards against; docs/env-servers.md has the table):

- ``env.run_slot`` of the server's environment: traces are known from their first moment, and the finished episode is kept while its
  stream of deltas is still open, so that references leave in the last one;
- ``_run``: whatever ends a request without a reply gives its objects up; the reply's head lists them;
- ``frontend.send_multipart``: hands the right to the client exactly when the reply goes to the transport, takes it back if that refuses,
  and cancels the run of a client that is gone;
- ``_handle``: a cancel that comes after the reply is a nack.

Owns that wiring. What to keep is ``payloads``, how ``keep``, who may remove the ledger's holder.
"""

import asyncio
import functools
import logging
import os
import signal
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgpack
import zmq
from verifiers.v1.serve.delta import unpack
from verifiers.v1.serve.server import EnvServer

from fsref.config import parse
from fsref.envserver.keep import KeepJob
from fsref.envserver.payloads import branch_payload
from fsref.envserver.resources import Resources, Settings, model_folder, section
from fsref.envserver.tokenizer import warm
from fsref.episodes.branches import KEY, Branch, head_of, info_of, training_branches
from fsref.errors import Fenced, FsrefError, JournalPoisoned
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
            kept = await asyncio.get_running_loop().run_in_executor(self._own.writers, request.job.run)
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
        if method == b"cancel" and (target := cancel_target(payload)) and target not in self._running:
            self._nack(target)
        await super()._handle(client_id, request_id, method, payload)

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
