"""Several replicas of one source: where runs go, and what happens when one dies and comes back."""

import asyncio
import dataclasses
import os
import signal
from collections.abc import Callable

import msgspec
import pytest

from fsref.addresses import address_path, publish, read
from fsref.episodes import Episode, EpisodeClient
from fsref.errors import ReplicaDown
from tests.envserver.engine import Engine
from tests.envserver.support import EVL, SAMPLING, Replica, Run, task, until_async, with_client


def test_runs_go_to_the_replica_with_the_fewest_and_fail_over_when_it_dies(run: Run, engine: Engine) -> None:
    replicas = [run.start("pair", n) for n in range(2)]

    async def body(client: EpisodeClient) -> None:
        def go() -> "asyncio.Task[Episode]":
            return asyncio.create_task(client.run(task(), target=run.target, sampling=SAMPLING))

        with engine.gate():
            running = [go() for _ in range(4)]
            await asyncio.to_thread(engine.wait_held, 4)
            assert {label: c.in_flight for label, c in client.counts().items()} == {"pair-0": 2, "pair-1": 2}
            os.kill(replicas[0].process.pid, signal.SIGKILL)
            replicas[0].process.wait(120)
            await until_async(lambda: client.counts()["pair-0"].deaths == 1, "the death is seen")
        results = await asyncio.gather(*running, return_exceptions=True)
        assert sorted(type(r).__name__ for r in results) == ["Episode", "Episode", "ReplicaDown", "ReplicaDown"]
        dead = client.counts()["pair-0"]
        assert (dead.alive, dead.in_flight, dead.failed, dead.finished) == (False, 0, 2, 0)
        assert (await go()).replica == "pair-1"
        await asyncio.to_thread(run.start, "pair", 0)
        await until_async(lambda: client.counts()["pair-0"].alive, "its successor is taken back")
        assert (await go()).replica == "pair-0"

    with_client(run, "pair", body)
    for replica in run.replicas:
        if replica.env == "pair":
            replica.process.kill()


def test_addresses_of_dead_processes_other_runs_and_other_starts_are_not_connected_to(
    run: Run, shared: Callable[[str], Replica], engine: Engine
) -> None:
    del engine
    shared("lone")
    path = address_path(run.folder / "envs", split="train", name="lone", node="local-0")
    alive = read(path)
    assert alive is not None
    gone = msgspec.structs.replace(alive, label="lone-7", pid=2**22 + 1, nonce="0" * 16)
    other = msgspec.structs.replace(alive, label="lone-8", run_uuid="0" * 32, nonce="1" * 16)
    earlier = msgspec.structs.replace(alive, label="lone-9", attempt="7.0", nonce="2" * 16)
    files = [path.with_name(f"lone.local-{n}.address") for n in (7, 8, 9)]

    async def body(client: EpisodeClient) -> None:
        assert (await client.run(task(), target=run.target, sampling=SAMPLING)).ok
        assert set(client.counts()) == {"lone-0"}

    for file, record in zip(files, (gone, other, earlier), strict=True):
        publish(file, record)
    try:
        with_client(run, "lone", body)
    finally:
        for file in files:
            file.unlink()


def test_a_replica_whose_address_is_withdrawn_is_down_at_once_and_taken_back_when_it_publishes_again(
    run: Run, shared: Callable[[str], Replica], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a node's launcher does that has seen it dead; on another node its process cannot be looked at."""
    del engine
    shared("lone")
    path = address_path(run.folder / "envs", split="train", name="lone", node="local-0")
    record = read(path)
    assert record is not None

    async def body(client: EpisodeClient) -> None:
        with monkeypatch.context() as patch:
            looked = asyncio.Event()

            def stale_handle(*_: object, **__: object) -> None:
                loop.call_soon_threadsafe(looked.set)
                raise OSError(116, "Stale file handle")

            loop = asyncio.get_running_loop()
            patch.setattr("fsref.episodes.client.find", stale_handle)
            await asyncio.wait_for(looked.wait(), 60)
            assert client.counts()["lone-0"].alive  # what cannot be looked at is not withdrawn
        path.unlink()
        await until_async(lambda: not client.counts()["lone-0"].alive, "it is down")
        assert client.counts()["lone-0"].deaths == 1
        publish(path, record)
        await until_async(lambda: client.counts()["lone-0"].alive, "it is taken back")
        assert (await client.run(task(), target=run.target, sampling=SAMPLING)).ok

    try:
        with_client(run, "lone", body)
    finally:
        publish(path, record)


def test_runs_are_sampled_by_the_inference_of_the_replicas_own_node(run: Run, shared: Callable[[str], Replica], engine: Engine) -> None:
    shared("lone")
    target = dataclasses.replace(run.target, base_url="http://127.0.0.1:9", by_node={"local-0": engine.url})

    async def body(client: EpisodeClient) -> None:
        assert (await client.run(task(), target=target, sampling=SAMPLING)).ok

    with_client(run, "lone", body)


def test_a_source_without_replicas_says_where_it_looked(run: Run) -> None:
    async def go() -> None:
        table = next(e for e in run.config.env if e.name == "brief")
        async with EpisodeClient(
            env=table,
            envs_dir=run.folder / "none",
            run=run.info.run,
            run_uuid=run.info.run_uuid,
            session=EVL,
            abandoned=lambda *_: None,
        ) as client:
            await client.start(deadline_s=0.3)

    with pytest.raises(ReplicaDown, match=r"env 'brief': 1 replicas needed within 0.3 s, found none at .*/none/train/brief"):
        asyncio.run(go())


def test_a_replica_that_was_given_up_by_mistake_is_taken_back(run: Run, shared: Callable[[str], Replica], engine: Engine) -> None:
    del engine
    shared("lone")

    async def body(client: EpisodeClient) -> None:
        (replica,) = client._replicas.values()
        assert replica.watch is not None
        client._down(replica, "a mistake")
        replica.watch.cancel()
        await until_async(lambda: client.counts()["lone-0"].alive, "it is connected to anew")
        assert (await client.run(task(), target=run.target, sampling=SAMPLING)).ok
        assert client.counts()["lone-0"].deaths == 1

    with_client(run, "lone", body)
