"""A real vLLM in this process's place: its command line, its environment, and the checks that come before it starts.

Owns the flags that make vLLM return what a run needs, and the knowledge which versions can. Refuses a version whose wire forms were never
read, and a CPU build without the capture plugin, which would die at start, or answer zeros, instead of returning routed experts.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

import msgspec

from fsref.config import Config
from fsref.errors import ConfigError, MissingExtra

SERIES: Final = ("0.27", "0.32")
"""vLLM series whose replies ``fsref.wire`` reads. 0.27.1 (CPU) is run by the tests; the forms of 0.32 were taken from its source."""
MASKS_SINCE: Final = (0, 32)
PLUGIN: Final = "cpu_capture"
"""Entry point of ``tools/vllm_cpu_capture`` in the group ``vllm.general_plugins``."""

_PROBE: Final = """
import importlib.metadata as m, json
versions = {}
for name in ("vllm", "vllm-cpu"):
    try: versions[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps({"versions": versions, "plugins": [e.name for e in m.entry_points(group="vllm.general_plugins")]}))
"""
PROBE_S_MAX: Final = 60.0


class Installed(msgspec.Struct, frozen=True):
    """The vLLM that an interpreter has."""

    version: str
    cpu: bool
    plugins: tuple[str, ...]

    @property
    def release(self) -> tuple[int, ...]:
        """(major, minor) for comparisons."""
        parts = self.version.split("+")[0].split(".")
        return tuple(int(p) for p in parts[:2] if p.isdigit())


def exec_vllm(config: Config, *, host: str, port: int, logprobs_max: int) -> NoReturn:
    """Replaces this process by vLLM's server. Raises ``ConfigError`` or ``MissingExtra`` if it could not serve what the run needs."""
    python = config.inference.python or sys.executable
    installed = find_vllm(python, {**os.environ, **config.inference.env})
    check(config, installed)
    argv = [python, *arguments(config, installed, host=host, port=port, logprobs_max=logprobs_max)]
    os.execve(python, argv, environment(config, installed, os.environ))  # noqa: S606  (no shell is meant)


def find_vllm(python: str, env: Mapping[str, str]) -> Installed:
    """Asks the interpreter which vLLM it has, without importing it. Raises ``MissingExtra`` if none, ``ConfigError`` if it cannot run."""
    try:
        done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_S_MAX, check=True, env=env)
    except (OSError, subprocess.SubprocessError) as e:
        raise ConfigError(f"inference.python {python!r} does not run: {e}") from e
    found = json.loads(done.stdout)
    return installed_from(found["versions"], found["plugins"])


def installed_from(versions: Mapping[str, str], plugins: Sequence[str]) -> Installed:
    """From the distributions found; ``vllm-cpu`` is the CPU build's own name. Raises ``MissingExtra``."""
    if not versions:
        raise MissingExtra.of("vllm", "vllm-cpu")
    cpu = "vllm-cpu" in versions or "+cpu" in versions["vllm"]
    return Installed(version=versions.get("vllm-cpu") or versions["vllm"], cpu=cpu, plugins=tuple(plugins))


def check(config: Config, installed: Installed) -> None:
    """Raises ``ConfigError`` if this vLLM does not return the run's fields, or returns logprobs that the trainer could not match."""
    fields = config.run.fields
    if not any(installed.version == s or installed.version.startswith(f"{s}.") for s in SERIES):
        raise ConfigError(
            f"vLLM {installed.version} is installed; the wire forms of {' and '.join(SERIES)} are known: install one of these"
        )
    if installed.cpu and "routed_experts" in fields and PLUGIN not in installed.plugins:
        raise ConfigError(
            f"vLLM {installed.version} is a CPU build, which returns routed experts only with the capture plugin: "
            "pip install --no-build-isolation tools/vllm_cpu_capture, in vLLM's environment"
        )
    if installed.cpu and "routed_experts" in fields and installed.release >= MASKS_SINCE:
        raise ConfigError(f"the CPU build of vLLM {installed.version} cannot return routed experts; 0.27.1 can")
    if "sampling_mask" in fields and (installed.cpu or installed.release < MASKS_SINCE):
        raise ConfigError(
            f"run.fields asks for sampling_mask, which this vLLM ({installed.version}{', CPU' if installed.cpu else ''}) cannot return: "
            "drop it and sample without truncation (sampling.top_k = -1, top_p = 1, min_p = 0), or use a GPU build from 0.32 on"
        )
    sampling = config.sampling
    truncates = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    if truncates and "sampling_mask" not in fields:
        raise ConfigError(
            "sampling truncates (top_k, top_p or min_p) but run.fields lacks sampling_mask: the sampler's logprobs would be normalised "
            "over sets that the trainer cannot know; set sampling.top_k = -1, top_p = 1, min_p = 0"
        )


def arguments(config: Config, installed: Installed, *, host: str, port: int, logprobs_max: int) -> list[str]:
    """Everything behind the interpreter. ``config.inference.args`` come last, so they win."""
    out = ["-m", "vllm.entrypoints.openai.api_server", "--model", config.model.path, "--served-model-name", config.model.name]
    out += ["--host", host, "--port", str(port), "--seed", str(config.run.seed), "--dtype", config.inference.dtype]
    out += ["--max-model-len", str(config.inference.context_max), "--max-num-seqs", str(config.inference.concurrent_max)]
    # Of the distribution that was sampled from; and no sampling default from the model's folder behind the caller's back.
    out += ["--max-logprobs", str(logprobs_max), "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    if "routed_experts" in config.run.fields:
        out.append("--enable-return-routed-experts")
    if "sampling_mask" in config.run.fields:
        out.append("--return-sampling-mask")
    if installed.cpu:
        out.append("--enforce-eager")
    return [*out, *config.inference.args]


def environment(config: Config, installed: Installed, inherited: Mapping[str, str]) -> dict[str, str]:
    """The inherited environment with what the run needs; ``config.inference.env`` wins over all."""
    out = dict(inherited)
    out["VLLM_SERVER_DEV_MODE"] = "1"  # collective_rpc and reset_prefix_cache, by which new weights arrive
    out |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if installed.cpu:
        out.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        out.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        out["OMP_NUM_THREADS"] = str(config.inference.threads)
    return out | config.inference.env
