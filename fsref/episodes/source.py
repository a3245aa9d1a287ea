"""From fsref's config to verifiers' objects: environment config, tasks, clients, sampling.

Owns what both sides of the wire must agree on. Refuses to load models or tokenizers: it only names them.
"""

import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from fsref.config import EnvSection, SamplingSection
from fsref.errors import ConfigError

try:
    from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
    from verifiers.v1.configs.sampling import SamplingConfig
    from verifiers.v1.utils.loaders import load_taskset, resolve_env_config
except ImportError as _error:
    from fsref.errors import MissingExtra

    raise MissingExtra.of("verifiers", "verifiers") from _error


@dataclass(frozen=True)
class Task:
    """One row of a taskset."""

    index: int
    """Position in the taskset's own order."""
    key: str
    """Stable identity; equal tasks of two loads have equal keys."""
    data: Mapping[str, Any]
    """JSON-able, as an env server takes it."""


@dataclass(frozen=True)
class Target:
    """Who samples an episode."""

    base_url: str
    """``http://host:port`` of inference, without ``/v1``."""
    model: str
    """The name that inference serves."""
    tokenizer: str
    """Model folder with the tokenizer that env servers render prompts with."""
    kind: Literal["train", "eval"] = "train"
    """``eval`` relays chat requests: no token ids, no arrays. Evaluations of the policy use ``train`` as well."""
    by_node: Mapping[str, str] = field(default_factory=dict)
    """``base_url`` for env servers on nodes that have an inference server of their own."""


def plugin_id(name: str) -> str:
    """The id under which verifiers finds a module in this process. It takes top-level names only, so a dotted one gets an alias.

    Call it in every process that resolves the id; the name is imported. Raises ``ImportError``.
    """
    if "." not in name:
        return name
    alias = name.replace(".", "_").lower()
    sys.modules.setdefault(alias, importlib.import_module(name))
    return alias


def env_config(env: EnvSection) -> Any:
    """verifiers' environment config for a source; seats without a runtime run in subprocesses of the env server.

    Raises ``ConfigError`` if the taskset or environment is unknown or its settings are wrong.
    """
    try:
        data: dict[str, Any] = {**env.env_args, "taskset": {**env.args, "id": plugin_id(env.taskset)}}
        if env.env_id:
            data["id"] = plugin_id(env.env_id)
        else:
            data["agent"] = {"runtime": {"type": "subprocess"}, **data.get("agent", {})}
        return resolve_env_config(data)
    except (ValidationError, ImportError, AttributeError, TypeError, ValueError) as e:
        raise ConfigError(f"env {env.name!r}: taskset {env.taskset!r} cannot be set up: {e}") from e


def load_tasks(env: EnvSection, *, limit: int | None = None) -> Iterator[Task]:
    """The tasks of a source in the taskset's own order, at most ``limit``; raises ``ConfigError``."""
    taskset = load_taskset(env_config(env).taskset)
    for task in islice(iter(taskset), limit):
        yield Task(index=int(task.data.idx), key=str(task.key), data=task.data.model_dump(mode="json", exclude_none=True))


def sampling_values(section: SamplingSection, fields: Sequence[str], *, seed: int | None = None) -> dict[str, Any]:
    """What is sent with every request. A top-k head is asked for only where the run has the field ``top_logprobs``.

    Raises ``ConfigError`` if the run needs heads and asks for none.
    """
    values: dict[str, Any] = {
        "temperature": section.temperature,
        "top_p": section.top_p,
        "top_k": section.top_k,
        "min_p": section.min_p,
        "max_tokens": section.tokens_max,
    }
    if "top_logprobs" in fields:
        if not section.top_logprobs:
            raise ConfigError("run.fields names top_logprobs but sampling.top_logprobs is 0: set it to the size of the head")
        values["logprobs"] = section.top_logprobs
    if seed is not None:
        values["seed"] = seed
    return values


def sampling_config(values: Mapping[str, Any]) -> Any:
    """verifiers' form of ``sampling_values``; other keys pass through to the engine."""
    return SamplingConfig.model_validate(dict(values))


def client_config(target: Target, *, node: str = "") -> Any:
    """verifiers' form of a target, for an env server on ``node``. No credentials travel: the engine is inside the run."""
    base = {"base_url": f"{target.by_node.get(node, target.base_url).rstrip('/')}/v1", "api_key_var": "FSREF_NO_KEY"}
    if target.kind == "eval":
        return EvalClientConfig.model_validate({"type": "eval", **base})
    return TrainClientConfig.model_validate(
        {"type": "train", **base, "renderer_model_name": target.tokenizer, "renderer": renderer_for(target.tokenizer)}
    )


def renderer_for(folder: str) -> dict[str, str] | None:
    """The renderer that extends a Qwen3 conversation token by token; ``None`` leaves the choice to verifiers.

    verifiers decides by the model's public name, which a local folder does not have: it would fall back to a renderer that
    starts a new branch at every turn.
    """
    try:
        model_type = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")).get("model_type", "")
    except (OSError, ValueError):
        return None
    return {"name": "qwen3", "thinking_retention": "all"} if str(model_type).startswith("qwen3") else None
