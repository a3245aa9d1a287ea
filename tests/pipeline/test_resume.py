"""What is made of an interrupted run before its roles start again."""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fsref import config as settings
from fsref import folders, steps
from fsref.config import Config, EnvSection, ModelSection, ParallelSection, RunSection, TrainerSection
from fsref.errors import ConfigError, RunBusy, RunMismatch, StepError, StepReleased
from fsref.journal import RunInfo, create_run
from fsref.ledger.ids import sum_of
from fsref.pipeline.metrics import Follower
from fsref.pipeline.prepare import claim
from fsref.pipeline.resume import resume
from fsref.pipeline.schema import build_schema
from fsref.reaper import ConsumerHolder, EnvHolder, StepHolder, Verdict, audit, close_run
from fsref.refs import object_name
from fsref.store import Store, open_root
from tests.pipeline.test_run import MODEL

SAID: list[str] = []


class Interrupted:
    """A run with four published steps, of which a checkpoint covers two, whose processes are gone."""

    def __init__(self, folder: Path, *, replay: str = "keep", steps_total: int = 6) -> None:
        (folder / "model").mkdir()
        (folder / "model/config.json").write_text(json.dumps(MODEL))
        self.config = Config(
            run=msgspec.convert(
                {"id": "r1", "root": str(folder / "runs"), "run_dir": str(folder / "runs/r1"), "steps": steps_total, "replay": replay,
                 "fields": ["routed_experts"]},
                RunSection,
            ),
            model=ModelSection(path=str(folder / "model")),
            env=(EnvSection(name="demo"),),
            trainer=TrainerSection(parallel=ParallelSection(data=1)),
        )  # fmt: skip
        lock, existed = claim(self.config)
        lock.close()
        assert not existed
        self.run_dir = folder / "runs/r1"
        self.store: Store = open_root(str(folder / "runs"), run="r1")
        self.info: RunInfo = create_run(self.store, "r1", build_schema(self.config))
        self.ledger = self.run_dir / "ledger"
        self.objects: dict[int, list[str]] = {}
        env = EnvHolder(self.store, self.ledger, run=self.info)
        orc = ConsumerHolder(self.store, self.ledger, run=self.info)
        trn = StepHolder(self.store, self.ledger, run=self.info)
        for step in range(4):
            self._publish(env, orc, step)
        for step in range(3):
            trn.taken(steps.read_info(self.store, step))
            trn.used(step)
        self._take(env, orc, "held", 2)
        holders: tuple[EnvHolder | ConsumerHolder | StepHolder, ...] = (env, orc, trn)
        for holder in holders:  # as a kill leaves them
            if isinstance(holder, ConsumerHolder) and holder._watch is not None:
                holder._watch.close(deadline_s=60.0)
            holder._deleter.close(deadline_s=0.0)
            holder._journal.close()
        for version in (1, 2, 3):
            folders.publish(self.run_dir / "weights", version, lambda f: (f / "w").touch())
        folders.publish(self.run_dir / "checkpoints", 2, lambda f: (f / "state.pt").touch())
        (self.run_dir / "envs/train").mkdir(parents=True)
        (self.run_dir / "envs/train/demo.local-0.address").write_text("{}")

    def _take(self, env: EnvHolder, orc: ConsumerHolder, name: str, count: int) -> list[str]:
        found = []
        for _ in range(count):
            object_id = env.next_id()
            self.store.put(object_name(object_id), [b"x" * 10], durability="process")
            env.keep(int(object_id.rpartition("/")[2]), byte_count=10, checksum=1, token_count=1, fields=1)
            found.append(object_id)
        env.sent(name, found)
        orc.take(name, dict.fromkeys(found, 10))
        return found

    def _publish(self, env: EnvHolder, orc: ConsumerHolder, step: int) -> None:
        found = self.objects[step] = self._take(env, orc, f"q{step}", 1)
        orc.ship(step, dict.fromkeys(found, 10))
        steps.publish(self.store, self.step_info(step), [b"rank file"])

    def step_info(self, step: int) -> steps.StepInfo:
        found = self.objects[step]
        return steps.StepInfo(
            v=1, run="r1", run_uuid=self.info.run_uuid, step=step, data_ranks=1, micro_batches=1, samples=1, tokens=1, n=1, bytes=10,
            sum=sum_of(found), version=0, groups=2 * step + 2, schema=self.info.schema, digests=(steps.digest(b"rank file"),),
        )  # fmt: skip

    def present(self) -> set[str]:
        return {f"{p.parent.name}/{int(p.stem)}" for p in (self.run_dir / "obj").glob("*/*.zip")}


@pytest.fixture
def interrupted(tmp_path: Path) -> Iterator[Interrupted]:
    SAID.clear()
    run = Interrupted(tmp_path)
    yield run
    run.store.close()


