"""Continuous batching: who joins and leaves, what each completion carries, and how the engine ends."""

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsref.inference import engine as module
from fsref.inference.engine import Completion, Engine, EngineStopped, Request, VersionSpan
from fsref.inference.network import Architecture, Cache, Group, forward, read_weights
from fsref.inference.sampling import Sampling

PLAIN = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, head=None)
WAIT_S = 120


def request(seed: int, *, prompt_count: int = 12, tokens_max: int = 10, **over: Any) -> Request:
    rng = random.Random(seed)
    prompt = tuple(rng.randrange(512) for _ in range(prompt_count))
    return Request(**{"prompt": prompt, "sampling": PLAIN, "tokens_max": tokens_max, "stop_ids": frozenset(), "seed": seed, **over})


def done(engine: Engine, *requests: Request) -> list[Completion]:
    return [f.result(WAIT_S) for f in [engine.submit(r) for r in requests]]


class Gate:
    """Holds the engine at its Nth pass until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, passes: int) -> None:
        self.reached, self.open, self.left = threading.Event(), threading.Event(), passes
        monkeypatch.setattr(module, "forward", self)

    def __call__(self, *args: Any) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            self.reached.set()
            assert self.open.wait(WAIT_S)
        return forward(*args)


def test_a_completion_is_the_same_alone_and_in_company(engine: Engine) -> None:
    requests = [request(seed, prompt_count=3 + 5 * seed, tokens_max=6 + seed) for seed in range(9)]
    alone = [done(engine, r)[0] for r in requests]
    together = done(engine, *requests)
    for a, b in zip(alone, together, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        np.testing.assert_array_equal(a.routes, b.routes)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


def test_routes_are_those_of_a_fresh_prefill_of_the_whole_sequence(engine: Engine, model_folder: Path, arch: Architecture) -> None:
    weights = read_weights(model_folder, arch, torch.float32)
    requests = [request(seed, tokens_max=20 + seed) for seed in range(6)]
    for asked, got in zip(requests, done(engine, *requests), strict=True):
        ids = [*asked.prompt, *got.token_ids.tolist()]
        cache = Cache(arch, slots=1, context=64, dtype=torch.float32)
        last = torch.tensor([len(ids) - 1])
        forward(weights, arch, cache, [Group(slots=slice(0, 1), token_ids=torch.tensor([ids]), starts=torch.tensor([0]), lasts=last)])
        assert got.routes.shape == (len(ids) - 1, 2, 2)
        assert got.routes.dtype == np.uint8
        np.testing.assert_array_equal(got.routes, cache.routes[0, : len(ids) - 1].numpy())


def test_routes_start_where_the_request_says(engine: Engine) -> None:
    whole, part = done(engine, request(1), request(1, start=12))
    np.testing.assert_array_equal(part.routes, whole.routes[12:])


def test_more_requests_than_slots_are_all_served(engine: Engine) -> None:
    got = done(engine, *[request(seed, tokens_max=5) for seed in range(40)])
    assert [len(c.token_ids) for c in got] == [5] * 40


def test_a_stop_token_ends_the_completion_and_belongs_to_it(engine: Engine) -> None:
    (free,) = done(engine, request(3, tokens_max=30))
    stop = int(free.token_ids[7])
    (stopped,) = done(engine, request(3, tokens_max=30, stop_ids=frozenset({stop})))
    end = free.token_ids.tolist().index(stop) + 1
    assert stopped.token_ids.tolist() == free.token_ids.tolist()[:end]
    assert (free.finish_reason, stopped.finish_reason) == ("length", "stop")
    assert len(stopped.routes) == 12 + end - 1


def test_masks_and_heads_have_one_row_per_completion_token(engine: Engine) -> None:
    sampling = Sampling(temperature=1.0, top_p=0.9, top_k=8, min_p=0.0, head=10)
    (got,) = done(engine, request(4, sampling=sampling))
    assert got.mask is not None
    assert got.heads is not None
    assert got.heads.counts.tolist() == [10] * 10
    heads = got.heads.columns["ids"].reshape(10, 10)
    assert heads[:, 0].tolist() == got.token_ids.tolist()
    np.testing.assert_array_equal(got.heads.columns["logprobs"].reshape(10, 10)[:, 0], got.logprobs)
    ends = np.cumsum(got.mask.counts)
    for row, end in enumerate(ends):
        ids = got.mask.columns["ids"][end - got.mask.counts[row] : end].tolist()
        assert 1 <= len(ids) <= 8
        assert int(got.token_ids[row]) in ids
        values = dict(zip(heads[row].tolist(), got.heads.columns["logprobs"].reshape(10, 10)[row].tolist(), strict=True))
        assert sum(np.exp(values[i]) for i in ids) == pytest.approx(1.0, abs=1e-5)


def test_without_truncation_there_is_no_mask(engine: Engine) -> None:
    assert done(engine, request(4))[0].mask is None


def test_a_cancelled_request_gives_its_slot_to_the_next(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, passes=3)
    long = [engine.submit(request(seed, tokens_max=240)) for seed in range(4)]
    waiting = engine.submit(request(9, tokens_max=2))
    assert gate.reached.wait(WAIT_S)
    assert long[1].cancel()
    gate.open.set()
    assert len(waiting.result(WAIT_S).token_ids) == 2
    for n in (0, 2, 3):
        assert long[n].result(WAIT_S).token_ids.tolist() == done(engine, request(n, tokens_max=240))[0].token_ids.tolist()


def test_new_weights_are_taken_between_two_tokens_and_versions_say_where(
    engine: Engine, other_folder: Path, arch: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, passes=5)
    running = engine.submit(request(2, tokens_max=12))
    assert gate.reached.wait(WAIT_S)
    swapped = engine.reload(read_weights(other_folder, arch, torch.float32), "12")
    gate.open.set()
    swapped.result(WAIT_S)
    assert engine.version == "12"
    assert running.result(WAIT_S).versions == (VersionSpan("0", 0, 5), VersionSpan("12", 5, 12))


def test_after_a_reload_the_new_weights_sample(engine: Engine, other_folder: Path, arch: Architecture) -> None:
    weights = read_weights(other_folder, arch, torch.float32)
    (before,) = done(engine, request(2))
    engine.reload(weights, "12").result(WAIT_S)
    (after,) = done(engine, request(2))
    with Engine(weights, arch, slots=1, context=64, dtype=torch.float32) as fresh:
        (want,) = done(fresh, request(2))
    assert after.token_ids.tolist() == want.token_ids.tolist() != before.token_ids.tolist()
    np.testing.assert_array_equal(after.routes, want.routes)


def test_closing_fails_open_requests_and_later_ones(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, passes=2)
    running = [engine.submit(request(seed, tokens_max=200)) for seed in range(6)]
    assert gate.reached.wait(WAIT_S)
    closing = threading.Thread(target=engine.close)
    closing.start()
    gate.open.set()
    closing.join(WAIT_S)
    assert not engine.alive
    for future in [*running, engine.submit(request(7))]:
        with pytest.raises(EngineStopped):
            future.result(WAIT_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_dies_tells_its_callers_why(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("no memory")

    monkeypatch.setattr(module, "forward", broken)
    with pytest.raises(EngineStopped, match="the engine died: RuntimeError: no memory"):
        engine.submit(request(1)).result(WAIT_S)
    engine.ended.result(WAIT_S)
    assert not engine.alive
