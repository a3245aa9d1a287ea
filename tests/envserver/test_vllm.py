"""The real env server on a real vLLM: every row that is stored is the row of a fresh prefill of the same tokens.

One vLLM (CPU build 0.27.1, a tiny Qwen3-MoE in float32, capture plugin) and one replica with two workers serve all tests. Runs where
``FSREF_VLLM_PYTHON`` names an interpreter that has vLLM.
"""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from fsref.episodes import BranchSample, Episode
from fsref.episodes.client import EpisodeClient
from fsref.inference.model import make_model
from fsref.plan import missing_ranges
from fsref.reader import Reader
from fsref.refs import Dense, Ragged, Schema, TokenRange, routed_experts, top_logprobs
from fsref.wire.modelconfig import ModelShape, read_model_shape
from fsref.wire.reply import Choice, decode_choice
from tests.envserver.support import Run, make_run, source, task, until, with_client
from tests.inference.vllm import VLLM_MARKS, serve_vllm

pytestmark = VLLM_MARKS
HEAD = 8
FINAL_ONLY = 2
"""vLLM's RequestOutputKind: without it a reply lacks choices that ended at another time than the last."""
LONG = "please write only vowels: " + "hello world " * 40
"""Longer than a block of vLLM's cache, which is 128 tokens on a CPU."""
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 12, "logprobs": HEAD}


