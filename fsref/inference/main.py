"""The inference role: ``main`` serves until SIGTERM or SIGINT, as the demo server or as a real vLLM.

Owns the socket, the signals and the exit: 0 after a signal, ``RoleFailed`` if the engine dies under it.
"""

import asyncio
import signal
import socket
from pathlib import Path
from types import FrameType
from typing import Final
from urllib.parse import urlsplit

from fsref.config import Config
from fsref.errors import ConfigError, MissingExtra, RoleFailed
from fsref.inference.demo import DemoServer, version_of
from fsref.inference.engine import Engine
from fsref.inference.external import exec_vllm
from fsref.inference.network import read_architecture, read_weights
from fsref.inference.protocol import Limits

try:
    import torch
    import uvicorn
except ImportError as e:
    raise MissingExtra.of("demo", (e.name or "uvicorn").partition(".")[0]) from e

KEEP_ALIVE_S: Final = 3600
"""Idle connections stay open: one that the server closes while its client sends the next request looks like a failed request."""
STOP_S: Final = 5
LOGPROBS_DEFAULT: Final = 20
"""vLLM's own default of ``--max-logprobs``."""


def logprobs_max(config: Config) -> int:
    """Top-k entries that a request may ask for: clients ask two more than they keep, see ``fsref.wire.logprobs``."""
    return max(LOGPROBS_DEFAULT, config.sampling.top_logprobs + 2)


def main(config: Config) -> None:
    """Serves ``config.model.path`` at ``config.inference.address`` until a signal; does not return for vLLM, which takes the process over.

    Raises ``ConfigError`` (model, address, version of vLLM), ``MissingExtra``, ``RoleFailed``.
    """
    host, port = split_address(config.inference.address)
    if config.inference.kind == "vllm":
        exec_vllm(config, host=host, port=port, logprobs_max=logprobs_max(config))
    torch.set_num_threads(config.inference.threads)
    with bind(host, port) as listener:
        serve(config, listener)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``http://host:port``; raises ``ConfigError``."""
    try:
        url = urlsplit(address)
        host, port = url.hostname, url.port
    except ValueError as e:
        raise ConfigError(f"inference.address {address!r}: {e}") from e
    if url.scheme != "http" or not host or port is None or url.path.strip("/"):
        raise ConfigError(f"inference.address {address!r} is not of the form http://host:port")
    return host, port


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ``ConfigError`` if the address is taken or not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as e:
        listener.close()
        raise ConfigError(f"inference.address: cannot listen on {host}:{port}: {e.strerror}") from e
    return listener


def serve(config: Config, listener: socket.socket) -> None:
    """Runs the demo server on ``listener`` until a signal. Raises ``ConfigError`` for a model that it cannot serve, ``RoleFailed``."""
    folder = Path(config.model.path)
    arch = read_architecture(folder)
    dtype = torch.bfloat16 if config.inference.dtype == "bfloat16" else torch.float32
    weights = read_weights(folder, arch, dtype)
    log = _log_folder(config.inference.routes_log)
    limits = Limits(
        model=config.model.name,
        context_max=config.inference.context_max,
        vocab_count=arch.shape.vocab_count,
        logprobs_max=logprobs_max(config),
        eos_token_id=arch.eos_token_id,
        routing_weights="routing_weights" in config.run.fields,
    )
    with Engine(
        weights,
        arch,
        slots=config.inference.concurrent_max,
        context=config.inference.context_max,
        dtype=dtype,
        version=version_of(folder),
    ) as engine:
        app = DemoServer(engine, limits, folder=folder, dtype=dtype, seed=config.run.seed, routes_log=log).app
        settings = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_S,
        )
        asyncio.run(_Server(settings, engine).run_until_stopped(listener))


def _log_folder(path: str) -> Path | None:
    if not path:
        return None
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"inference.routes_log {path!r}: {e.strerror}") from e
    return folder


class _Server(uvicorn.Server):
    """uvicorn, stopped by closing the engine first: open requests then end with 503 at once instead of running to their end."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine
        self._signalled = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  (uvicorn's signature)
        """SIGTERM or SIGINT. Not passed on to uvicorn, which would raise the signal again after shutdown: a stop on demand exits with 0."""
        self.force_exit = self._signalled and sig == signal.SIGINT
        self._signalled = True
        self.should_exit = True

    async def run_until_stopped(self, listener: socket.socket) -> None:
        """Serves until a signal; raises ``RoleFailed`` if the engine ended without one."""
        serving = asyncio.ensure_future(self.serve(sockets=[listener]))
        ended = asyncio.wrap_future(self._engine.ended)
        watch = asyncio.ensure_future(self._watch(ended))
        await serving
        watch.cancel()
        if not self._signalled:
            raise RoleFailed("the inference engine died; its traceback is in the log above")

    async def _watch(self, ended: "asyncio.Future[None]") -> None:
        """Ends the server with the engine, and the engine with the server."""
        while not self.should_exit and not ended.done():
            await asyncio.wait((ended,), timeout=0.1)
        self.should_exit = True
        await asyncio.to_thread(self._engine.close)
