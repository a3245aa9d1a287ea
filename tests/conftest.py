"""Options of the whole suite.

``--core`` collects only what runs with the base package and the test tools (no torch, no verifiers): other Pythons run that. A test outside
the folders below that needs torch is marked with it.
``--slow`` adds the tests that take minutes. Real vLLM runs where ``FSREF_VLLM_PYTHON`` names an interpreter that has it.
"""

from pathlib import Path

import pytest

from tests.support.faultproxy import fault_proxy
from tests.support.s3servers import moto, s3_credentials, weed

__all__ = ["fault_proxy", "moto", "s3_credentials", "weed"]  # fixtures of every test

NOT_CORE = frozenset({"costs", "envserver", "episodes", "inference", "orchestrator", "pipeline", "tensors", "loader", "trainer", "proofs"})
"""Test folders whose subject needs an extra."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--core", action="store_true", help="only tests that need no extra")
    parser.addoption("--slow", action="store_true", help="also tests that take minutes")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.getoption("--core") and NOT_CORE.intersection(collection_path.relative_to(config.rootpath / "tests").parts):
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    out_of = [*(["torch"] if config.getoption("--core") else []), *([] if config.getoption("--slow") else ["slow"])]
    left_out = {i for i in items if any(i.get_closest_marker(name) for name in out_of)}
    if left_out:
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [i for i in items if i not in left_out]