@pytest.mark.fault(60)
def test_published_steps_behind_the_checkpoint_stay_and_everything_else_goes(interrupted: Interrupted) -> None:
    run = interrupted
    found = resume(run.config, SAID.append)
    assert (found.trained, found.published, found.finished) == (2, 4, False)
    assert found.told() == (
        "the run goes on: steps 0 to 1 are in its newest checkpoint, 2 published steps are trained again, step 4 is the next to generate"
    )
    assert run.present() == {*run.objects[2], *run.objects[3]}
    assert steps.published(run.store) == [0, 1, 2, 3]
    assert set(folders.published(run.run_dir / "weights")) == {1, 2}
    assert not list((run.run_dir / "envs").glob("*/*.address"))
    assert settings.load(run.run_dir / "config.json") == run.config
    again = resume(run.config, SAID.append)
    assert (again.trained, again.published) == (2, 4), "it can be interrupted and done again"


@pytest.mark.fault(60)
def test_with_replay_drop_they_are_removed_and_generated_anew(interrupted: Interrupted) -> None:
    run = interrupted
    config = msgspec.structs.replace(run.config, run=msgspec.structs.replace(run.config.run, replay="drop"))
    found = resume(config, SAID.append)
    assert (found.trained, found.published) == (2, 2)
    assert run.present() == set()
    assert steps.published(run.store) == [0, 1]
    assert not [e for e in run.store.list("steps") if "step_000002" in e.name]
    assert close_run(run.store, run.ledger, run=run.info).verdict is Verdict.PROVED


@pytest.mark.fault(60)
def test_a_run_of_which_a_process_lives_is_busy_and_the_process_is_named(interrupted: Interrupted) -> None:
    with EnvHolder(interrupted.store, interrupted.ledger, run=interrupted.info, label="demo-0-0") as env:
        with pytest.raises(RunBusy, match=env.inc):
            resume(interrupted.config, SAID.append)
        assert set(interrupted.objects[0]) <= interrupted.present()
    resume(interrupted.config, SAID.append)


def test_another_launcher_of_the_run_is_named(interrupted: Interrupted) -> None:
    lock, existed = claim(interrupted.config)
    assert existed
    with lock, pytest.raises(RunBusy, match=r"another launcher \(pid \d+ on "):
        claim(interrupted.config)
    claim(interrupted.config)[0].close()


@pytest.mark.fault(28)
def test_steps_whose_arrays_are_gone_are_not_replayed_and_the_way_out_is_named(interrupted: Interrupted) -> None:
    run = interrupted
    with StepHolder(run.store, run.ledger, run=run.info) as trn:
        for step in range(3):
            trn.taken(steps.read_info(run.store, step))
        trn.drop_steps(0, 2)
    with pytest.raises(StepReleased, match=r"has 2 steps, and the arrays of step 2 were removed by .*step_000003.*--run.replay drop"):
        resume(run.config, SAID.append)


def test_a_missing_step_is_an_error_that_says_what_to_do(interrupted: Interrupted) -> None:
    steps.remove(interrupted.store, 2)
    with pytest.raises(StepError, match=r"only \[3\] are published: start with --run.replay drop"):
        resume(interrupted.config, SAID.append)


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    run = Interrupted(tmp_path, steps_total=2)
    before = run.present()
    found = resume(run.config, SAID.append)
    assert (found.finished, found.told()) == (True, "all 2 steps are trained already: nothing is started")
    assert run.present() == before
    assert audit(run.store, run.ledger, run="r1").verdict is Verdict.BALANCED
    run.store.close()


@pytest.mark.fault(61)
def test_a_run_with_another_schema_or_number_of_ranks_is_refused_and_not_touched(interrupted: Interrupted) -> None:
    config, before = interrupted.config, interrupted.present()
    other = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, fields=("routed_experts", "top_logprobs")))
    with pytest.raises(RunMismatch, match="other fields or codec"):
        resume(other, SAID.append)
    wide = msgspec.structs.replace(config, trainer=TrainerSection(parallel=ParallelSection(data=2)))
    with pytest.raises(ConfigError, match="the run 'r1' has checkpoints and steps of 1 ranks"):
        resume(wide, SAID.append)
    assert interrupted.present() == before


@pytest.mark.fault(61)
def test_journals_of_another_project_in_the_folder_are_refused(interrupted: Interrupted) -> None:
    run = interrupted
    (run.run_dir / "run.json").unlink()
    create_run(run.store, "r1", run.info.schema)  # the same name, another run_uuid
    before = run.present()
    with pytest.raises(RunMismatch, match="run_uuid"):
        resume(run.config, SAID.append)
    assert run.present() == before


def test_metrics_of_an_attempt_that_was_given_up_are_forgotten(interrupted: Interrupted) -> None:
    path = interrupted.run_dir / "metrics.jsonl"
    lines = [{"role": "trainer", "step": n, "mismatch_kl/mean": 1.0, "payload/bytes_fetched": 100} for n in range(4)]
    lines += [{"role": "orchestrator", "step": n, "reward/mean": 0.5} for n in range(4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    resume(interrupted.config, SAID.append)
    with path.open("a") as file:
        file.write(json.dumps({"role": "trainer", "step": 2, "mismatch_kl/mean": 2.0, "payload/bytes_fetched": 100}) + "\n")
    follower = Follower(path)
    follower.read()
    assert [follower.complete(n) for n in range(4)] == [True, True, True, False]
    assert follower.steps[2] == {"mismatch KL": 2.0, "fetched": 100.0, "reward": 0.5}, "counted once"
    assert follower.steps[3] == {"reward": 0.5}
