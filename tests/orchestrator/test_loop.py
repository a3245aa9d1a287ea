"""The steps, against scripted episodes and a real ledger: what is published, what is dropped for which reason, how it ends."""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from fsref import config as settings
from fsref import steps
from fsref.errors import MissingArrays, PayloadError, RoleFailed, StoreFull
from fsref.events import Event
from fsref.orchestrator.attempts import Attempts
from fsref.orchestrator.dispatcher import Dispatcher
from fsref.orchestrator.groups import Source
from fsref.orchestrator.loop import Identity, Loop
from fsref.orchestrator.tasks import stream
from fsref.orchestrator.weights import Version
from fsref.reaper import StepHolder, Verdict, close_run, delete_objects


def ran(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(bounded())


class Trainer(Version):
    """Weights that come as soon as someone waits for them."""

    waited: list[int]

    async def at_least(self, version: int, *, deadline_s: float) -> None:
        del deadline_s
        self.waited = [*getattr(self, "waited", []), version]
        await self.set(version)


class Run:
    """A loop over one scripted source, its events, and the files that it published."""

    def __init__(self, world: Any, *, run: Any = None, version: Version | None = None, source: Any = None, **orchestrator: Any) -> None:
        self.world = world
        self.events: list[Event] = []
        data = {
            "run": {"steps": 2, "fields": ["routed_experts", "sampling_mask"], **(run or {})},
            "orchestrator": {"batch_size": 4, "group_size": 2, "tokens_per_micro_batch": 16, "sequence_tokens_max": 8, **orchestrator},
        }
        self.config = settings.build(data)
        train = world.source(**(source or {}))
        self.version = version or Trainer()
        attempts = Attempts(deadline_s=60, retries_max=1, seed=0)
        self.loop = Loop(
            config=self.config,
            identity=Identity(run="r-1", run_uuid=world.info.run_uuid, schema=world.make.schema),
            store=world.store,
            custody=world.custody,
            dispatcher=Dispatcher(
                stream([train], seed=0, shuffle=False), world.custody, attempts, self.version, group_size=2, failures_max=2
            ),
            attempts=attempts,
            version=self.version,
            eval_tasks=self.eval_tasks(),
            hook=self.events.append,
            wire_bytes=lambda: 1000 * world.runs,
        )

    def eval_tasks(self) -> "Iterator[tuple[Source, Any]] | None":
        if not self.config.orchestrator.eval_every:
            return None
        return stream([self.world.source(name="held-out")], seed=0, shuffle=False)

    def go(self) -> "Run":
        ran(self.loop.run())
        return self

    def metrics(self, step: int) -> dict[str, float]:
        return {k: v for e in self.events if e.step == step for k, v in e.metrics.items()}

    def files(self, step: int) -> tuple[steps.StepInfo, list[steps.RankFile]]:
        info = steps.read_info(self.world.store, step)
        return info, [steps.read_rank(self.world.store, info, rank) for rank in range(info.data_ranks)]


def test_a_batch_becomes_the_files_of_its_step(world: Any) -> None:
    run = Run(world).go()
    info, ranks = run.files(0)
    steps.check_counts(info, ranks)
    assert (info.run, info.run_uuid, info.step, info.samples, info.n, info.bytes, info.tokens) == (
        "r-1",
        world.info.run_uuid,
        0,
        4,
        4,
        400,
        20,
    )
    sequences = [s for r in ranks for b in r.micro_batches for s in b.sequences]
    assert sorted(s.sample for s in sequences) == ["t0/0", "t1/0", "t2/0", "t3/0"]
    first = next(s for s in sequences if s.sample == "t1/0")
    assert first.tokens().tolist() == [1, 2, 3, 4, 6]
    assert np.frombuffer(first.advantages, "<f4").tolist() == [0, 0, 0.5, 0.5, 0.5]
    assert (first.reward, first.version) == (1.0, 0)
    world.holder.close()
    assert world.ends() == {"ship:0": 4, "ship:1": 4}
    assert world.present() == set(world.kept)


def test_a_step_is_shipped_before_it_is_visible(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []
    real = steps.publish

    def publish(store: Any, info: steps.StepInfo, files: Any) -> None:
        seen.append({m for moves in world.story().values() for m in moves if m == f"ship:{info.step}"})
        real(store, info, files)

    monkeypatch.setattr(steps, "publish", publish)
    Run(world).go()
    assert seen == [{"ship:0"}, {"ship:1"}]


def test_a_step_is_dispatched_only_with_weights_within_the_bound(world: Any) -> None:
    trainer = Trainer()
    Run(world, run={"steps": 4}, version=trainer, ahead_max=1).go()
    assert trainer.waited == [-1, 0, 1, 2]
    assert [s.version for s in Run.files(Run(world), 3)[1][0].micro_batches[0].sequences] == [2, 2]


def test_without_the_weights_that_a_step_needs_the_run_ends(world: Any) -> None:
    run = Run(world, version=Version(), ahead_max=0, weights_wait_s=0.01)
    with pytest.raises(RoleFailed, match="weights of version 1 did not come"):
        run.go()
    world.holder.close()
    assert world.ends() == {"ship:0": 4}


@pytest.mark.payload("F4")
def test_every_way_not_to_train_has_its_reason(world: Any) -> None:
    async def script(number: int, task: Any) -> Any:
        if number in {0, 1}:  # equal rewards
            return world.episode(number, task, reward=1.0)
        if number == 2:  # failed, although an object was kept
            return world.episode(number, task, ok=False)
        if number == 3:  # an object that no sample names
            return world.episode(number, task, reward=1.0, extra=1)
        return world.episode(number, task)

    world.script = script
    run = Run(world, run={"steps": 1}, batch_size=6).go()
    world.holder.close()
    assert world.ends() == {"drop:pruned": 2 + 1, "drop:filtered": 1, "drop:untrained": 1, "ship:0": 2}
    metrics = run.metrics(0)
    assert (metrics["dropped_objects/pruned"], metrics["dropped_objects/filtered"], metrics["dropped_objects/untrained"]) == (3, 1, 1)
    assert (metrics["payload/bytes_kept"], metrics["payload/bytes_removed"], metrics["payload/bytes_held"]) == (700, 500, 0)
    assert len(world.present()) == 2


def test_samples_of_weights_that_lag_too_far_are_stale(world: Any) -> None:
    class Jumping(Version):
        """Weights that wait for nobody: step 3 is dispatched at version 0, its second group at version 1."""

        async def at_least(self, version: int, *, deadline_s: float) -> None:
            del version, deadline_s

    async def script(number: int, task: Any) -> Any:
        if number == 12:
            await run.version.set(1)
        return world.episode(number, task)

    world.script = script
    run = Run(world, run={"steps": 4}, version=Jumping(), source={"slots": 1}, off_policy_max=2)
    run.go()
    world.holder.close()
    # One slot: episode 12 was dispatched at version 0, the other three of step 3 at version 1.
    assert world.ends() == {"ship:0": 4, "ship:1": 4, "ship:2": 4, "drop:stale": 1, "ship:3": 3}
    assert run.metrics(3)["off_policy/max"] == 2


def test_a_batch_of_which_nothing_trains_is_replaced_and_too_many_end_the_run(world: Any) -> None:
    async def script(number: int, task: Any) -> Any:
        return world.episode(number, task, reward=1.0 if number < 4 else float(number % 2))

    world.script = script
    run = Run(world, run={"steps": 1}).go()
    assert run.metrics(0)["batches/empty"] == 1
    world.script = lambda number, task: flat(world, number, task)
    with pytest.raises(RoleFailed, match=r"step 0: nothing trains in 3 batches in a row \(the last one: 4 pruned\)"):
        Run(world, run={"steps": 1}, batches_empty_max=3).go()
    world.holder.close()
    assert world.ends() == {"drop:pruned": 4 + 12, "ship:0": 4}


async def flat(world: Any, number: int, task: Any) -> Any:
    return world.episode(number, task, reward=1.0)


def test_a_sample_without_a_needed_field_ends_the_run_and_leaves_nothing(world: Any) -> None:
    async def script(number: int, task: Any) -> Any:
        return world.episode(number, task, bare=number == 3)

    world.script = script
    with pytest.raises(MissingArrays, match=r"sample t3/0: run.fields needs 'routed_experts', it came without a reference"):
        Run(world).go()
    world.holder.close()
    assert world.ends() == {"drop:shutdown": 3}
    assert world.present() == set()


def test_a_lenient_run_trains_samples_without_arrays(world: Any) -> None:
    async def script(number: int, task: Any) -> Any:
        return world.episode(number, task, bare=number == 3)

    world.script = script
    run = Run(world, run={"steps": 1, "missing": "fallback"}).go()
    assert (run.files(0)[0].samples, run.files(0)[0].n) == (4, 3)
    assert (run.metrics(0)["samples/without_arrays"], run.metrics(0)["samples/incomplete"]) == (1, 1)


def test_a_source_of_a_plain_server_is_named(world: Any) -> None:
    async def script(number: int, task: Any) -> Any:
        return world.episode(number, task, bare=True)

    world.script = script
    with pytest.raises(MissingArrays, match=r"source 'math' at tcp://10.0.0.1:5000: .* plain verifiers server"):
        Run(world, source={"serve_address": "tcp://10.0.0.1:5000"}, run={"missing": "fallback"}).go()


def test_tokens_that_differ_from_the_stored_ones_end_the_run(world: Any) -> None:
    async def script(number: int, task: Any) -> Any:
        episode = world.episode(number, task)
        if number == 2:
            episode.samples[0].token_ids[1] += 1
        return episode

    world.script = script
    with pytest.raises(PayloadError, match="sample t2/0: the hash"):
        Run(world).go()
    world.holder.close()
    assert world.ends() == {"drop:shutdown": 4}


@pytest.mark.payload("F5")
def test_branches_of_an_episode_are_samples_with_an_object_each(world: Any) -> None:
    async def script(number: int, task: Any) -> Any:
        return world.episode(number, task, branches=2)

    world.script = script
    info, ranks = Run(world, run={"steps": 1}).go().files(0)
    assert (info.samples, info.n) == (8, 8)
    assert sorted(o for r in ranks for o in r.owned) == sorted(world.kept)


def test_a_shuffled_run_ships_the_same_advantages_on_other_samples(world: Any) -> None:
    run = Run(world, run={"steps": 1, "seed": 3}, batch_size=8, shuffle_advantages=True).go()
    sequences = [s for r in run.files(0)[1] for b in r.micro_batches for s in b.sequences]
    advantages = {s.sample: float(np.frombuffer(s.advantages, "<f4")[-1]) for s in sequences}
    assert sorted(advantages.values()) == [-0.5] * 4 + [0.5] * 4
    assert {s.sample: s.reward - 0.5 for s in sequences} != advantages


def test_an_eval_episode_is_taken_and_removed_beside_training(world: Any) -> None:
    run = Run(world, run={"steps": 2}, eval_every=1, eval_episodes=3).go()
    world.holder.close()
    assert world.ends() == {"drop:eval": 6, "ship:0": 4, "ship:1": 4}
    metrics = run.metrics(0)
    assert metrics["eval/held-out/episodes"] == 3
    assert 0 <= metrics["eval/held-out/reward_mean"] <= 1


def test_an_evaluation_that_fails_ends_the_run(world: Any) -> None:
    async def script(number: int, task: Any) -> Any:
        if number == 0:
            raise StoreFull("no space left on the env server's disk")
        await asyncio.Event().wait()
        return task

    world.script = script
    run = Run(world, eval_every=1, eval_episodes=1)
    with pytest.raises(StoreFull, match="no space left"):
        run.go()


@pytest.mark.fault(62)
def test_a_shutdown_drops_exactly_what_was_taken_and_neither_shipped_nor_dropped(world: Any) -> None:
    async def work() -> None:
        full = asyncio.Event()

        async def script(number: int, task: Any) -> Any:
            if number == 2:
                return world.episode(number, task, ok=False)
            if number < 9:
                return world.episode(number, task)
            if number == 11:
                full.set()
            await asyncio.Event().wait()
            return None

        world.script = script
        run = Run(world, batch_size=6)
        task = asyncio.create_task(run.loop.run())
        await full.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    ran(work())
    assert world.custody.bytes_held == 300
    world.holder.close()
    # Six in step 0, of which the failed one was filtered and its partner pruned; three were waiting for the rest of step 1.
    assert world.ends() == {"ship:0": 4, "drop:filtered": 1, "drop:pruned": 1, "drop:shutdown": 3}
    assert len(world.present()) == 4


def test_a_shutdown_between_ship_and_publish_waits_for_the_step_file(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = steps.publish
    loops: list[asyncio.AbstractEventLoop] = []
    tasks: list[asyncio.Task[None]] = []

    def publish(store: Any, info: steps.StepInfo, files: Any) -> None:
        loops[0].call_soon_threadsafe(tasks[0].cancel)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loops[0]).result(30)  # the cancellation has arrived
        real(store, info, files)

    async def work() -> None:
        loops.append(asyncio.get_running_loop())
        tasks.append(asyncio.create_task(Run(world).loop.run()))
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]

    monkeypatch.setattr(steps, "publish", publish)
    ran(work())
    assert steps.read_info(world.store, 0).n == 4
    world.holder.close()
    assert world.ends() == {"ship:0": 4}


def test_the_event_of_a_step_has_what_the_live_table_shows(world: Any) -> None:
    metrics = Run(world, run={"steps": 1}).go().metrics(0)
    assert metrics["reward/mean"] == 0.5
    assert metrics["memory/rss_bytes"] > 1 << 20
    assert metrics["payload/bytes_kept"] == 400
    assert metrics["payload/bytes_removed"] == 0
    assert metrics["sampling_support/size"] == 5.0
    assert metrics["top_logprobs/size"] == 8.0
    assert metrics["wire/bytes_received"] == 4000
    assert (metrics["samples/count"], metrics["samples/tokens"], metrics["samples/tokens_trained"]) == (4, 20, 12)
    assert {"time/wait_weights", "time/collect", "time/pack", "time/publish"} <= metrics.keys()
    assert msgspec.json.encode(metrics)


@pytest.mark.payload("F4")
def test_a_run_whose_steps_were_trained_is_proved_at_its_close(world: Any) -> None:
    async def script(number: int, task: Any) -> Any:
        return world.episode(number, task, ok=number != 5)

    world.script = script
    run = Run(world, eval_every=2, eval_episodes=2).go()
    world.holder.close()
    world.env.close()
    with StepHolder(world.store, world.ledger_dir, run=world.info) as trainer:
        for step in range(2):
            trainer.taken(run.files(step)[0])
            trainer.used(step)
        trainer.drop_steps(0, 1)
        owned = [o for step in range(2) for rank in run.files(step)[1] for o in rank.owned]
        assert delete_objects(world.store, owned).failed == {}
        trainer.done_steps(0, 1)
    found = close_run(world.store, world.ledger_dir, run=world.info)
    assert found.verdict is Verdict.PROVED, found.render()
    assert found.totals.dropped_by == {"trained": len(owned), "eval": 2, "filtered": 1, "pruned": 1}
    assert found.totals.kept == len(owned) + 4
