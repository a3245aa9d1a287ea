"""What is kept of an episode, and what crosses the wire."""

from collections.abc import Callable

import numpy as np
from fsref.episodes import Episode
from fsref.episodes.client import EpisodeClient

from tests.envserver.engine import Engine
from tests.envserver.support import SAMPLING, Replica, Run, task, with_client


def run_one(run: Run, env: str, **data: object) -> Episode:
    async def body(client: EpisodeClient) -> Episode:
        return await client.run(task(**data), target=run.target, sampling=SAMPLING)

    episode = with_client(run, env, body)
    assert isinstance(episode, Episode)
    return episode


def test_an_episode_comes_back_with_one_object_per_branch(run: Run, replica: Replica) -> None:
    episode = run_one(run, replica.env)
    assert episode.ok, episode.errors
    (sample,) = episode.samples
    assert sample.ref is not None
    assert set(episode.objects) == set(sample.ref.object_ids) <= run.objects()
    assert sample.loss_mask.sum() == SAMPLING["max_tokens"]
    assert np.isfinite(sample.logprobs).all()
