"""A whole launch with stand-in roles and the real ledger: what is made, what is told, what is left."""

import dataclasses
import datetime as dt
import io
import json
import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from fsref import config as settings
from fsref.config import Config, EnvSection, LauncherSection, ModelSection, OrchestratorSection, RunSection
from fsref.errors import ConfigError, ObjectMissing, RoleFailed, StoreDenied, StoreError
from fsref.journal import read_run
from fsref.pipeline.board import PlainBoard
from fsref.pipeline.layout import Part, RoleCommand
from fsref.pipeline.prepare import claim, make_model
from fsref.pipeline.run import launch, make_plan
from fsref.store import open_root

NOW = dt.datetime(2026, 1, 31, tzinfo=dt.UTC)
MODEL = {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 99}
SERVE = """
    import pathlib, signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    pathlib.Path(sys.argv[-1]).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(sys.argv[-1]).touch()
    while True: time.sleep(60)
"""
ENV = """
    import json, signal, sys, threading
    from pathlib import Path
    import numpy as np
    from fsref import config as settings
    from fsref.journal import read_run
    from fsref.reaper import EnvHolder
    from fsref.refs import Dense, Payload
    from fsref.store import open_root
    from fsref.writer import Writer

    config = settings.load(sys.argv[1])
    run_dir, address = Path(config.run.run_dir), Path(sys.argv[3])
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with open_root(config.run.root, run=config.run.id) as store:
        run = read_run(store)
        with EnvHolder(store, run_dir / "ledger", run=run, label=f"demo-{sys.argv[2]}-0") as env:
            rows = np.zeros((3, 2, 2), np.uint8)
            ref = Writer(store, run.schema, env).put(Payload(np.arange(3, dtype=np.int32), {"routed_experts": Dense(rows)}))
            env.sent("q", ref.object_ids)
            address.parent.mkdir(parents=True, exist_ok=True)
            address.write_text(json.dumps({i: ref.byte_count for i in ref.object_ids}))
            {then}
"""
ORCHESTRATOR = """
    import json, sys
    from pathlib import Path
    from fsref import config as settings
    from fsref.journal import read_run
    from fsref.reaper import ConsumerHolder
    from fsref.store import open_root

    config = settings.load(sys.argv[1])
    run_dir = Path(config.run.run_dir)
    with open_root(config.run.root, run=config.run.id) as store:
        with ConsumerHolder(store, run_dir / "ledger", run=read_run(store)) as orc:
            for path in sys.argv[2:]:
                objects = json.loads(Path(path).read_text())
                orc.drop(orc.take(path, objects), "filtered")
"""


class Stage:
    """A launch whose roles are scripts."""

    def __init__(self, folder: Path, run_id: str = "r1") -> None:
        self.folder = folder
        self.out = io.StringIO()
        self.config = Config(
            run=RunSection(id=run_id, root=str(folder / "runs"), fields=("routed_experts",)),
            env=(EnvSection(name="demo", replicas=2),),
            orchestrator=OrchestratorSection(replica_wait_s=60.0),
            launcher=LauncherSection(restarts_max=0, stop_s=60.0),
        )
        self.plan = dataclasses.replace(make_plan(self.config, now=NOW), model=fake_model, healthy=lambda _: (folder / "up").exists())
        self.run_dir = Path(self.plan.config.run.run_dir)

    def replace(self, scripts: dict[str, str]) -> None:
        """Puts a script in place of each role whose name starts with the key."""
        self.plan = dataclasses.replace(self.plan, roles=tuple(self._role(r, scripts) for r in self.plan.roles))

    def _role(self, role: RoleCommand, scripts: dict[str, str]) -> RoleCommand:
        source = next(s for name, s in scripts.items() if role.command.name.startswith(name))
        file = self.folder / f"{role.command.name.replace('/', '.')}.py"
        file.write_text(textwrap.dedent(source))
        if role.part is Part.ENV:
            args = [str(role.replica), str(role.address)]
        elif role.part is Part.ORCHESTRATOR:
            args = [str(r.address) for r in self.plan.roles if r.address]
        else:
            args = [str(self.folder / "up")]
        argv = (sys.executable, str(file), str(self.run_dir / "config.json"), *args)
        return RoleCommand(
            role.part, dataclasses.replace(role.command, argv=argv), env=role.env, replica=role.replica, address=role.address
        )

    def launch(self) -> int:
        return launch(self.plan, PlainBoard(self.out))

    @property
    def said(self) -> str:
        return self.out.getvalue()


def fake_model(config: Config, run_to_end: object) -> None:
    """The model folder, without torch."""
    del run_to_end
    folder = Path(config.model.path)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


GOOD = {
    "inference": SERVE,
    "envs": ENV.replace("{then}", "stop.wait()"),
    "trainer": "",
    "orchestrator": ORCHESTRATOR,
}


def test_a_run_to_its_end_is_proved_and_leaves_no_object(stage: Stage) -> None:
    stage.replace(GOOD)
    assert stage.launch() == 0
    assert "CLOSED  PROVED" in stage.said
    assert not list((stage.run_dir / "obj").glob("*/*"))
    assert settings.load(stage.run_dir / "config.json") == stage.plan.config
    with open_root(str(stage.run_dir.parent), run="r1") as store:
        assert [f.name for f in read_run(store).schema.fields] == ["routed_experts"]
    assert (stage.run_dir / "logs/envs/train/demo.local-1.log").exists()


