"""An HTTP proxy in front of a real S3 server that breaks chosen requests, and counts them all.

The ``Host`` header passes through, so signatures stay valid. Rules are matched in order by method, key, query and position; the first
that has uses left decides. Start it with the fixture ``fault_proxy``, or as a context manager.
"""

import asyncio
import contextlib
import re
import socket
import ssl
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Literal, NamedTuple, Self
from urllib.parse import unquote, urlsplit
from xml.sax.saxutils import escape, unescape

import pytest

from tests.support.s3servers import S3Server

HEAD_BYTES_MAX: Final = 1 << 16
HOLDING: Final = frozenset({"stall", "hang"})
"""Actions that tell the test when they begin to hold."""
Action = Literal[
    "status",  # answers ``status`` with the S3 error ``code``; the server never sees the request
    "reset_before",  # resets the connection; the server never sees the request
    "reset_after",  # the server does it, the connection is reset without a reply
    "lost_reply",  # the server does it, the connection is closed without a reply
    "duplicate",  # the server gets the request twice; the second reply is passed on
    "truncate",  # announces the whole body, sends ``size`` bytes of it and resets
    "short",  # announces and sends ``size`` bytes of the body as if that were all
    "flip",  # flips the lowest bit of body byte ``size``
    "key_errors",  # DeleteObjects: 200 with an Error for each key that matches ``failing``; the others are removed
    "throttle",  # sends the body in 64 pieces, at ``bytes_per_s``
    "stall",  # sends the head and ``size`` bytes of the body, then nothing until ``release``
    "hang",  # takes the request, never asks the server, answers nothing until ``release``
]


class Request(NamedTuple):
    """One request as it came."""

    method: str
    bucket: str
    key: str
    query: str
    head: bytes
    body: bytes

    @property
    def kind(self) -> str:
        """The S3 operation's short name: PUT, GET, HEAD, DELETE, LIST, DELETE_MANY, or the method with its query."""
        first = self.query.partition("&")[0].partition("=")[0]
        if self.method == "POST" and "delete" in self.query.split("&")[0]:
            return "DELETE_MANY"
        if self.method == "GET" and not self.key:
            return (
                "LIST"
                if first in {"list-type", "prefix", "delimiter", "max-keys", "continuation-token", "encoding-type"}
                else f"GET ?{first}"
            )
        return self.method


@dataclass
class Rule:
    """What to break. ``used`` counts how often it did."""

    action: Action
    kind: str | None = None
    """As ``Request.kind``; None: any."""
    key: str = ""
    """Regular expression that must be found in the key."""
    skip: int = 0
    """Matching requests that pass first."""
    times: int = 1
    """Matching requests that are broken then."""
    status: int = 503
    code: str = "SlowDown"
    size: int = 0
    failing: str = ""
    bytes_per_s: float = 1e6
    used: int = 0
    seen: int = 0

    def takes(self, request: Request) -> bool:
        """Whether this rule breaks the request; counts it."""
        if (self.kind is not None and self.kind != request.kind) or not re.search(self.key, request.key):
            return False
        self.seen += 1
        if self.seen <= self.skip or self.used >= self.times:
            return False
        self.used += 1
        return True


class Reply(NamedTuple):
    """A reply of the server, its body decoded of any transfer coding."""

    status_line: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def rendered(self, body: bytes | None = None, *, announced: int | None = None, head_only: bool = False) -> bytes:
        """The bytes to send."""
        shown = self.body if body is None else body
        kept = [(k, v) for k, v in self.headers if k.lower() not in {"content-length", "transfer-encoding", "connection"}]
        length = next((v for k, v in self.headers if k.lower() == "content-length"), None) if head_only else None
        if length is None and " 204 " not in self.status_line and " 304 " not in self.status_line:
            length = str(len(shown) if announced is None else announced)
        lines = [self.status_line, *(f"{k}: {v}" for k, v in kept), *([f"Content-Length: {length}"] if length is not None else [])]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if head_only else shown)


