"""Every way in which an episode's reply can fail to reach its client, or its server can end: nothing may be left, or lost.

The table of verifiers' failure paths is in docs/env-servers.md; each test names its row. ``replica`` runs a test on a lone worker and on a
broker with two.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections import Counter, deque
from contextlib import nullcontext
from typing import Any

import msgpack
import pytest
import zmq

from fsref.episodes import Episode
from fsref.episodes.client import EpisodeClient
from fsref.episodes.wire_client import WireClient
from fsref.errors import JournalPoisoned, ReplicaDown, StoreFull
from fsref.orchestrator.custody import Custody
from fsref.orchestrator.filters import Reason
from fsref.reaper import ConsumerHolder
from tests.envserver.engine import Engine
from tests.envserver.support import (
    ROOT,
    SAMPLING,
    Abandoned,
    Replica,
    Run,
    received,
    server_connections,
    task,
    until,
    until_async,
    with_client,
)


def start(client: EpisodeClient, run: Run, **data: object) -> "asyncio.Task[Episode]":
    return asyncio.create_task(client.run(task(**data), target=run.target, sampling=SAMPLING))


async def cancelled(running: "asyncio.Task[Episode]") -> None:
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def cancelled_by_server(running: "asyncio.Task[Episode]", client: EpisodeClient) -> None:
    """Cancels, and returns once the server says that it aborted the run."""
    (connection,) = [r.client for r in client._replicas.values()]
    handle, said = connection._handle_batch, asyncio.Event()

    async def listen(batch: Any) -> None:
        if any(b"rollout aborted" in frames[-1].bytes for frames in batch):
            said.set()
        await handle(batch)

    connection._handle_batch = listen
    await cancelled(running)
    await said.wait()


class Ledger:
    """What the env servers' journals say since it was made."""

    def __init__(self, run: Run, *labels: str) -> None:
        self._run, self._labels = run, labels
        self._before = run.ledger(*labels)
        self.objects = run.objects()

    def new(self) -> Counter[str]:
        return self._run.ledger(*self._labels) - self._before

    def settled(self) -> bool:
        return self._run.settled(self.objects)


@pytest.fixture
def ledger(run: Run, replica: Replica) -> Ledger:
    """From before the test on."""
    return Ledger(run, replica.env)


def unacknowledged(client: EpisodeClient) -> WireClient:
    """The client's connection, whose servers never hear that a reply was taken: as if the reply had been lost on its way."""
    (connection,) = [r.client for r in client._replicas.values()]
    connection._acks = deque(maxlen=0)
    return connection


async def first_episode(client: EpisodeClient, run: Run) -> Episode:
    """Warms the worker up, so that what follows waits for its own events alone."""
    return await client.run(task(), target=run.target, sampling=SAMPLING)


def test_cancel_while_the_model_is_sampling(run: Run, replica: Replica, engine: Engine, ledger: Ledger) -> None:
    async def body(client: EpisodeClient) -> None:
        with engine.gate():
            running = start(client, run)
            await asyncio.to_thread(engine.wait_held, 1)
            await cancelled(running)
            await until_async(lambda: engine.held == 0, "the server gives its request to the engine up")

    abandoned: Abandoned = []
    with_client(run, replica.env, body, abandoned=abandoned)
    until(ledger.settled, "nothing is left")
    assert (ledger.new(), abandoned) == (Counter(), [])


def test_cancel_while_an_object_is_written(run: Run, replica: Replica, ledger: Ledger) -> None:
    async def body(client: EpisodeClient) -> None:
        replica.set("hold-put")
        running = start(client, run)
        await until_async(lambda: replica.reached("in-put"), "a put begins")
        await cancelled_by_server(running, client)
        replica.clear("hold-put")

    with_client(run, replica.env, body)
    until(lambda: ledger.new() == Counter(kept=1, never_sent=1), "the object is dropped by the thread that wrote it")
    until(ledger.settled, "nothing is left")


def test_cancel_between_two_objects(run: Run, replica: Replica, ledger: Ledger) -> None:
    async def body(client: EpisodeClient) -> None:
        replica.set("hold-put")
        running = start(client, run, turns=2, fork=True)
        await until_async(lambda: replica.reached("in-put"), "the first put begins")
        await cancelled_by_server(running, client)
        replica.clear("hold-put")

    with_client(run, replica.env, body)
    until(lambda: ledger.new() == Counter(kept=1, never_sent=1), "the first object is dropped, the second never written")
    until(ledger.settled, "nothing is left")


