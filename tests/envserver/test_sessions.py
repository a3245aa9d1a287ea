"""A new orchestrator connects to env servers that live on: their workers begin a new incarnation, and the old one is settled."""

import asyncio
import json
from collections.abc import Iterator

import msgpack
import pytest

from fsref.episodes import Episode
from fsref.episodes.client import EpisodeClient
from fsref.episodes.wire_client import WireClient
from fsref.errors import ConfigError, Fenced
from fsref.journal.death import ends_with_close
from fsref.journal.markers import write_adopted
from fsref.journal.place import Ledger
from tests.envserver.engine import Engine
from tests.envserver.support import SAMPLING, Replica, Run, task, until, until_async, with_client

NUMBERS = iter(range(1, 1000))
EARLIER: dict[str, set[str]] = {}
"""Incarnations that replicas of other tests left in the same run, by source."""


def orc() -> str:
    return f"orc.main.{next(NUMBERS):016x}"


@pytest.fixture(scope="module", params=["brief", "briefpool"])
def live(request: pytest.FixtureRequest, run: Run) -> Iterator[Replica]:
    """A replica that lives on from one orchestrator to the next: with one worker, and with a broker and two."""
    EARLIER[request.param] = journals(run, request.param)
    found = run.start(request.param)
    yield found
    assert found.stop() == 0, found.log


@pytest.fixture
def fresh(live: Replica, engine: Engine) -> Iterator[Replica]:
    del engine
    yield live
    live.clear("hold-put", "in-put")


def journals(run: Run, env: str) -> set[str]:
    return {p.stem for p in (run.folder / "ledger").glob(f"env.{env}-0-*.jnl")}


def incarnations(run: Run, env: str) -> tuple[set[str], set[str]]:
    """Open and closed ones of the live replica."""
    names = journals(run, env) - EARLIER[env]
    closed = {n for n in names if ends_with_close(run.folder / "ledger", n)}
    return names - closed, closed


def workers(replica: Replica) -> int:
    return 1 if replica.env == "brief" else 2


def episodes(run: Run, replica: Replica, session: str, count: int = 1) -> list[Episode]:
    async def body(client: EpisodeClient) -> list[Episode]:
        return [await client.run(task(), target=run.target, sampling=SAMPLING) for _ in range(count)]

    return with_client(run, replica.env, body, session=session)  # type: ignore[no-any-return]


def test_a_new_orchestrator_gets_new_incarnations_of_every_worker(run: Run, fresh: Replica) -> None:
    first = episodes(run, fresh, orc(), 2)
    until(lambda: len(incarnations(run, fresh.env)[0]) == workers(fresh), "every worker serves the first")
    before, closed_before = incarnations(run, fresh.env)
    second = episodes(run, fresh, orc(), 2)
    until(lambda: len(incarnations(run, fresh.env)[1]) == len(closed_before) + workers(fresh), "the old incarnations are closed")
    until(lambda: len(incarnations(run, fresh.env)[0]) == workers(fresh), "new ones are open")
    now, _ = incarnations(run, fresh.env)
    assert not now & before
    assert {o.partition("/")[0] for e in first for o in e.objects} <= before
    assert {o.partition("/")[0] for e in second for o in e.objects} <= now
    assert {o for e in first for o in e.objects} <= run.objects(), "what the first may have taken is its adopter's to remove"


def test_runs_of_the_old_session_are_cancelled_and_what_they_kept_is_dropped(run: Run, fresh: Replica) -> None:
    before, dropped = run.objects(), run.ledger(fresh.env)["never_sent"]

    async def old(client: EpisodeClient) -> None:
        running = asyncio.create_task(client.run(task(), target=run.target, sampling=SAMPLING))
        fresh.set("hold-put")
        await until_async(lambda: fresh.reached("in-put"), "a put is under way")
        fresh_client = asyncio.create_task(asyncio.to_thread(episodes, run, fresh, orc()))
        await until_async(lambda: running.done() or fresh_client.done(), "the old run ends", 60)
        assert not fresh_client.done(), "no new incarnation while a put of the old one is under way"
        fresh.clear("hold-put")
        (found,) = await fresh_client
        assert found.ok
        assert set(found.objects) <= run.objects()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        kept = run.objects() - before
        assert kept == set(found.objects), "the put that was under way is dropped"

    with_client(run, fresh.env, old, session=orc())
    assert run.ledger(fresh.env)["never_sent"] >= dropped + 1


