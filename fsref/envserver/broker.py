"""The broker of a replica with several workers: verifiers' pool, plus what its workers must hear and what ends it.

verifiers' broker answers a cancel of a finished run itself, drops replies to clients that are gone in silence, ends with an error when a
client leaves right after a health check or a cancel, and never notices that a worker died: runs on it would wait for ever. Here the
worker that served a request is remembered; a late cancel, or a client that is gone, reaches it as a cancel, which it reads as a nack;
a new orchestrator's session is told to every worker, an acknowledgement to the one that kept;
and the death of any worker stops the whole replica.

Owns that. Refuses to remove objects: only the worker that kept them, or its adopter, may.
"""

import logging
import os
import signal
import threading
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from typing import Any, ClassVar, Final

import msgpack
import zmq
from verifiers.v1.serve.pool import EnvServerPool

from fsref.envserver.worker import cancel_target
from fsref.episodes.session import control, read_hello
from fsref.errors import ConfigError

logger = logging.getLogger(__name__)

REQUESTS_MAX: Final = 65_536
"""Requests whose worker is remembered; what falls out is settled by adoption (ledger.md section 5)."""


SESSIONS_MAX: Final = 256
"""Sessions that are known to have been told."""


@dataclass
class _Served:
    dealer: Any
    replied: bool = False
    client_gone: bool = False


class KeepingPool(EnvServerPool):  # type: ignore[misc]  # verifiers is untyped
    """A broker over ``KeepingServer`` processes."""

    dead: ClassVar[str] = ""
    """Why the replica stopped itself; empty if it did not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sessions: dict[str, None] = {}
        self._served: OrderedDict[bytes, _Served] = OrderedDict()
        self._stopping = threading.Event()
        self.frontend.send_multipart = partial(self._send, self.frontend.send_multipart)
        self.frontend.recv_multipart = partial(self._receive, self.frontend.recv_multipart)

    def _spawn_worker(self) -> None:
        super()._spawn_worker()
        worker = self.workers[-1]
        dealer = worker["dealer"]
        dealer.send_multipart = partial(self._dispatch, dealer, dealer.send_multipart)
        threading.Thread(target=self._watch, args=(worker["process"],), name="fsref-watch", daemon=True).start()

    def _shutdown(self) -> None:
        self._stopping.set()
        super()._shutdown()

    async def _dispatch(self, dealer: Any, inner: Any, frames: list[bytes], *args: Any, **kwargs: Any) -> Any:
        if frames[1] == b"run":
            self._served[frames[0]] = _Served(dealer)
            while len(self._served) > REQUESTS_MAX:
                self._served.popitem(last=False)
        return await inner(frames, *args, **kwargs)

    async def _receive(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        frames = await inner(*args, **kwargs)
        if len(frames) == 4 and frames[2] in (b"health", b"run"):
            await self._hear(frames[3])
        if len(frames) == 4 and frames[2] == b"cancel":
            target = cancel_target(frames[3]).encode()
            served = self._served.get(target)
            if served is not None and served.replied:  # before that, verifiers forwards it
                await _tell(served, target)
        return frames

    async def _hear(self, payload: bytes) -> None:
        """A new session is told to every worker, an acknowledgement to the one that kept."""
        try:
            hello = read_hello(payload)
        except ConfigError as e:
            logger.warning("%s", e)  # the worker that gets such a run refuses it
            return
        if hello is None:
            return
        if hello.owns_workers and hello.session not in self._sessions:
            self._sessions[hello.session] = None
            while len(self._sessions) > SESSIONS_MAX:
                del self._sessions[next(iter(self._sessions))]
            for worker in self.workers:
                await worker["dealer"].send_multipart([uuid.uuid4().hex.encode(), b"session", control(hello.session)])
        taken: dict[Any, list[str]] = {}
        for request_id in hello.acks:
            served = self._served.pop(request_id.encode(), None)
            if served is not None:
                taken.setdefault(served.dealer, []).append(request_id)
        for dealer, acks in taken.items():
            await dealer.send_multipart([uuid.uuid4().hex.encode(), b"session", control(hello.session, acks)])

    async def _send(self, inner: Any, frames: list[Any], *args: Any, **kwargs: Any) -> Any:
        request_id, kind = _bytes(frames[1]), _bytes(frames[2])
        served = self._served.get(request_id)
        if served is not None and kind == b"reply":
            served.replied = True
        try:
            return await inner(frames, *args, **kwargs)
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise
            # Not raised: verifiers guards its sends of worker frames, but not its own answers to health checks and cancels, and a
            # client that left right after asking would end the broker.
            if served is not None and not served.client_gone:
                served.client_gone = True
                await _tell(served, request_id)
            return None

    def _watch(self, process: Any) -> None:
        wait([process.sentinel])
        if self._stopping.is_set():
            return
        process.join()
        type(self).dead = f"worker process {process.pid} ended with exit code {process.exitcode}"
        logger.error("%s: this replica stops", self.dead)
        os.kill(os.getpid(), signal.SIGTERM)


async def _tell(served: _Served, request_id: bytes) -> None:
    """Cancels a request at its worker; the answer finds no pending request in the broker and is ignored."""
    payload = msgpack.packb({"request_id": request_id.decode()}, use_bin_type=True)
    await served.dealer.send_multipart([uuid.uuid4().hex.encode(), b"cancel", payload])


def _bytes(frame: Any) -> bytes:
    return frame.bytes if isinstance(frame, zmq.Frame) else frame
