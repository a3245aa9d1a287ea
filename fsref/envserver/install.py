"""Puts fsref's server and broker in the place of verifiers', in each process of a replica.

``serve_env`` calls its ``log_setup`` first thing in the broker, in a lone server and in every spawned worker, and looks the classes up as
globals of its module afterwards. That call is the one way in; nothing of verifiers is copied.
"""

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any, Final

import verifiers.v1.serve.pool as pool_module
import verifiers.v1.serve.server as server_module

from fsref.config import parse
from fsref.envserver.broker import KeepingPool
from fsref.envserver.resources import Settings, section
from fsref.envserver.worker import KeepingServer
from fsref.episodes.source import plugin_id
from fsref.redact import guard_logging

ARRAYS: Final = ("routed_experts", "sampling_mask", "top_logprobs")
"""Fields of a node that never cross the wire, whoever put them there."""

_CHATTY: Final = ("httpx", "aiohttp.access")
"""Loggers that write a line for every model call."""


def install(settings: Settings) -> None:
    """Use as ``log_setup=functools.partial(install, settings)``. Calling it again changes nothing but the settings."""
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    if not logging.getLogger().handlers:
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s")
    guard_logging()
    table = section(parse(settings.config_json), settings.env)
    for name in filter(None, (table.taskset, table.env_id)):
        plugin_id(name)  # a spawned worker resolves it right after this call
    KeepingServer.settings = settings
    pool_module.EnvServer = KeepingServer
    pool_module.EnvServerPool = KeepingPool
    if not isinstance(server_module.pack, _StrippingPack):
        server_module.pack = _StrippingPack(server_module.pack)


class _StrippingPack:
    """verifiers' ``pack`` for deltas, without arrays."""

    def __init__(self, inner: Callable[[Any], bytes]) -> None:
        self._inner = inner
        functools.update_wrapper(self, inner)

    def __call__(self, delta: Any) -> bytes:
        return self._inner(strip(delta))


def strip(delta: Any) -> Any:
    """``delta`` without array fields of its nodes and without repairs of such arrays; changed in place."""
    if isinstance(delta, dict):
        for node in delta.get("nodes") or ():
            for name in ARRAYS:
                node.pop(name, None)
        delta.pop("routing_repairs", None)
    return delta