def test_an_eval_command_shares_the_incarnations_of_the_run(run: Run, fresh: Replica) -> None:
    episodes(run, fresh, orc())
    before = incarnations(run, fresh.env)
    assert episodes(run, fresh, "evl.main.00000000000000aa")[0].ok
    assert incarnations(run, fresh.env) == before


def test_an_orchestrator_that_was_adopted_is_refused(run: Run, fresh: Replica) -> None:
    zombie, successor = orc(), orc()
    episodes(run, fresh, zombie)
    write_adopted(Ledger(run.folder / "ledger"), zombie, by=successor)
    episodes(run, fresh, successor)
    before = incarnations(run, fresh.env)
    with pytest.raises(Fenced, match=f"{zombie} was followed by another one"):
        episodes(run, fresh, zombie)
    assert incarnations(run, fresh.env) == before
    assert episodes(run, fresh, successor)[0].ok


@pytest.mark.parametrize("hello", [None, {"v": 99, "session": "orc.main.00000000000000ff"}])
def test_a_client_without_a_session_or_of_another_version_is_refused(run: Run, fresh: Replica, hello: object) -> None:
    async def body() -> str:
        client = WireClient(fresh.address, session=orc(), abandoned=print)
        send = client.socket.send_multipart

        async def changed(frames: list[bytes], *args: object, **kwargs: object) -> object:
            payload = msgpack.unpackb(frames[2])
            payload.pop("fsref", None)
            return await send([*frames[:2], msgpack.packb(({"fsref": hello} if hello else {}) | payload)], *args, **kwargs)

        client.socket.send_multipart = changed
        from fsref.episodes.source import client_config, sampling_config

        try:
            with pytest.raises(Exception, match="ConfigError") as caught:
                await client.episode(
                    client=client_config(run.target), model="policy", sampling=sampling_config(SAMPLING), task_data=dict(task().data)
                )
        finally:
            await client.close()
        return str(caught.value)

    said = asyncio.run(body())
    assert ("names no session" if hello is None else "session format 99") in said
    assert issubclass(ConfigError, ValueError)


@pytest.mark.fault(19)
def test_a_reply_that_was_taken_is_acknowledged_and_no_longer_unclaimed(run: Run, fresh: Replica) -> None:
    async def body(client: EpisodeClient) -> None:
        for _ in range(3):
            await client.run(task(), target=run.target, sampling=SAMPLING)
        (wire,) = [r.client for r in client._replicas.values()]
        received = wire.bytes_received
        await until_async(lambda: not wire._acks and wire.bytes_received > received, "the acknowledgements left, and were answered")
        await client.run(task(), target=run.target, sampling=SAMPLING)  # behind them on every connection

    with_client(run, fresh.env, body, session=orc())
    before, closed_before = incarnations(run, fresh.env)
    episodes(run, fresh, orc())
    until(lambda: len(incarnations(run, fresh.env)[1]) == len(closed_before) + workers(fresh), "the old incarnations are closed")
    closed = incarnations(run, fresh.env)[1] - closed_before
    assert closed <= before
    unclaimed = 0
    for inc in closed:
        last = (run.folder / "ledger" / f"{inc}.jnl").read_bytes().splitlines()[-1]
        unclaimed += json.loads(last[9:]).get("counters", {}).get("unclaimed", 0)
    assert unclaimed <= 1, "at most the last one, whose acknowledgement had no time to leave"
