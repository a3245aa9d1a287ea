"""The demo server: HTTP in front of the engine, in vLLM's native wire form.

Routes: ``POST /inference/v1/generate``, ``GET /v1/models``, ``GET /health``, ``GET /load`` (sequences that run or wait), and of vLLM's
development API ``POST /collective_rpc`` (``reload_weights``) and ``POST /reset_prefix_cache`` (no prefix is cached: nothing to do).
A client that hangs up takes its sequences out of the batch. With ``routes_log`` the server writes each completion's tokens and
experts to a file of its own, so that a later check of router replay does not rest on what travelled through the pipeline.
"""

import asyncio
import itertools
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from fsref.errors import ConfigError, MissingExtra
from fsref.inference.engine import Completion, Engine, EngineStopped, Request
from fsref.inference.network import read_weights
from fsref.inference.protocol import CHOICES_MAX, BadRequest, Limits, engine_requests, error_body, parse_generate, reply

try:
    import torch
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as e:
    raise MissingExtra.of("demo", (e.name or "starlette").partition(".")[0]) from e

BODY_BYTES_MAX: Final = 64 << 20
_JSON: Final = "application/json"
_STEP_FOLDER: Final = re.compile(r"step_([0-9]+)")


def version_of(folder: str | Path, current: str = "") -> str:
    """The label of the weights in ``folder``: N of ``step_N``, else one more than ``current``, else ``"0"``."""
    match = _STEP_FOLDER.fullmatch(Path(folder).name)
    if match is not None:
        return str(int(match[1]))
    return str(int(current) + 1) if current else "0"


class DemoServer:
    """The HTTP application; ``app`` is ASGI. It does not own the engine: whoever made that closes it."""

    def __init__(
        self, engine: Engine, limits: Limits, *, folder: Path, dtype: torch.dtype, seed: int, routes_log: Path | None = None
    ) -> None:
        """``seed`` decides the draws of requests that bring no seed of their own, in order of arrival."""
        self._engine = engine
        self._limits = limits
        self._folder = folder
        self._dtype = dtype
        self._seeds = itertools.count(seed << 32, CHOICES_MAX)  # choice i of a request draws by its seed plus i
        self._ids = itertools.count()
        self._routes_log = routes_log
        self._boot = f"{time.time_ns():x}"  # files of an earlier process in the same folder stay
        self.app = Starlette(
            routes=[
                Route("/inference/v1/generate", self._generate, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/load", self._load, methods=["GET"]),
                Route("/collective_rpc", self._collective_rpc, methods=["POST"]),
                Route("/reset_prefix_cache", self._reset_prefix_cache, methods=["POST"]),
            ]
        )

    async def _generate(self, http: HttpRequest) -> Response:
        try:
            parsed = parse_generate(await _body(http), self._limits)
            requests = engine_requests(parsed, self._limits, seed=next(self._seeds))
            completions = await self._complete(http, requests)
        except BadRequest as e:
            return _error(str(e), e.kind, e.status)
        except EngineStopped as e:
            return _error(str(e), "ServiceUnavailableError", 503)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        request_id = parsed.request_id or f"generate-tokens-{next(self._ids):08d}"
        if self._routes_log is not None:
            await asyncio.to_thread(self._log_routes, request_id, requests, completions)
        body = await asyncio.to_thread(reply, request_id, self._limits, len(parsed.token_ids), completions)
        return Response(body, media_type=_JSON)

    async def _complete(self, http: HttpRequest, requests: Sequence[Request]) -> list[Completion]:
        """Waits for all choices; if the client hangs up first they leave the batch and ``ClientDisconnect`` is raised."""
        waits = [asyncio.wrap_future(self._engine.submit(r)) for r in requests]
        work = asyncio.ensure_future(asyncio.wait(waits))
        gone = asyncio.ensure_future(_disconnected(http))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientDisconnect
            return [w.result() for w in waits]
        finally:
            gone.cancel()
            work.cancel()
            for wait in waits:
                if not wait.cancel() and not wait.cancelled():
                    wait.exception()  # seen: one choice's failure was raised for all

    def _log_routes(self, request_id: str, requests: Sequence[Request], completions: Sequence[Completion]) -> None:
        assert self._routes_log is not None
        for index, (request, done) in enumerate(zip(requests, completions, strict=True)):
            path = self._routes_log / f"{self._boot}-{next(self._ids):08d}.npz"
            np.savez(
                path,
                request_id=np.array(request_id),
                choice=np.array(index),
                prompt_count=np.array(len(request.prompt)),
                start=np.array(request.start),
                token_ids=np.concatenate([np.asarray(request.prompt, dtype=np.int32), done.token_ids]),
                routes=done.routes,
                versions=np.array([(int(v.version), v.start, v.stop) for v in done.versions], dtype=np.int64),
            )

    async def _models(self, _: HttpRequest) -> Response:
        card = {
            "id": self._limits.model,
            "object": "model",
            "owned_by": "fsref",
            "root": str(self._folder),
            "max_model_len": self._limits.context_max,
            "weights_version": self._engine.version,
        }
        return Response(msgspec.json.encode({"object": "list", "data": [card]}), media_type=_JSON)

    async def _health(self, _: HttpRequest) -> Response:
        return Response(status_code=200 if self._engine.alive else 503)

    async def _load(self, _: HttpRequest) -> Response:
        return Response(msgspec.json.encode({"server_load": self._engine.load}), media_type=_JSON)

    async def _reset_prefix_cache(self, _: HttpRequest) -> Response:
        return Response(status_code=200)

    async def _collective_rpc(self, http: HttpRequest) -> Response:
        try:
            folder = _reload_folder(await _body(http), self._folder)
            weights = await asyncio.to_thread(read_weights, folder, self._engine.arch, self._dtype)
            await asyncio.wrap_future(self._engine.reload(weights, version_of(folder, self._engine.version)))
        except (BadRequest, ConfigError) as e:
            return _error(str(e), "BadRequestError", 400)
        except EngineStopped as e:
            return _error(str(e), "ServiceUnavailableError", 503)
        return Response(msgspec.json.encode({"results": [None]}), media_type=_JSON)


class _Call(msgspec.Struct, frozen=True):
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


def _reload_folder(body: bytes, default: Path) -> Path:
    try:
        call = msgspec.json.decode(body, type=_Call)
    except (msgspec.ValidationError, msgspec.DecodeError) as e:
        raise BadRequest(str(e)) from e
    if call.method != "reload_weights" or call.args or set(call.kwargs) - {"weights_path"}:
        raise BadRequest(f"collective_rpc {call.method!r}: the demo server has reload_weights with the keyword weights_path only")
    return Path(str(call.kwargs.get("weights_path") or default))


async def _body(http: HttpRequest) -> bytes:
    parts = bytearray()
    async for chunk in http.stream():
        parts += chunk
        if len(parts) > BODY_BYTES_MAX:
            raise BadRequest(f"the request body is larger than {BODY_BYTES_MAX} bytes")
    return bytes(parts)


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _error(message: str, kind: str, status: int) -> Response:
    return Response(error_body(message, kind, status), status_code=status, media_type=_JSON)