def test_what_a_replica_left_that_died_while_it_was_stopped_is_removed_at_the_end(stage: Stage) -> None:
    dies = "stop.wait(); Writer(store, run.schema, env).put(Payload(np.arange(3, dtype=np.int32), {'routed_experts': Dense(rows)}))"
    stage.replace(GOOD | {"envs": ENV.replace("{then}", f"{dies}; import os; os.kill(os.getpid(), 9)")})
    assert stage.launch() == 0
    assert "removing what the stopped processes left" in stage.said
    assert "CLOSED  PROVED" in stage.said
    assert not list((stage.run_dir / "obj").glob("*/*"))
    assert len(list((stage.run_dir / "ledger").glob("env.demo-*.dead"))) == 2


def test_a_roles_failure_is_raised_after_everything_was_stopped_and_audited(stage: Stage) -> None:
    stage.replace(GOOD | {"trainer": "raise SystemExit('error: loss is not finite')"})
    with pytest.raises(
        RoleFailed, match=r"trainer/rank_\d exited with code 1: error: loss is not finite; log: .*/logs/trainer/rank_\d.log"
    ):
        stage.launch()
    assert "stopping inference" in stage.said
    assert "CLOSED  PROVED" in stage.said
    assert not list((stage.run_dir / "obj").glob("*/*"))


def test_after_a_failure_the_arrays_of_published_steps_stay(stage: Stage) -> None:
    published = (
        ORCHESTRATOR.replace('drop(orc.take(path, objects), "filtered")', "take(path, objects)")
        + """
            store.put("steps/step_000000/STEP.json", [b"{}"])
            import os; os.kill(os.getpid(), 9)
    """
    )
    stage.replace(GOOD | {"orchestrator": published, "trainer": SERVE})
    with pytest.raises(RoleFailed, match="orchestrator was killed by SIGKILL"):
        stage.launch()
    assert len(list((stage.run_dir / "obj").glob("*/*"))) == 2
    assert "OPEN  BALANCED" in stage.said
    assert f"to go on: the same command with --run.id r1; to end the run: fsref close {stage.run_dir}" in stage.said
    assert len(list((stage.run_dir / "ledger").glob("orc.*.dead"))) == 1


def test_a_signal_stops_the_run_in_order_and_is_the_exit_code(stage: Stage) -> None:
    stage.replace(GOOD | {"orchestrator": SERVE})
    stage.plan = dataclasses.replace(stage.plan, healthy=lambda _: True)

    class Interrupting(PlainBoard):
        def say(self, text: str) -> None:
            super().say(text)
            if text.endswith(", orchestrator"):
                os.kill(os.getpid(), signal.SIGINT)

    assert launch(stage.plan, Interrupting(stage.out)) == 130
    order = [stage.said.index(f"stopping {name}") for name in ("orchestrator", "envs/train/demo.local-0", "inference")]
    assert order == sorted(order)


def test_a_model_that_cannot_be_made_ends_the_run_before_any_role(stage: Stage) -> None:
    def broken(config: Config, run_to_end: object) -> None:
        del config, run_to_end
        raise RoleFailed("model exited with code 1: error: no space")

    stage.plan = dataclasses.replace(stage.plan, model=broken)
    with pytest.raises(RoleFailed, match="model exited with code 1"):
        stage.launch()
    assert not (stage.run_dir / "run.json").exists()
    assert "starting" not in stage.said


def test_a_root_that_cannot_be_made_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = Config(run=RunSection(id="r1", root=str(tmp_path / "file/runs")), env=(EnvSection(name="demo"),))
    with pytest.raises(StoreError, match=r"opening the root .*/file/runs/r1: Not a directory"):
        claim(make_plan(config, now=NOW).config)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_read_only_root_is_named() -> None:
    config = Config(run=RunSection(id="r1", root="/proc/sys/fsref"), env=(EnvSection(name="demo"),))
    with pytest.raises((StoreDenied, ObjectMissing), match="opening the root /proc/sys/fsref/r1"):
        claim(make_plan(config, now=NOW).config)


def test_an_unknown_field_is_found_before_anything_is_made(tmp_path: Path) -> None:
    config = Config(run=RunSection(id="r1", root=str(tmp_path / "runs"), fields=("routing",)), env=(EnvSection(name="demo"),))
    with pytest.raises(ConfigError, match=r"run\.fields lists 'routing'"):
        claim(make_plan(config, now=NOW).config)
    assert not (tmp_path / "runs").exists()


def test_a_given_model_folder_must_hold_a_model(tmp_path: Path) -> None:
    def never(command: object) -> None:
        raise AssertionError(command)

    config = Config(run=RunSection(id="r1"), model=ModelSection(path=str(tmp_path)), env=(EnvSection(name="demo"),))
    resolved = make_plan(config, now=NOW).config
    with pytest.raises(ConfigError, match=r"model\.path .* has no config\.json"):
        make_model(resolved, never)
    (tmp_path / "config.json").write_text("{}")
    make_model(resolved, never)
