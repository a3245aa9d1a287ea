"""One connection to one env server: verifiers' client, plus the knowledge who owns a reply's arrays.

For each request the client decides once (ledger.md section 4): the reply is taken, or the server is told to cancel, which it reads as
"the client will never surface it". In between lies a reply that arrived but is not returned (the caller was cancelled while it was
decoded, or it is malformed): verifiers sends nothing then, so its objects are handed to ``abandoned``. Duplicate and late
replies find no request and are ignored.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from fsref.episodes.branches import head_objects
from fsref.episodes.session import ACKS_MAX, Hello, with_hello
from fsref.errors import MissingExtra, ReplicaDown

try:
    import zmq
    from verifiers.v1.serve.client import EnvClient
    from verifiers.v1.serve.types import HealthRequest, HealthResponse, RunRequest
except ImportError as _error:
    raise MissingExtra.of("verifiers", "verifiers") from _error

ACKS_HELD_MAX: Final = 65_536
"""Acknowledgements that wait for the next health check; more only make the servers' gauge of unclaimed objects too high."""
Abandoned = Callable[[str, Mapping[str, int]], None]
"""Called with the request id and the objects (id to bytes) of a reply that arrived and will not be returned."""


@dataclass
class _Call:
    """What is known of one run request."""

    request_id: str = ""
    sent: bool = False
    replied: bool = False
    """A reply that reports success arrived: from here on its objects are the client's."""
    objects: dict[str, int] = field(default_factory=dict)


_call: ContextVar[_Call] = ContextVar("fsref_call")


class ServerRefused(RuntimeError):
    """The server ended the request with an error; it removed whatever it kept. ``kind`` and ``detail`` are the error's type and text."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


class _Hailed:
    """A request that says for whom."""

    def __init__(self, request: Any, hello: Hello) -> None:
        self._request, self._hello = request, hello
        self.method: str = request.method

    def model_dump(self, **kwargs: Any) -> dict[str, Any]:
        return with_hello(self._request.model_dump(**kwargs), self._hello)


class WireClient(EnvClient):  # type: ignore[misc]  # verifiers is untyped
    """A connection. Close it; use from one event loop."""

    def __init__(self, address: str, *, session: str, abandoned: Abandoned) -> None:
        """``session``: the incarnation of the consumer behind it."""
        super().__init__(address)
        self._session = session
        self._acks: deque[str] = deque(maxlen=ACKS_HELD_MAX)
        self._abandoned = abandoned
        self.bytes_sent = 0
        self.bytes_received = 0
        self._tap_socket()

    async def episode(self, *, client: Any, model: str, sampling: Any, task_data: dict[str, Any]) -> tuple[str, dict[str, int], Any]:
        """Runs one episode: request id, objects with their bytes, and verifiers' episode. The caller owns the objects on return.

        Raises ``ServerRefused``, ``ReplicaDown`` (from ``fail``), ``CancelledError``.
        """
        call = _Call()
        token = _call.set(call)
        try:
            found = await self.run(client=client, model=model, sampling=sampling, task_data=task_data)
        except BaseException:
            if call.replied:
                self._abandoned(call.request_id, call.objects)
                self._taken(call)
            raise
        finally:
            _call.reset(token)
        self._taken(call)  # by the caller, before anything else runs on this loop
        return call.request_id, call.objects, found

    def _taken(self, call: _Call) -> None:
        if call.objects:
            self._acks.append(call.request_id)

    async def health(self, timeout: float = 2.0) -> bool:
        """Whether the server answers in time.

        verifiers waits with ``asyncio.wait_for``, which until Python 3.12 loses a cancellation that comes together with the answer: the
        task that watches a replica would go on, and closing its client would wait for it for ever.
        """
        try:
            async with asyncio.timeout(timeout):
                return bool((await self._request(HealthRequest(), HealthResponse)).success)
        except TimeoutError:
            return False

    def fail(self, error: ReplicaDown) -> None:
        """Ends every request in flight with ``error`` and tells the server, should it live, that none will be taken."""
        for request_id in list(self._deltas):  # only runs stream deltas
            future = self._pending.pop(request_id, None)
            if future is not None and not future.done():
                future.set_exception(error)
                self._cancel_later(request_id)

    async def _request(self, request: Any, response_type: Any, timeout: float | None = None, on_delta: Any = None) -> Any:
        if not isinstance(request, RunRequest):
            if isinstance(request, HealthRequest):
                acks = tuple(self._acks.popleft() for _ in range(min(ACKS_MAX, len(self._acks))))
                request = _Hailed(request, Hello(session=self._session, acks=acks))
            return await super()._request(request, response_type, timeout, on_delta)
        call = _call.get()
        hailed = _Hailed(request, Hello(session=self._session))
        try:
            response = await super()._request(hailed, response_type, timeout, on_delta)
        except ReplicaDown:
            raise
        except RuntimeError as e:  # verifiers' word for a reply that reports a failure
            kind, _, detail = str(e).partition(": ")
            raise ServerRefused(kind, detail) from e
        except asyncio.CancelledError:
            if call.request_id and not call.sent:
                self._cancel_later(call.request_id)  # verifiers sends it only once the request left
            raise
        call.replied = True
        call.objects = head_objects(response.head)
        return response

    def _cancel_later(self, request_id: str) -> None:
        task = asyncio.get_running_loop().create_task(self._send_cancel(request_id))
        self._cancel_tasks.add(task)
        task.add_done_callback(self._cancel_tasks.discard)

    def _tap_socket(self) -> None:
        """Learns the id of a run request as it leaves (verifiers mints it inside), and counts bytes both ways."""
        send, receive = self.socket.send_multipart, self.socket.recv_multipart

        async def send_multipart(frames: Any, *args: Any, **kwargs: Any) -> Any:
            call = _call.get(None) if frames[1] == b"run" else None
            if call is not None:
                call.request_id = frames[0].decode()
            self.bytes_sent += sum(len(f) for f in frames)
            result = await send(frames, *args, **kwargs)
            if call is not None:
                call.sent = True
            return result

        def recv_multipart(*args: Any, **kwargs: Any) -> Any:
            future = receive(*args, **kwargs)
            future.add_done_callback(self._count)
            return future

        self.socket.send_multipart = send_multipart
        self.socket.recv_multipart = recv_multipart

    def _count(self, future: Any) -> None:
        with suppress(zmq.ZMQError, asyncio.CancelledError):
            self.bytes_received += sum(len(f) for f in future.result())
