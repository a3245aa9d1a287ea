"""The two role mains, with a scripted client in place of the one that needs verifiers: wiring, closing, signals, exit codes."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fsref import config as settings
from fsref import steps
from fsref.errors import ConfigError, MissingArrays, ReplicaDown, RoleFailed

from .conftest import FakeBranch, FakeEpisode, FakeTask, FakeTrace, World

episodes = pytest.importorskip("fsref.episodes", reason="needs verifiers, which it imports: install the extra of that name")

from fsref.orchestrator import eval as eval_role  # noqa: E402 - after the skip
from fsref.orchestrator import main as main_role  # noqa: E402
from fsref.orchestrator import session  # noqa: E402


class FakeClient:
    """Stands in for ``fsref.episodes.EpisodeClient``."""

    made: "list[FakeClient]"
    world: World
    missing = False

    def __init__(
        self,
        *,
        env: Any,
        envs_dir: Path,
        run: str,
        run_uuid: str,
        session: str,
        abandoned: Callable[[str, Mapping[str, int]], None],
        attempt: str,
    ) -> None:
        assert attempt == ""  # not in a job
        assert (run, run_uuid) == (self.world.info.run, self.world.info.run_uuid)
        assert session.startswith(("orc.", "evl."))
        assert envs_dir == self.world.folder / "envs"
        self.env = env
        self.abandoned = abandoned
        self.closed = False
        self.sampling: list[Mapping[str, Any]] = []
        self.made.append(self)

    async def start(self, *, deadline_s: float) -> None:
        if self.missing:
            raise ReplicaDown(f"env {self.env.name!r}: no replica within {deadline_s:g} s")

    async def run(self, task: Any, *, target: Any, sampling: Mapping[str, Any]) -> Any:
        assert (target.base_url, target.model, target.kind) == ("http://127.0.0.1:9", "policy", "train")
        self.sampling.append(sampling)
        return await self.world.run(task, 0)

    def counts(self) -> dict[str, Any]:
        done = self.world.runs
        found = episodes.ReplicaCounts(alive=True, in_flight=0, finished=done, failed=0, cancelled=0, deaths=0)
        return {f"{self.env.name}-0": found}

    @property
    def bytes_received(self) -> int:
        return 10 * self.world.runs

    async def close(self) -> None:
        self.closed = True

    async def __aenter__(self) -> "FakeClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


@pytest.fixture
def clients(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeClient]]:
    """Replaces the client, the taskset and the consumer's holder (the role opens its own)."""
    world.holder.close()
    made: list[FakeClient] = []
    monkeypatch.setattr(FakeClient, "made", made, raising=False)
    monkeypatch.setattr(FakeClient, "world", world, raising=False)
    monkeypatch.setattr(session, "EpisodeClient", FakeClient)
    monkeypatch.setattr(session, "load_tasks", lambda env, limit: [FakeTask(n, f"{env.name}-{n}") for n in range(min(3, limit))])
    yield made
    assert all(c.closed for c in made)


def config(world: World, **sections: Any) -> settings.Config:
    data: dict[str, Any] = {
        "run": {"id": "", "root": str(world.folder.parent), "run_dir": str(world.folder), "steps": 2},
        "inference": {"address": "http://127.0.0.1:9"},
        "env": [{"name": "math"}, {"name": "held-out", "split": "eval"}],
        "orchestrator": {"batch_size": 4, "group_size": 2, "ahead_max": 9, "off_policy_max": 9, "weights_poll_s": 0.01},
    }
    data["run"]["id"] = world.folder.name
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values} if isinstance(values, dict) else values
    return settings.build(data)


def test_the_fakes_have_the_fields_of_the_real_ones() -> None:
    for fake, real in [(FakeEpisode, episodes.Episode), (FakeTrace, episodes.TraceResult), (FakeBranch, episodes.BranchSample)]:
        assert {f.name for f in fields(fake)} == {f.name for f in fields(real)}
    assert {f.name for f in fields(FakeTask)} == {f.name for f in fields(episodes.Task)}


def test_a_run_publishes_its_steps_and_closes_with_nothing_held(world: World, clients: list[FakeClient]) -> None:
    main_role.main(config(world))
    assert [steps.read_info(world.store, n).samples for n in range(2)] == [4, 4]
    assert world.ends() == {"ship:0": 4, "ship:1": 4}
    assert [c.env.name for c in clients] == ["math"]
    lines = [json.loads(line) for line in (world.folder / "metrics.jsonl").read_text().splitlines()]
    assert [(r["role"], r["step"], r["reward/mean"]) for r in lines] == [("orchestrator", 0, 0.5), ("orchestrator", 1, 0.5)]


def test_each_episode_samples_with_its_own_seed_and_the_same_one_in_a_rerun(world: World, clients: list[FakeClient]) -> None:
    main_role.main(config(world, sampling={"temperature": 0.7}))
    sent = clients[0].sampling
    assert {s["temperature"] for s in sent} == {0.7}
    assert len({s["seed"] for s in sent}) == 8


