"""vLLM's side of the other way to adapt: an ASGI middleware that rewrites generate replies into the form that verifiers reads.

    python -m vllm.entrypoints.openai.api_server --middleware fsref.inference.middleware.RoutedExpertsMiddleware ...

With it a verifiers server without fsref reads routing from vLLM: ``routed_experts`` becomes ``{"data", "shape", "dtype", "start"}``.
vLLM's own form lacks the start, so it is taken from the request. fsref's env servers read both forms and do not need it.

Owns that rewriting, in a thread. Passes everything else through as it came: other paths, errors, streams, replies without routing. Refuses
a reply whose routing it cannot read with status 502, never a wrong array. Needs neither vLLM nor an ASGI framework.
"""

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from fsref.errors import WireError
from fsref.wire.npy import decode_npy
from fsref.wire.routing import Routing, packed_routed_experts
from fsref.wire.splice import replace_routing
from fsref.wire.text import decode_base64

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

PATH: Final = "/inference/v1/generate"
REQUEST_BYTES_MAX: Final = 256 << 20
"""Of a request body; a million token ids are about 7 MB."""


class RoutedExpertsMiddleware:
    """Wraps an ASGI application."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body, messages = await _request(receive)
        if body is None:
            await _answer(send, 413, f"the request is larger than {REQUEST_BYTES_MAX} bytes")
            return
        reply = _Reply(send, _start_of(body))
        await self.app(scope, _again(messages, receive), reply)


async def _request(receive: Receive) -> tuple[bytes | None, list[Message]]:
    """The whole body, and the messages that carried it; None for one that is too large."""
    parts: list[bytes] = []
    messages: list[Message] = []
    while True:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request":
            return b"".join(parts), messages
        parts.append(message.get("body", b""))
        if sum(map(len, parts)) > REQUEST_BYTES_MAX:
            return None, messages
        if not message.get("more_body"):
            return b"".join(parts), messages


def _again(messages: list[Message], receive: Receive) -> Receive:
    """Hands out the messages that were read, then the rest."""
    waiting = iter(messages)

    async def receive_again() -> Message:
        found = next(waiting, None)
        return await receive() if found is None else found

    return receive_again


def _start_of(body: bytes) -> int | None:
    """The request's ``routed_experts_prompt_start``; None where the request is none that vLLM would accept."""
    try:
        sampling = json.loads(body).get("sampling_params") or {}
        start = sampling.get("routed_experts_prompt_start") or 0
    except (ValueError, AttributeError):
        return None
    return start if type(start) is int else None


class _Reply:
    """The application's ``send``: holds a JSON reply back until it is whole, then sends it rewritten."""

    def __init__(self, send: Send, start: int | None) -> None:
        self._send, self._start = send, start
        self._head: Message | None = None
        self._parts: list[bytes] = []

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and self._rewrites(message):
            self._head = message
        elif message["type"] == "http.response.body" and self._head is not None:
            self._parts.append(message.get("body", b""))
            if not message.get("more_body"):
                await self._finish(self._head)
        else:
            await self._send(message)

    def _rewrites(self, message: Message) -> bool:
        headers = {bytes(k).lower(): bytes(v) for k, v in message.get("headers", ())}
        plain = headers.get(b"content-type", b"").startswith(b"application/json") and b"content-encoding" not in headers
        return self._start is not None and message["status"] == 200 and plain

    async def _finish(self, head: Message) -> None:
        raw = b"".join(self._parts)
        try:
            body = await asyncio.to_thread(packed_reply, raw, start=self._start or 0)
        except WireError as e:
            await _answer(self._send, 502, str(e))
            return
        headers = [(k, v) for k, v in head.get("headers", ()) if bytes(k).lower() != b"content-length"]
        await self._send({**head, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await self._send({"type": "http.response.body", "body": body})


def packed_reply(raw: bytes, *, start: int) -> bytes:
    """A reply's JSON with every choice's routing in verifiers' form. Raises ``WireError`` for routing that cannot be read."""
    return replace_routing(raw, functools.partial(_packed, start=start))


def _packed(text: memoryview, *, start: int) -> bytes:
    """verifiers' form of one array: ``data`` first and no blanks, because its client cuts the text out at these bytes."""
    rows = decode_npy(decode_base64(text, what="routed_experts"), what="routed_experts")
    return json.dumps(packed_routed_experts(Routing(rows, start)), separators=(",", ":")).encode()


async def _answer(send: Send, status: int, text: str) -> None:
    body = json.dumps({"error": {"message": f"fsref: {text}", "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