def test_cancel_in_the_final_flush(run: Run, replica: Replica, ledger: Ledger) -> None:
    async def body(client: EpisodeClient) -> None:
        replica.set("hold-flush")
        running = start(client, run)
        await until_async(lambda: replica.reached("in-flush"), "the last delta is about to leave")
        assert ledger.new() == Counter(kept=1)
        await cancelled(running)
        await until_async(lambda: ledger.new() == Counter(kept=1, never_sent=1), "the object is dropped")
        replica.clear("hold-flush")

    abandoned: Abandoned = []
    with_client(run, replica.env, body, abandoned=abandoned)
    until(ledger.settled, "nothing is left")
    assert abandoned == []


@pytest.mark.fault(18)
def test_cancel_after_the_reply_is_a_nack(run: Run, replica: Replica, ledger: Ledger) -> None:
    async def body(client: EpisodeClient) -> None:
        connection = unacknowledged(client)
        episode = await first_episode(client, run)
        assert set(episode.objects) <= run.objects()
        await connection._send_cancel(episode.request_id)
        await until_async(lambda: ledger.new() == Counter(kept=1, abandoned=1), "the worker drops it")

    with_client(run, replica.env, body)
    until(ledger.settled, "nothing is left")


def test_a_second_cancel_after_the_reply_removes_nothing_more(run: Run, replica: Replica, ledger: Ledger) -> None:
    async def body(client: EpisodeClient) -> None:
        connection = unacknowledged(client)
        first, second = await first_episode(client, run), await first_episode(client, run)
        for _ in range(2):
            await connection._send_cancel(first.request_id)
        await connection._send_cancel("0" * 32)
        await until_async(lambda: ledger.new() == Counter(kept=2, abandoned=1), "one object is dropped once")
        assert await connection.health(timeout=60)
        assert ledger.new() == Counter(kept=2, abandoned=1)
        await connection._send_cancel(second.request_id)

    with_client(run, replica.env, body)
    until(ledger.settled, "nothing is left")


@pytest.mark.fault(21)
def test_a_reply_that_its_caller_cancels_while_it_is_decoded_is_handed_over(run: Run, replica: Replica, ledger: Ledger) -> None:
    async def body(client: EpisodeClient) -> None:
        await first_episode(client, run)
        (connection,) = [r.client for r in client._replicas.values()]
        decode, entered = connection._decode, asyncio.Event()

        async def slow(*args: Any) -> Any:
            entered.set()
            await asyncio.Event().wait()
            return await decode(*args)

        connection._decode = slow
        running = start(client, run)
        await entered.wait()
        await cancelled(running)

    abandoned: Abandoned = []
    with_client(run, replica.env, body, abandoned=abandoned)
    ((request_id, objects),) = abandoned
    assert len(request_id) == 32
    assert set(objects) < run.objects() - ledger.objects, "it stays until the client's ledger drops it"
    assert ledger.new() == Counter(kept=2)
    with ConsumerHolder(run.store, run.folder / "ledger", run=run.info) as orc:
        custody = Custody(orc)
        custody.drop(custody.take(request_id, objects), Reason.LATE)
        assert orc.flush(deadline_s=60.0) == 0
        assert (orc.counters["taken"], orc.counters["dropped"], orc.counters["held"]) == (len(objects), len(objects), 0)
    assert not set(objects) & run.objects()


CLIENT = """
import asyncio, sys
from pathlib import Path
from fsref.config import load
from fsref.episodes import EpisodeClient, Target
from tests.envserver.support import EVL, SAMPLING, task

async def main(folder, env, engine, uuid):
    config = load(folder / "config.json")
    table = next(e for e in config.env if e.name == env)
    async with EpisodeClient(env=table, envs_dir=folder / "envs", run="r1", run_uuid=uuid, session=EVL, abandoned=print) as client:
        await client.start(deadline_s=120)
        target = Target(base_url=engine, model="policy", tokenizer=config.model.path)
        await client.run(task(turns=3), target=target, sampling=SAMPLING)

asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
"""


