"""A real vLLM for tests: started as the inference role starts it, with the capture plugin of ``tools/``."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsref.config import build
from fsref.inference.external import Installed, environment
from tests.inference.processes import Role, role, write_config
from tests.support.ports import free_port

PYTHON = os.environ.get("FSREF_VLLM_PYTHON", "")
"""An interpreter that has vLLM's CPU build 0.27.1; without it the tests are skipped."""
ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "tools" / "vllm_cpu_capture"
NEEDS_VLLM = pytest.mark.skipif(not PYTHON, reason="needs real vLLM: set FSREF_VLLM_PYTHON to an interpreter that has it")
VLLM_MARKS = [pytest.mark.vllm, pytest.mark.timeout(600), NEEDS_VLLM]


def install_plugin(folder: Path) -> Path:
    """The plugin in a folder of its own, for PYTHONPATH."""
    source = shutil.copytree(PLUGIN, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    argv = [PYTHON, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(folder / "plugin"), str(source)]
    subprocess.run(argv, check=True)
    return folder / "plugin"


def python_path(plugin: Path) -> str:
    """The plugin before whatever this process was given."""
    return os.pathsep.join(filter(None, (str(plugin), os.environ.get("PYTHONPATH", ""))))


def vllm_environment(plugin: Path) -> dict[str, str]:
    """For a process that imports vLLM, fsref and the tests."""
    config = build({"run": {"fields": ["routed_experts", "top_logprobs"]}})
    out = environment(config, Installed(version="0.27.1", cpu=True, plugins=()), os.environ)
    return {**out, "PYTHONPATH": os.pathsep.join((str(ROOT), python_path(plugin)))}


@contextlib.contextmanager
def serve_vllm(folder: Path, model: Path, *, dtype: str = "bfloat16", context_max: int = 256, args: tuple[str, ...] = ()) -> Iterator[Role]:
    """The inference role with vLLM in its place, serving while the context is open."""
    config = write_config(
        folder / "config.json",
        model,
        free_port(),
        run={"fields": ["routed_experts", "top_logprobs"]},
        sampling={"top_k": -1},
        inference={
            "kind": "vllm",
            "python": PYTHON,
            "env": {"PYTHONPATH": python_path(install_plugin(folder))},
            "dtype": dtype,
            "context_max": context_max,
            "args": list(args),
        },
    )
    with role(config) as running:
        yield running