class Served:
    """The engine and its model."""

    def __init__(self, url: str, model: Path) -> None:
        self.url, self.model = url, model
        self.shape: ModelShape = read_model_shape(model)
        self.http = httpx.Client(base_url=url, trust_env=False, timeout=120)

    def generate(self, ids: list[int], **params: Any) -> list[Choice]:
        body = {"model": "policy", "token_ids": ids, "sampling_params": {"temperature": 1.0, "logprobs": 1, **params}}
        response = self.http.post("/inference/v1/generate", json=body)
        assert response.status_code == 200, response.text
        head = HEAD if params.get("logprobs", 1) > HEAD else None
        return [decode_choice(c, prompt_count=len(ids), head=head, model=self.shape) for c in response.json()["choices"]]

    def prefill(self, ids: NDArray[np.int32]) -> NDArray[Any]:
        """Rows [T, L, K] of a prefill without any cache, experts in ascending order: vLLM's slots within a row have none."""
        assert self.http.post("/reset_prefix_cache").status_code == 200
        (choice,) = self.generate(ids.tolist(), max_tokens=1)
        assert choice.routing is not None
        assert len(choice.routing.rows) == len(ids)
        return np.sort(choice.routing.rows, axis=-1)

    def metric(self, name: str) -> float:
        text = self.http.get("/metrics").text
        return sum(float(v) for v in re.findall(rf"^vllm:{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("vllm")
    make_model(root / "model", seed=3)
    with serve_vllm(root, root / "model", dtype="float32", context_max=1024) as running:
        found = Served(running.url, root / "model")
        with found.http:
            yield found


@pytest.fixture(scope="module")
def schema(served: Served) -> Schema:
    shape = served.shape
    return Schema((routed_experts(layer_ids=shape.layer_ids, top_k=shape.top_k, expert_count=shape.expert_count), top_logprobs()))


@pytest.fixture(scope="module")
def vllm_run(served: Served, schema: Schema, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("run")
    run = make_run(folder, served, envs=(source("pool", workers=2),), schema=schema, model=served.model)
    run.start("pool")
    yield run
    run.stop()


def episodes(run: Run, *tasks: dict[str, Any]) -> list[Episode]:
    """All at once, so that both workers have some."""

    async def body(client: EpisodeClient) -> list[Episode]:
        return list(await asyncio.gather(*(client.run(task(**t), target=run.target, sampling=SAMPLING) for t in tasks)))

    found: list[Episode] = with_client(run, "pool", body)
    for episode in found:
        assert episode.ok, episode.errors
    return found


def read(run: Run, schema: Schema, sample: BranchSample) -> tuple[Dense, Ragged]:
    assert sample.ref is not None
    with Reader(run.store, schema) as reader:
        fields = reader.read(sample.ref)
    routing, heads = fields["routed_experts"], fields["top_logprobs"]
    assert isinstance(routing, Dense)
    assert isinstance(heads, Ragged)
    return routing, heads


def check_rows(served: Served, run: Run, schema: Schema, sample: BranchSample) -> None:
    """Every stored row is the prefill's; only the last token's is missing."""
    assert sample.ref is not None
    count = len(sample.token_ids)
    assert missing_ranges(sample.ref, schema) == {"routed_experts": (TokenRange(count - 1, count),)}
    routing, _ = read(run, schema, sample)
    np.testing.assert_array_equal(np.sort(routing.rows[: count - 1], axis=-1), served.prefill(sample.token_ids)[: count - 1])


@pytest.mark.payload("A3", "A5")
def test_rows_of_conversations_with_turns_and_forks_are_a_prefills(served: Served, vllm_run: Run, schema: Schema) -> None:
    """Two workers, bridged turns, prefix-cache hits: each row as if the branch had been run at once."""
    hits = served.metric("prefix_cache_hits_total")
    found = episodes(
        vllm_run,
        *({"prompt": LONG, **t} for t in ({"turns": 3}, {"turns": 2, "fork": True}, {"turns": 2, "fork": True})),
        {"turns": 1},
        {"turns": 3},
    )
    assert [len(e.samples) for e in found] == [1, 2, 2, 1, 1]
    assert served.metric("prefix_cache_hits_total") > hits, "later turns were to hit the cache"
    producers = {o.split("/")[0] for e in found for o in e.objects}
    assert len(producers) == 2, "both workers kept something"
    for sample in [s for e in found for s in e.samples]:
        check_rows(served, vllm_run, schema, sample)


@pytest.mark.payload("E10", "A20")
def test_heads_are_those_of_a_fresh_forward_pass(served: Served, vllm_run: Run, schema: Schema) -> None:
    (episode,) = episodes(vllm_run, {"turns": 2})
    (sample,) = episode.samples
    _, heads = read(vllm_run, schema, sample)
    assert np.array_equal(heads.counts > 0, sample.loss_mask)
    ends = np.cumsum(heads.counts)
    for position in np.flatnonzero(sample.loss_mask)[::5].tolist():
        (fresh,) = served.generate(sample.token_ids[:position].tolist(), max_tokens=1, logprobs=HEAD + 2)
        assert fresh.top_logprobs is not None
        row = slice(int(ends[position] - heads.counts[position]), int(ends[position]))
        assert heads.columns["ids"][row].tolist() == fresh.top_logprobs.columns["ids"].tolist()
        np.testing.assert_allclose(heads.columns["logprobs"][row], fresh.top_logprobs.columns["logprobs"], atol=1e-4)


@pytest.mark.payload("A7")
def test_an_episode_that_is_cancelled_while_vllm_samples_leaves_nothing(served: Served, vllm_run: Run, schema: Schema) -> None:
    before = vllm_run.objects()
    aborted = served.metric("request_success_total")

    async def body(client: EpisodeClient) -> None:
        running = asyncio.create_task(client.run(task(turns=3), target=vllm_run.target, sampling={**SAMPLING, "max_tokens": 100}))
        while not served.metric("num_requests_running"):
            assert not running.done()
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    with_client(vllm_run, "pool", body)
    until(lambda: served.metric("num_requests_running") == 0, "vLLM lets the request go")
    until(lambda: vllm_run.settled(before), "nothing is left")
    assert served.metric("request_success_total") >= aborted
    (episode,) = episodes(vllm_run, {"turns": 1})
    check_rows(served, vllm_run, schema, episode.samples[0])


def test_each_of_several_choices_has_rows_and_heads_of_its_own(served: Served) -> None:
    ids = [(7 * n + 3) % 300 for n in range(30)]
    choices = served.generate(ids, n=3, max_tokens=8, seed=5, logprobs=HEAD + 2, output_kind=FINAL_ONLY)
    assert [c.index for c in choices] == [0, 1, 2]
    assert len({tuple(c.token_ids.tolist()) for c in choices}) == 3
    for choice in choices:
        assert choice.routing is not None
        assert choice.top_logprobs is not None
        whole = np.concatenate([np.asarray(ids, np.int32), choice.token_ids])
        np.testing.assert_array_equal(np.sort(choice.routing.rows, axis=-1), served.prefill(whole)[: len(whole) - 1])
        assert choice.top_logprobs.counts.tolist() == [HEAD] * len(choice.token_ids)