def client_process(run: Run, env: str) -> "subprocess.Popen[bytes]":
    argv = [sys.executable, "-c", CLIENT, str(run.folder), env, run.engine.url, run.info.run_uuid]
    return subprocess.Popen(argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "NO_PROXY": "*"})


def test_a_client_that_is_killed_while_the_model_is_sampling(run: Run, replica: Replica, engine: Engine, ledger: Ledger) -> None:
    with engine.gate():
        client = client_process(run, replica.env)
        engine.wait_held(1)
        client.kill()
        client.wait(120)
        until(lambda: server_connections(replica.address) == 0, "the server sees that the client is gone")
    # The next delta finds no client and ends the run: the engine is not asked for all three turns, or what was kept is dropped.
    until(lambda: len(engine.requests) < 3 or ledger.new()["kept"] == ledger.new()["abandoned"] + ledger.new()["never_sent"], "the end")

    async def after(client: EpisodeClient) -> Episode:
        return await first_episode(client, run)

    episode = with_client(run, replica.env, after)
    until(lambda: run.settled(ledger.objects | set(episode.objects)), "only the next client's object is left")


def test_a_connection_that_breaks_while_its_object_is_written(run: Run, replica: Replica, ledger: Ledger) -> None:
    async def body(client: EpisodeClient) -> None:
        replica.set("hold-put")
        running = start(client, run)
        await until_async(lambda: replica.reached("in-put"), "the put begins")
        (broken,) = client._replicas.values()
        assert broken.watch is not None
        broken.watch.cancel()
        await asyncio.gather(broken.watch, return_exceptions=True)
        for future in broken.client._pending.values():
            future.set_exception(ReplicaDown("the test cut the connection"))
        broken.client._pending.clear()
        broken.client.socket.close(linger=0)  # no cancel leaves, as if the process had been killed
        with pytest.raises(ReplicaDown):
            await running
        await until_async(lambda: server_connections(replica.address) == 0, "the server sees that the client is gone")
        replica.clear("hold-put")
        await until_async(lambda: ledger.new()["abandoned"] + ledger.new()["never_sent"] == 1, "it is dropped: nobody can take it")

    with_client(run, replica.env, body)
    until(ledger.settled, "nothing is left")
    assert ledger.new()["kept"] == 1


@pytest.mark.parametrize(("method", "question"), [(b"health", {}), (b"cancel", {"request_id": "0" * 32})])
def test_a_client_that_leaves_without_its_answer_does_not_end_the_broker(
    run: Run, replica: Replica, method: bytes, question: dict[str, str]
) -> None:
    """The server is stopped while the client asks and leaves, so that it finds a question and no one to answer."""
    address = replica.address
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(address)
        socket.send_multipart([b"first", b"health", msgpack.packb({})])
        assert socket.poll(60_000), "it answers"
        before = server_connections(address)
        replica.process.send_signal(signal.SIGSTOP)
        until(lambda: replica.stopped, "all of its threads stand still")
        try:
            socket.send_multipart([b"second", method, msgpack.packb(question)])
            until(lambda: received(address) > 0, "the question lies at the server")
            socket.close(linger=0)
        finally:
            replica.process.send_signal(signal.SIGCONT)
    until(lambda: server_connections(address) < before, "the server sees that the client is gone")
    assert with_client(run, replica.env, lambda client: first_episode(client, run)).ok
    assert replica.process.poll() is None


@pytest.mark.fault(31)
def test_a_full_store_ends_the_episode_and_leaves_nothing(run: Run, replica: Replica, ledger: Ledger) -> None:
    replica.set("fail-put", "1")

    async def body(client: EpisodeClient) -> None:
        with pytest.raises(StoreFull, match=r"branch \w+/1: no space for obj/"):
            await client.run(task(turns=2, fork=True), target=run.target, sampling=SAMPLING)
        replica.clear("fail-put")
        assert ledger.new() == Counter(kept=1, encode_error=1)
        assert (await first_episode(client, run)).ok

    with_client(run, replica.env, body)
    until(lambda: len(run.objects() - ledger.objects) == 1, "only the last episode's object is left")


