"""A real vLLM, started by the role: its routed experts are those of a fresh prefill, also after new weights.

This one has the middleware, so that every reply here says where its rows start; ``tests/envserver/test_vllm.py`` reads the native form.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsref.inference.model import make_model
from fsref.wire.modelconfig import read_model_shape
from fsref.wire.reply import Choice, decode_choice
from tests.inference.processes import Role
from tests.inference.vllm import PYTHON, VLLM_MARKS, install_plugin, serve_vllm, vllm_environment

PROMPT = [(7 * n + 3) % 512 for n in range(40)]

pytestmark = VLLM_MARKS


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("model", "step_000001")):
        make_model(root / name, seed=seed)
    return root / "model", root / "step_000001"


@pytest.fixture(scope="module")
def served(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Role]:
    args = ("--middleware", "fsref.inference.middleware.RoutedExpertsMiddleware")
    with serve_vllm(tmp_path_factory.mktemp("vllm"), folders[0], args=args) as running:
        yield running


def generate(served: Role, folder: Path, ids: list[int], **params: Any) -> Choice:
    body = {"model": "policy", "token_ids": ids, "sampling_params": {"temperature": 1.0, "logprobs": 10, **params}}
    response = served.client.post("/inference/v1/generate", json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["routed_experts"]["start"] == params.get("routed_experts_prompt_start", 0)
    return decode_choice(choice, prompt_count=len(ids), head=8, model=read_model_shape(folder))


def rows(choice: Choice) -> Any:
    """Expert sets by row: vLLM's slots within a row have no order."""
    assert choice.routing is not None
    return np.sort(choice.routing.rows, axis=-1)


def assert_rows_are_a_prefills(served: Role, folder: Path) -> Choice:
    sampled = generate(served, folder, PROMPT, max_tokens=24, ignore_eos=True, seed=11)
    fresh = generate(served, folder, [*PROMPT, *sampled.token_ids.tolist()], max_tokens=1)
    got = rows(sampled)
    assert got.shape == (63, 4, 4)
    different = (got != rows(fresh)[:63]).any(axis=(1, 2))
    assert different.mean() < 0.1  # decoding and prefilling round differently
    return sampled


def test_rows_are_those_of_a_fresh_prefill_before_and_after_a_reload(served: Role, folders: tuple[Path, Path]) -> None:
    before = assert_rows_are_a_prefills(served, folders[0])
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folders[1])}}
    assert served.client.post("/collective_rpc", json=body).status_code == 200
    assert served.client.post("/reset_prefix_cache").status_code == 200
    after = assert_rows_are_a_prefills(served, folders[1])
    assert (rows(before)[:40] != rows(after)[:40]).mean() > 0.5


def test_a_start_cuts_the_rows_and_heads_have_eight_entries(served: Role, folders: tuple[Path, Path]) -> None:
    whole = generate(served, folders[0], PROMPT, max_tokens=4, seed=1, ignore_eos=True)
    part = generate(served, folders[0], PROMPT, max_tokens=4, seed=1, ignore_eos=True, routed_experts_prompt_start=39)
    assert rows(whole).shape == (43, 4, 4)
    np.testing.assert_array_equal(rows(part)[0], rows(whole)[39])
    assert part.top_logprobs is not None
    assert np.all(part.top_logprobs.counts <= 8)
    assert part.top_logprobs.counts.sum() > 0
    assert part.sampling_mask is None


def test_it_stops_on_sigterm(served: Role) -> None:
    served.stop()
    assert served.process.poll() is not None


def test_outputs_of_an_engine_in_the_same_process_are_stored_and_read_back(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """No HTTP: ``payload_from_output``, writer and reader in vLLM's own process."""
    argv = [PYTHON, "-m", "tests.inference.inprocess", str(folders[0]), str(tmp_path / "root"), str(tmp_path / "outcome.json")]
    done = subprocess.run(
        argv, env=vllm_environment(install_plugin(tmp_path)), capture_output=True, text=True, timeout=500, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "outcome.json").read_text())
    assert found == {"completions": 3, "tokens": [30, 30, 40], "rows_equal": 97, "rows_missing": 3, "heads": 8 * (10 + 10 + 20)}