@dataclass
class FaultProxy:
    """The proxy: runs in a thread of its own between ``start`` and ``close``."""

    server: S3Server
    rules: list[Rule] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    """Every request, broken or not, in order of arrival; bodies left out."""
    endpoint: str = ""
    tls: ssl.SSLContext | None = None
    """Serves https with this context; the server behind is still asked in plain."""
    broken: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released once for each request that a rule broke: tests wait on it instead of sleeping."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._released = asyncio.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name="fault-proxy", daemon=True)
        self._ready = threading.Event()
        self._writers: set[asyncio.StreamWriter] = set()

    def add(self, action: Action, kind: str | None = None, **options: object) -> Rule:
        """Appends a rule; ``options`` are the fields of ``Rule``."""
        rule = Rule(action, kind, **options)  # type: ignore[arg-type]
        with self._lock:
            self.rules.append(rule)
        return rule

    def clear(self) -> None:
        """Faults off, counters at zero, whatever hangs goes on."""
        with self._lock:
            self.rules.clear()
            self.requests.clear()
        self.release()

    def release(self) -> None:
        """Lets every stalled or hanging request go: its connection is reset."""
        self._loop.call_soon_threadsafe(self._let_go)

    def counts(self, key: str = "") -> Counter[str]:
        """Requests whose key holds the expression ``key``, by ``Request.kind``."""
        with self._lock:
            return Counter(r.kind for r in self.requests if re.search(key, r.key))

    def start(self) -> Self:
        """Listens on a free loopback port."""
        self._thread.start()
        assert self._ready.wait(30), "the fault proxy did not start"
        return self

    def close(self) -> None:
        """Resets what is open and joins the thread."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive(), "the fault proxy did not stop"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _let_go(self) -> None:
        self._released.set()
        self._released = asyncio.Event()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.close()

    async def _main(self) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=HEAD_BYTES_MAX, ssl=self.tls)
        self.endpoint = f"{'https' if self.tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        self._let_go()
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(5):
            await asyncio.sleep(0)  # transports say goodbye to their sockets in the loop's next rounds

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, TimeoutError):
            while (request := await _read_request(reader, writer)) is not None:
                with self._lock:
                    self.requests.append(request._replace(body=b""))
                    rule = next((r for r in self.rules if r.takes(request)), None)
                try:
                    goes_on = await self._answer(request, rule, writer)
                finally:
                    if rule is not None and rule.action not in HOLDING:
                        self.broken.release()
                if not goes_on:
                    break
        self._writers.discard(writer)
        writer.close()

    async def _answer(self, request: Request, rule: Rule | None, writer: asyncio.StreamWriter) -> bool:
        """Answers one request; False: the connection is over."""
        head_only = request.method == "HEAD"
        if rule is None:
            writer.write((await self._upstream(request)).rendered(head_only=head_only))
        elif rule.action == "status":
            writer.write(_error(rule, request).rendered(head_only=head_only))
        elif rule.action == "key_errors":
            writer.write((await self._some_keys(request, rule)).rendered())
        elif rule.action == "duplicate":
            await self._upstream(request)
            writer.write((await self._upstream(request)).rendered(head_only=head_only))
        elif rule.action in {"reset_before", "reset_after", "lost_reply"}:
            if rule.action != "reset_before":
                await self._upstream(request)
            return _end(writer, reset=rule.action != "lost_reply")
        elif rule.action == "hang":
            return await self._hold(writer)
        else:
            return await self._bend(await self._upstream(request), rule, writer)
        await writer.drain()
        return True

    async def _bend(self, reply: Reply, rule: Rule, writer: asyncio.StreamWriter) -> bool:
        """The faults of a body."""
        body, size = reply.body, rule.size
        if rule.action == "flip":
            assert size < len(body), f"the body has {len(body)} bytes"
            writer.write(reply.rendered(body[:size] + bytes([body[size] ^ 1]) + body[size + 1 :]))
        elif rule.action == "short":
            writer.write(reply.rendered(body[:size]))
        elif rule.action == "throttle":
            writer.write(reply.rendered(b"", announced=len(body)))
            step = max(1, len(body) // 64)
            for at in range(0, len(body), step):
                writer.write(body[at : at + step])
                await writer.drain()
                await asyncio.sleep(step / rule.bytes_per_s)
        else:
            writer.write(reply.rendered(body[:size], announced=len(body)))
            await writer.drain()
            if rule.action == "truncate":
                return _end(writer, reset=False)
            return await self._hold(writer)
        await writer.drain()
        return True

    async def _hold(self, writer: asyncio.StreamWriter) -> bool:
        self.broken.release()
        await self._released.wait()
        return _end(writer, reset=True)

    async def _some_keys(self, request: Request, rule: Rule) -> Reply:
        """A DeleteObjects that fails for some keys: the proxy removes the others itself, the request's signature covers them all."""
        keys = [_unescaped(k) for k in re.findall(r"<Key>(.*?)</Key>", request.body.decode())]
        bad = [k for k in keys if re.search(rule.failing, k)]
        good = [k for k in keys if k not in set(bad)]
        if good:
            wanted = {"Objects": [{"Key": k} for k in good], "Quiet": True}
            await asyncio.to_thread(self.server.client.delete_objects, Bucket=request.bucket, Delete=wanted)
        deleted = "".join(f"<Deleted><Key>{escape(k)}</Key></Deleted>" for k in good if b"<Quiet>true" not in request.body)
        errors = "".join(f"<Error><Key>{escape(k)}</Key><Code>{rule.code}</Code><Message>asked for</Message></Error>" for k in bad)
        body = f'<?xml version="1.0"?><DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{deleted}{errors}</DeleteResult>'
        return Reply("HTTP/1.1 200 OK", (("Content-Type", "application/xml"),), body.encode())

    async def _upstream(self, request: Request) -> Reply:
        reader, writer = await asyncio.open_connection(*self.server.address, limit=HEAD_BYTES_MAX)
        try:
            writer.write(request.head + request.body)
            await writer.drain()
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            while head.startswith("HTTP/1.1 100"):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status_line, *lines = head.rstrip("\r\n").split("\r\n")
            headers = tuple((k.strip(), v.strip()) for k, _, v in (line.partition(":") for line in lines))
            bare = request.method == "HEAD" or " 204 " in f"{status_line} " or " 304 " in f"{status_line} "
            return Reply(status_line, headers, b"" if bare else await _body(reader, {k.lower(): v for k, v in headers}, to_end=True))
        finally:
            writer.close()


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
    """The next request of a connection; None at its end."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.rstrip("\r\n").split("\r\n")
    method, target, _ = first.split(" ", 2)
    headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    if "expect" in headers:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await writer.drain()
    body = await _body(reader, headers, to_end=False)
    dropped = {"connection", "expect", "transfer-encoding", "content-length"}
    kept = [line for line in lines if line.partition(":")[0].strip().lower() not in dropped]
    length = [] if method in {"GET", "HEAD"} and not body else [f"Content-Length: {len(body)}"]
    url = urlsplit(target)
    bucket, _, key = unquote(url.path).removeprefix("/").partition("/")
    head_sent = "\r\n".join([first, *kept, *length, "Connection: close"]).encode("latin-1") + b"\r\n\r\n"
    return Request(method, bucket, key, url.query, head_sent, body)


async def _body(reader: asyncio.StreamReader, headers: dict[str, str], *, to_end: bool) -> bytes:
    if "chunked" in headers.get("transfer-encoding", ""):
        parts = []
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        while (await reader.readuntil(b"\r\n")) != b"\r\n":
            pass
        return b"".join(parts)
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    return await reader.read() if to_end else b""


def _error(rule: Rule, request: Request) -> Reply:
    body = f"<Error><Code>{rule.code}</Code><Message>asked for</Message><Resource>{escape(request.key)}</Resource></Error>"
    return Reply(f"HTTP/1.1 {rule.status} {rule.code}", (("Content-Type", "application/xml"),), body.encode())


def _end(writer: asyncio.StreamWriter, *, reset: bool) -> bool:
    if reset:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close sends RST
        writer.transport.abort()
    return False


def _unescaped(text: str) -> str:
    return unescape(text, {"&quot;": '"', "&apos;": "'"})


@pytest.fixture
def fault_proxy() -> Iterator[Callable[[S3Server], FaultProxy]]:
    """Starts proxies in front of servers; they are stopped when the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda server: stack.enter_context(FaultProxy(server))