def test_a_reply_that_cannot_be_encoded_is_an_error_and_its_objects_are_dropped(run: Run, replica: Replica, ledger: Ledger) -> None:
    async def body(client: EpisodeClient) -> None:
        replica.set("break-reply")
        episode = await first_episode(client, run)
        assert (episode.ok, episode.objects, len(episode.errors)) == (False, {}, 1)
        assert "response encoding failed" in replica.log
        replica.clear("break-reply")
        assert ledger.new() == Counter(kept=1, never_sent=1)
        assert (await first_episode(client, run)).ok

    abandoned: Abandoned = []
    with_client(run, replica.env, body, abandoned=abandoned)
    until(lambda: len(run.objects() - ledger.objects) == 1, "only the last episode's object is left")
    assert abandoned == [], "the client never had them"


@pytest.mark.fault(32)
@pytest.mark.parametrize("env", ["brief", "briefpool"])
def test_a_worker_whose_journal_fails_ends_its_replica_with_the_reason(
    run: Run, engine: Engine, env: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk is full at the third record: ``open`` and one ``keep`` fit."""
    del engine
    monkeypatch.setenv("FSREF_FAILPOINTS", "journal.append.before=raise(ENOSPC):3+")
    replica = run.start(env)
    ledger = Ledger(run, env)
    kept: list[Episode] = []

    async def body(client: EpisodeClient) -> None:
        with pytest.raises((JournalPoisoned, ReplicaDown), match=f"No space left on device|{env}-0"):
            await until_one_fails(client)

    async def until_one_fails(client: EpisodeClient) -> None:
        for _ in range(3):  # at most one succeeds for each of two workers, whichever the broker chooses
            kept.append(await first_episode(client, run))  # noqa: PERF401  (what succeeded before the failure counts)

    with_client(run, env, body)
    assert kept
    assert replica.process.wait(120) == 1
    assert re.search("this worker stops: branch .*: append to .* failed: No space left on device", replica.log)
    assert re.search("^error: .*(No space left on device|worker process)", replica.log, re.MULTILINE)
    assert not list((run.folder / "envs" / "train").glob(f"{env}.*")), "its address is taken back"
    assert ledger.new() == Counter(kept=len(kept)), "nothing more is kept, dropped or removed"
    assert {o for e in kept for o in e.objects} <= run.objects()


@pytest.mark.parametrize("where", ["engine", "put"])
def test_a_worker_that_dies_ends_its_replica(run: Run, engine: Engine, where: str) -> None:
    replica = run.start("briefpool")
    ledger = Ledger(run, "briefpool")

    async def body(client: EpisodeClient) -> None:
        await first_episode(client, run)
        if where == "put":
            replica.set("hold-put")
        with engine.gate() if where == "engine" else nullcontext():
            running = start(client, run)
            if where == "engine":
                await asyncio.to_thread(engine.wait_held, 1)
            else:
                await until_async(lambda: replica.reached("in-put"), "a put begins")
            for pid in replica.workers:
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(ReplicaDown, match="briefpool-0"):
                await running

    with_client(run, "briefpool", body)
    assert replica.process.wait(120) == 1
    assert "error: env server briefpool-0: worker process" in replica.log
    assert not list((run.folder / "envs" / "train").glob("briefpool.*")), "its address is taken back"
    assert ledger.new() == Counter(kept=1), "what the dead worker had not finished has no receipt; what is left is its adopter's"


@pytest.mark.parametrize("env", ["brief", "briefpool"])
def test_sigterm_while_an_object_is_written(run: Run, engine: Engine, env: str) -> None:
    del engine
    replica = run.start(env)
    ledger = Ledger(run, env)

    async def body(client: EpisodeClient) -> Episode:
        kept = await first_episode(client, run)
        replica.set("hold-put")
        running = start(client, run)
        await until_async(lambda: replica.reached("in-put"), "a put begins")
        up = replica.log.count("EnvServer up")  # of a pool's workers one may still start, which the signal just ends
        replica.process.send_signal(signal.SIGTERM)
        await until_async(lambda: replica.log.count("EnvServer down") >= up, "every server stops while the put is under way")
        replica.clear("hold-put")
        with pytest.raises((ReplicaDown, asyncio.CancelledError)):
            await running
        return kept

    kept = with_client(run, env, body)
    assert replica.process.wait(120) == 0, replica.log
    assert ledger.new() == Counter(kept=2, never_sent=1)
    assert run.settled(ledger.objects | set(kept.objects)), "what a client took stays"
