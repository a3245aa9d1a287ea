"""Processes of tests that need torch: forked from one server per session, which has loaded what takes seconds."""

import multiprocessing
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
