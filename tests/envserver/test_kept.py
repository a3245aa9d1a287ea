"""What is kept of an episode, and what crosses the wire."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import ZipStore

from fsref.episodes import BranchSample, Episode, Target
from fsref.episodes.client import EpisodeClient
from fsref.episodes.source import client_config, sampling_config
from fsref.episodes.wire_client import WireClient, _Call, _call
from fsref.errors import MissingArrays, WireError
from fsref.plan import missing_ranges
from fsref.refs import TokenRange, object_name
from tests.envserver.engine import Engine, head_of, mask_of, moe_routing_of
from tests.envserver.support import EVL, SAMPLING, SCHEMA, Replica, Run, task, until, with_client


def run_one(run: Run, env: str, *, target: Target | None = None, sampling: dict[str, Any] = SAMPLING, **data: object) -> Episode:
    async def body(client: EpisodeClient) -> Episode:
        return await client.run(task(**data), target=target or run.target, sampling=sampling)

    episode = with_client(run, env, body)
    assert isinstance(episode, Episode)
    return episode


def stored(run: Run, sample: BranchSample) -> dict[str, Any]:
    """The object's arrays, read with zarr."""
    assert sample.ref is not None
    (object_id,) = sample.ref.object_ids
    store = ZipStore(Path(run.store.posix_path or "") / object_name(object_id), mode="r")
    group: Any = zarr.open_group(store, mode="r")
    out = {
        "routed_experts": group["routed_experts"][:],
        "counts": group["top_logprobs/counts"][:],
        "ids": group["top_logprobs/ids"][:],
        "logprobs": group["top_logprobs/logprobs"][:],
        "mask_counts": group["sampling_mask/counts"][:],
        "mask_ids": group["sampling_mask/ids"][:],
    }
    store.close()
    return out


def check_truth(run: Run, sample: BranchSample, sampled: np.ndarray[Any, Any]) -> None:
    """Every stored row is what the engine's own functions say about the branch's tokens; only the last routing row is missing."""
    assert sample.ref is not None
    ids, found = sample.token_ids, stored(run, sample)
    tokens = len(ids)
    assert found["routed_experts"].shape == (tokens, *moe_routing_of(ids).shape[1:])
    np.testing.assert_array_equal(found["routed_experts"][:-1], moe_routing_of(ids)[:-1])
    assert missing_ranges(sample.ref, SCHEMA) == {"routed_experts": (TokenRange(tokens - 1, tokens),)}
    positions = np.flatnonzero(sampled).tolist()
    heads = [head_of(ids, p, int(SAMPLING["logprobs"])) for p in positions]
    assert found["counts"].tolist() == _spread([len(h) for h in heads], sampled)
    assert found["ids"].tolist() == [i for h in heads for i, _ in h]
    np.testing.assert_array_equal(found["logprobs"], np.asarray([v for h in heads for _, v in h], np.float32))
    masks = [mask_of(ids, p) for p in positions]
    assert found["mask_counts"].tolist() == _spread([len(m) for m in masks], sampled)
    assert found["mask_ids"].tolist() == [i for m in masks for i in m]


def _spread(values: list[int], sampled: np.ndarray[Any, Any]) -> list[int]:
    out = np.zeros(len(sampled), int)
    out[sampled] = values
    return out.tolist()


def test_an_episode_comes_back_with_one_object_per_branch(run: Run, replica: Replica) -> None:
    episode = run_one(run, replica.env)
    assert episode.ok, episode.errors
    (sample,) = episode.samples
    assert sample.ref is not None
    assert set(episode.objects) == set(sample.ref.object_ids) <= run.objects()
    assert sample.loss_mask.sum() == SAMPLING["max_tokens"]
    assert set(sample.logprobs[sample.loss_mask].tolist()) == {-9.0}
    assert sample.versions == ("7",)
    check_truth(run, sample, sample.loss_mask)


def test_the_last_token_of_an_earlier_turn_gets_its_row_from_the_next_reply(run: Run, replica: Replica, engine: Engine) -> None:
    (sample,) = run_one(run, replica.env, turns=3).samples
    starts = [r.sampling.get("routed_experts_prompt_start", 0) for r in engine.requests]
    first = engine.requests[0]
    assert starts[0] == 0
    assert starts[1] == len(first.prompt_ids) + len(first.completion_ids) - 1
    assert sample.loss_mask.sum() == 3 * SAMPLING["max_tokens"]
    check_truth(run, sample, sample.loss_mask)


def test_a_turn_that_stops_at_its_length_leaves_no_hole(run: Run, replica: Replica, engine: Engine) -> None:
    engine.ends_early = False
    (sample,) = run_one(run, replica.env, turns=2).samples
    check_truth(run, sample, sample.loss_mask)


def test_both_branches_of_a_fork_are_whole_and_the_shared_turn_trains_once(run: Run, replica: Replica, engine: Engine) -> None:
    episode = run_one(run, replica.env, turns=2, fork=True)
    one, two = episode.samples
    assert len(episode.objects) == 2
    first = len(engine.requests[0].prompt_ids) + SAMPLING["max_tokens"]
    np.testing.assert_array_equal(one.token_ids[:first], two.token_ids[:first])
    assert one.loss_mask[:first].sum() == SAMPLING["max_tokens"]
    assert not two.loss_mask[:first].any()
    assert two.loss_mask.sum() == SAMPLING["max_tokens"]
    sampled_two = two.loss_mask.copy()
    sampled_two[:first] = one.loss_mask[:first]
    check_truth(run, one, one.loss_mask)
    check_truth(run, two, sampled_two)


