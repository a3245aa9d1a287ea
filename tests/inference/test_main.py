"""The role as a process: it serves verifiers' own client, stops on a signal, and fails with one line."""

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fsref.errors import ConfigError
from fsref.inference.main import split_address
from fsref.wire.modelconfig import read_model_shape
from fsref.wire.routing import decode_routed_experts
from tests.inference.processes import Role, role, write_config
from tests.support.ports import free_port


@pytest.fixture(scope="module")
def demo(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Role]:
    config = write_config(
        tmp_path_factory.mktemp("demo") / "config.json", model_folder, free_port(), sampling={"top_k": 16, "top_logprobs": 16}
    )
    with role(config) as running:
        yield running


def test_renderers_own_client_reads_masks_heads_and_routing(demo: Role, model_folder: Path) -> None:
    from openai import AsyncOpenAI
    from renderers import create_renderer
    from renderers.base import load_tokenizer
    from renderers.client import generate
    from renderers.configs import Qwen3RendererConfig

    renderer = create_renderer(load_tokenizer(str(model_folder)), Qwen3RendererConfig(thinking_retention="all"))

    async def run() -> Any:
        async with (
            httpx.AsyncClient(trust_env=False) as http,
            AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="none", http_client=http) as client,
        ):
            return await generate(
                client=client,
                renderer=renderer,
                messages=[{"role": "user", "content": "one plus two"}],
                model="policy",
                sampling_params={"temperature": 1.0, "top_k": 16, "min_p": 0.0, "logprobs": 16, "max_tokens": 12},
            )

    got = asyncio.run(run())
    count = len(got["completion_ids"])
    assert 1 <= count <= 12
    assert [len(row) for row in got["completion_top_ids"]] == [16] * count
    assert [sorted(row) for row in got["sampling_mask"]] == [sorted(row) for row in got["completion_top_ids"]]
    assert got["weight_versions"] == [{"version": "0", "start": 0, "end": count}]
    tokens = len(got["prompt_ids"]) + count
    routing = decode_routed_experts(got["routed_experts"], start=0, token_count=tokens, model=read_model_shape(model_folder))
    assert routing is not None
    assert len(routing.rows) == tokens - 1


def test_what_it_logs_in_bfloat16_is_nearly_what_a_prefill_routes(demo: Role) -> None:
    """Decoding over the cache and prefilling differ in rounding only, so that few rows may differ."""
    prompt = list(range(20, 60))

    def ask(ids: list[int], tokens_max: int) -> tuple[list[int], Any]:
        body = {"token_ids": ids, "sampling_params": {"max_tokens": tokens_max, "ignore_eos": True, "seed": 4}}
        (choice,) = demo.client.post("/inference/v1/generate", json=body).json()["choices"]
        routing = decode_routed_experts(choice["routed_experts"], start=0, token_count=len(ids) + tokens_max)
        assert routing is not None
        return choice["token_ids"], np.sort(routing.rows, axis=-1)

    completion, rows = ask(prompt, 100)
    _, fresh = ask([*prompt, *completion], 1)
    assert (rows == fresh[: len(rows)]).mean() > 0.95


def test_sigterm_ends_open_requests_with_503_and_the_process_with_0(model_folder: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.json", model_folder, free_port(), inference={"context_max": 1 << 16, "concurrent_max": 2})
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 1 << 15, "n": 4, "ignore_eos": True}}
    with role(config) as running:
        statuses: list[int] = []

        def long() -> None:
            statuses.append(httpx.post(f"{running.url}/inference/v1/generate", json=body, timeout=120, trust_env=False).status_code)

        thread = threading.Thread(target=long)
        thread.start()
        while running.client.get("/load").json() != {"server_load": 4}:
            assert thread.is_alive()
        assert running.stop(signal.SIGTERM) == 0
        thread.join(120)
        assert statuses == [503]
        assert "Traceback" not in running.log.read_text()


def test_a_taken_port_and_a_missing_model_end_it_with_one_line(model_folder: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, model, word in (("a", model_folder, "cannot listen"), ("b", tmp_path / "absent", "config.json")):
            config = write_config(tmp_path / f"{name}.json", model, port if name == "a" else free_port())
            with role(config, wait=False) as running:
                assert running.process.wait(60) != 0
                text = running.log.read_text()
                assert word in text
                assert "Traceback" not in text


@pytest.mark.parametrize("address", ["", "127.0.0.1:80", "https://127.0.0.1:80", "http://127.0.0.1", "http://h:x", "http://h:1/v1"])
def test_addresses_of_another_form_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"inference\.address"):
        split_address(address)


def test_an_address_is_host_and_port() -> None:
    assert split_address("http://127.0.0.1:8000") == ("127.0.0.1", 8000)
    assert split_address("http://[::1]:8000/") == ("::1", 8000)
