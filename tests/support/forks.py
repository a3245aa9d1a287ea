"""Processes of tests that need torch: forked from one server per session, which has loaded what takes seconds."""

import multiprocessing
import socket
from multiprocessing.context import ForkServerContext
from typing import Final

PRELOAD: Final = [
    "tests.trainer.armed",  # before anything of fsref: failpoints are made live or not when they are first imported
    "torch._dynamo",  # optimisers import it when they are made
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "fsref.trainer.main",
    "tests.loader.rank_process",
    "tests.trainer.runs",
]


def fork_context() -> ForkServerContext:
    """Starts processes; the first one of a session starts the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