def test_no_array_crosses_the_wire(run: Run, replica: Replica) -> None:
    deltas: list[dict[str, Any]] = []

    async def body() -> Any:
        raw = WireClient(replica.address, session=EVL, abandoned=print)
        _call.set(_Call())
        try:
            return await raw.run(
                client=client_config(run.target),
                model="policy",
                sampling=sampling_config(SAMPLING),
                task_data=dict(task(turns=2, fork=True).data),
                on_delta=deltas.append,
            )
        finally:
            await raw.close()

    episode = asyncio.run(body())
    nodes = [n for d in deltas for n in d.get("nodes", ())]
    assert len(nodes) == len(episode.traces[0].nodes) > 0
    assert not [n for n in nodes if {"routed_experts", "sampling_mask", "top_logprobs"} & n.keys()]
    assert not [d for d in deltas if "routing_repairs" in d]
    assert len(episode.traces[0].info["fsref"]["branches"]) == 2


def test_bytes_on_the_wire_do_not_follow_the_size_of_the_arrays(run: Run, replica: Replica) -> None:
    async def body(client: EpisodeClient) -> tuple[int, int]:
        await client.run(task(), target=run.target, sampling=SAMPLING)
        low = client.bytes_received
        await client.run(task(), target=run.target, sampling={**SAMPLING, "logprobs": 60})
        return low, client.bytes_received - low

    low, high = with_client(run, replica.env, body)
    assert low > 1000
    assert high < low + 1000, "60 instead of 3 candidates for 6 tokens are 2.7 KB of ids and logprobs"


@pytest.mark.payload("F18")
def test_an_eval_client_keeps_nothing(run: Run, replica: Replica) -> None:
    before = run.objects()
    relay = Target(base_url=run.engine.url, model="policy", tokenizer=run.target.tokenizer, kind="eval")
    sampling = {k: v for k, v in SAMPLING.items() if k != "logprobs"}
    episode = run_one(run, replica.env, target=relay, sampling=sampling)
    assert episode.ok, episode.errors
    assert episode.reward == 1.0
    assert (episode.samples, episode.objects) == ((), {})
    assert run.settled(before)


def test_a_conversation_that_broke_keeps_nothing(run: Run, replica: Replica) -> None:
    before = run.objects()
    episode = run_one(run, replica.env, turns=2, fail=True)
    assert not episode.ok
    assert "broken on purpose" in " ".join(episode.errors)
    assert (episode.samples, episode.objects) == ((), {})
    assert run.settled(before)


def test_only_the_final_attempt_is_kept(run: Run, replica: Replica, engine: Engine) -> None:
    """The lone worker retries its agent, the pool whole episodes."""
    before = run.objects()
    engine.failures_left = 1
    episode = run_one(run, replica.env, turns=2)
    assert episode.ok, episode.errors
    assert len(engine.requests) == 3, "one failed request, then two turns"
    assert run.objects() - before == set(episode.objects)
    check_truth(run, episode.samples[0], episode.samples[0].loss_mask)


def test_only_the_agent_that_trains_is_kept(run: Run, shared: Callable[[str], Replica], engine: Engine) -> None:
    del engine
    shared("twoagents")
    before = run.objects()
    episode = run_one(run, "twoagents")
    assert {t.agent: t.trainable for t in episode.traces} == {"solver": True, "judge": False}
    assert [s.agent for s in episode.samples] == ["solver"]
    assert len(episode.objects) == 1
    assert run.objects() - before == set(episode.objects)


@pytest.mark.parametrize("field", ["routed_experts", "sampling_mask"])
def test_a_needed_field_that_the_engine_does_not_send_ends_the_episode(run: Run, replica: Replica, engine: Engine, field: str) -> None:
    before = run.objects()
    engine.drop.add(field)
    with pytest.raises(MissingArrays, match=rf"branch \w+/0: field '{field}' .* start inference so that it returns"):
        run_one(run, replica.env)
    until(lambda: run.settled(before), "nothing is left")


def test_a_head_that_was_not_asked_for_ends_the_episode(run: Run, replica: Replica) -> None:
    before = run.objects()
    with pytest.raises(MissingArrays, match=r"field 'top_logprobs' .* sampling.top_logprobs"):
        run_one(run, replica.env, sampling={k: v for k, v in SAMPLING.items() if k != "logprobs"})
    until(lambda: run.settled(before), "nothing is left")


@pytest.mark.parametrize(("field", "text"), [("routed_experts", "rows found"), ("sampling_mask", "are legal")])
def test_a_reply_with_wrong_arrays_ends_the_episode_with_its_reason(
    run: Run, replica: Replica, engine: Engine, field: str, text: str
) -> None:
    before = run.objects()
    engine.damage.add(field)
    with pytest.raises(WireError, match=f"{field}.*{text}"):
        run_one(run, replica.env)
    assert run.settled(before)