def test_an_error_closes_everything_and_passes_through_alone(world: World, clients: list[FakeClient]) -> None:
    async def script(number: int, task: Any) -> Any:
        return world.episode(number, task, bare=number == 2)

    world.script = script
    with pytest.raises(MissingArrays, match="sample t2/0"):
        main_role.main(config(world))
    assert len(clients) == 1
    assert world.ends() == {"drop:shutdown": 3}
    assert world.present() == set()


@pytest.mark.fault(62)
def test_sigterm_ends_it_cleanly_and_drops_what_is_held(world: World, clients: list[FakeClient]) -> None:
    async def script(number: int, task: Any) -> Any:
        if number < 3:
            return world.episode(number, task)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()
        return None

    world.script = script
    main_role.main(config(world))
    assert len(clients) == 1
    assert world.ends() == {"drop:shutdown": 3}
    assert world.present() == set()


@pytest.mark.fault(21)
def test_an_abandoned_reply_is_taken_and_dropped_as_late(world: World, clients: list[FakeClient]) -> None:
    async def script(number: int, task: Any) -> Any:
        if number == 0:
            lost = world.episode(number, task)
            clients[0].abandoned(lost.request_id, lost.objects)
            raise ReplicaDown("gone")
        return world.episode(number, task)

    world.script = script
    main_role.main(config(world, run={"steps": 1}))
    assert world.ends() == {"drop:late": 1, "ship:0": 4}


def test_missing_replicas_end_the_role_before_anything_runs(
    world: World, clients: list[FakeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeClient, "missing", True)
    with pytest.raises(ReplicaDown, match="env 'math': no replica"):
        main_role.main(config(world))
    assert (world.runs, len(clients)) == (0, 1)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"orchestrator": {"sequence_tokens_max": 4096}}, "sequence_tokens_max 4096 exceeds tokens_per_micro_batch 2048"),
        ({"orchestrator": {"eval_every": 1}, "env": [{"name": "math"}]}, "eval_every is set, and no"),
        ({"env": [{"name": "held-out", "split": "eval"}]}, "has split = 'train'"),
        ({"run": {"fields": ["hidden_states"]}}, "run.fields names 'hidden_states', the run was created with routed_experts"),
    ],
)
def test_settings_that_do_not_fit_are_refused(world: World, clients: list[FakeClient], sections: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main_role.main(config(world, **sections))
    assert clients == []


@pytest.mark.fault(60)
def test_a_run_goes_on_behind_its_last_published_step_with_the_next_tasks(world: World, clients: list[FakeClient]) -> None:
    seen: list[str] = []

    async def script(number: int, task: Any) -> Any:
        seen.append(task.key)
        return world.episode(number, task)

    world.script = script
    main_role.main(config(world, run={"steps": 1}))
    assert steps.read_info(world.store, 0).groups == 2
    world.store.put(steps.rank_file_name(1, 0), [b"of a publication that was cut off"])
    main_role.main(config(world, run={"steps": 3}))
    assert [steps.read_info(world.store, n).groups for n in range(3)] == [2, 4, 6]
    assert world.ends() == {"ship:0": 4, "ship:1": 4, "ship:2": 4}
    assert len({sampling["seed"] for client in clients for sampling in client.sampling}) == 12, "no group was dispatched twice"
    assert {key: seen.count(key) for key in seen} == dict.fromkeys(("math-0", "math-1", "math-2"), 4), "two whole epochs"


def test_an_orchestrator_of_a_run_with_all_steps_published_ends_at_once(world: World, clients: list[FakeClient]) -> None:
    main_role.main(config(world, run={"steps": 1}))
    main_role.main(config(world, run={"steps": 1}))
    assert (world.runs, len(clients)) == (4, 2)


def test_a_standalone_evaluation_reports_removes_everything_and_audits(
    world: World, clients: list[FakeClient], capsys: pytest.CaptureFixture[str]
) -> None:
    assert eval_role.main(config(world, orchestrator={"eval_episodes": 4})) == 0
    out = capsys.readouterr().out
    assert "held-out: reward 0.5000 +- 0.2887 over 4 traces, 4 episodes, 0 failed, 4 objects (400 bytes) removed" in out
    assert "BALANCED" in out
    assert [c.env.name for c in clients] == ["held-out"]
    assert world.ends() == {"drop:eval": 4}
    assert world.present() == set()


def test_an_evaluation_without_a_good_episode_fails_after_the_audit(
    world: World, clients: list[FakeClient], capsys: pytest.CaptureFixture[str]
) -> None:
    async def script(number: int, task: Any) -> Any:
        return world.episode(number, task, ok=False)

    world.script = script
    with pytest.raises(RoleFailed, match=r"source 'held-out': none of 2 episodes ended well; the last error: HarnessError: broken"):
        eval_role.main(config(world, orchestrator={"eval_episodes": 2}))
    assert "BALANCED" in capsys.readouterr().out
    assert world.ends() == {"drop:eval": 2}
    assert len(clients) == 1


def test_a_stopped_evaluation_removes_what_it_took(world: World, clients: list[FakeClient]) -> None:
    async def script(number: int, task: Any) -> Any:
        if number == 0:
            return world.episode(number, task)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()
        return None

    world.script = script
    assert eval_role.main(config(world, orchestrator={"eval_episodes": 2})) == 130
    assert world.ends() == {"drop:eval": 1}
    assert len(clients) == 1
