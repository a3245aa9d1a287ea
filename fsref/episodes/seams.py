"""Which names of verifiers and renderers fsref builds on, and the check that they are what it expects.

verifiers moves quickly and has no episode hook, so fsref uses public seams where there are some and a few inner names where there
are none. All of them are listed here; a version in which one is gone or takes other arguments is refused before anything runs,
not in the middle of an episode. docs/env-servers.md says what each is used for.
"""

import importlib
import inspect
import re
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from fsref.errors import ConfigError, MissingExtra

VERSION_MIN: Final = "0.4.1.dev86"
"""The first version whose nodes carry all three fields and whose client streams numpy tokens."""

# module, dotted name, parameters that must be there (for classes: of __init__)
_CALLABLES: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    (
        "verifiers.v1.serve.pool",
        "serve_env",
        ("max_workers", "address", "address_queue", "death_pipe", "log_setup", "elastic", "server_kwargs"),
    ),
    (
        "verifiers.v1.serve.pool",
        "EnvServerPool",
        ("server_kwargs", "max_workers", "address", "log_setup", "multiplex", "elastic"),
    ),
    ("verifiers.v1.serve.pool", "EnvServerPool._spawn_worker", ()),
    ("verifiers.v1.serve.pool", "EnvServerPool._shutdown", ()),
    ("verifiers.v1.serve.server", "EnvServer", ("config", "address", "max_concurrent")),
    ("verifiers.v1.serve.server", "EnvServer.run_server", ("address_queue", "kwargs")),
    ("verifiers.v1.serve.server", "EnvServer._run", ("req", "client_id", "request_id")),
    ("verifiers.v1.serve.server", "EnvServer._handle", ("client_id", "request_id", "method", "payload")),
    ("verifiers.v1.serve.server", "pack", ()),
    ("verifiers.v1.serve.client", "EnvClient", ("address",)),
    ("verifiers.v1.serve.client", "EnvClient.run", ("client", "model", "sampling", "task_data", "on_delta")),
    ("verifiers.v1.serve.client", "EnvClient.health", ("timeout",)),
    ("verifiers.v1.serve.client", "EnvClient.close", ()),
    ("verifiers.v1.serve.client", "EnvClient._request", ("request", "response_type", "timeout", "on_delta")),
    ("verifiers.v1.serve.client", "EnvClient._send_cancel", ("run_request_id",)),
    ("verifiers.v1.env", "Env.run_slot", ("slot", "ctx", "semaphore", "on_complete", "on_trace")),
    ("verifiers.v1.trace", "Trace.branches", ()),
    ("verifiers.v1.utils.loaders", "resolve_env_config", ("data",)),
    ("verifiers.v1.utils.loaders", "load_taskset", ("config",)),
    ("renderers.base", "load_tokenizer", ("model_name_or_path",)),
    ("renderers.client", "generate", ("client", "model", "prompt_ids", "sampling_params", "extra_headers")),
)
_FIELDS: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    (
        "verifiers.v1.graph",
        "MessageNode",
        ("parent", "sampled", "token_ids", "mask", "logprobs", "routed_experts", "sampling_mask", "top_logprobs", "weight_versions"),
    ),
    ("verifiers.v1.trace", "Trace", ("id", "nodes", "calls", "rewards", "metrics", "info", "ok", "dropped", "errors", "agent")),
    ("verifiers.v1.trace", "AgentInfo", ("name", "trainable")),
    ("verifiers.v1.trace", "Branch", ("index", "nodes", "trainable")),
    ("verifiers.v1.episode", "Episode", ("ok", "errors", "traces")),
    ("verifiers.v1.serve.types", "HealthRequest", ()),
    ("verifiers.v1.serve.types", "RunRequest", ("task_data", "client", "model", "sampling")),
    ("verifiers.v1.serve.types", "RunResponse", ("head", "traces", "success", "error")),
    ("verifiers.v1.configs.client", "TrainClientConfig", ("type", "base_url", "renderer", "renderer_model_name", "api_key_var")),
)


@cache
def check_seams() -> None:
    """Raises ``MissingExtra`` without verifiers, ``ConfigError`` if it is older than ``VERSION_MIN`` or changed a used name."""
    try:
        found = version("verifiers")
    except PackageNotFoundError:
        raise MissingExtra.of("verifiers", "verifiers") from None
    check_version(found)
    problems = [p for module, name, needed in _CALLABLES for p in _check_callable(module, name, needed)]
    problems += [p for module, name, needed in _FIELDS for p in _check_fields(module, name, needed)]
    if problems:
        raise ConfigError(
            f"verifiers {found} is installed, and fsref was built on {VERSION_MIN}; these names changed: {'; '.join(problems)}. "
            f"Install verifiers=={VERSION_MIN}, or a newer fsref"
        )


def check_version(found: str) -> None:
    """Raises ``ConfigError`` if ``found`` is older than ``VERSION_MIN``."""
    if _order(found) < _order(VERSION_MIN):
        raise ConfigError(
            f"verifiers {found} is installed, at least {VERSION_MIN} is needed (older ones lose top-k heads): "
            f"pip install --pre 'verifiers>={VERSION_MIN},<0.5'"
        )


_VERSION: Final = re.compile(r"(\d+(?:\.\d+)*)(?:(a|b|rc)(\d+))?(?:\.post\d+)?(?:\.dev(\d+))?(?:\+.*)?", re.ASCII)
_STAGE: Final = {"a": 1, "b": 2, "rc": 3}


def _order(text: str) -> tuple[tuple[int, ...], int, int, int]:
    """A key in the order of PEP 440 for the forms that verifiers publishes: releases, a/b/rc and dev."""
    match = _VERSION.fullmatch(text)
    if match is None:
        raise ConfigError(f"the installed verifiers calls itself {text!r}, which is not a version")
    release, stage, stage_number, dev = match.groups()
    numbers = tuple(int(n) for n in release.split("."))
    rank = _STAGE[stage] if stage else (0 if dev else 4)
    return numbers + (0,) * (4 - len(numbers)), rank, int(stage_number or 0), int(dev) if dev else 1 << 60


def _find(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _check_callable(module: str, name: str, needed: Iterable[str]) -> list[str]:
    try:
        found = _find(module, name)
    except (ImportError, AttributeError):
        return [f"{module}.{name} is gone"]
    if isinstance(found, property):
        return []
    if not callable(found):
        return [f"{module}.{name} is no function or class"]
    missing = [p for p in needed if p not in inspect.signature(found).parameters]
    return [f"{module}.{name} takes no {', '.join(missing)}"] if missing else []


def _check_fields(module: str, name: str, needed: Iterable[str]) -> list[str]:
    try:
        fields = _find(module, name).model_fields
    except (ImportError, AttributeError):
        return [f"{module}.{name} is gone"]
    missing = [f for f in needed if f not in fields]
    return [f"{module}.{name} has no field {', '.join(missing)}"] if missing else []
