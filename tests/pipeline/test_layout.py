"""The resolved config and the command lines."""

import datetime as dt
import socket
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from fsref.config import Config, EnvSection, InferenceSection, ModelSection, ParallelSection, RunSection, StoreSection, TrainerSection
from fsref.errors import ConfigError
from fsref.pipeline.layout import Part, mint_run_id, resolve, role_commands
from fsref.pipeline.ports import free_ports
from fsref.pipeline.run import make_plan
from fsref.refs import check_run

NOW = dt.datetime(2026, 1, 31, 23, 59, 58, tzinfo=dt.UTC)


def config(**sections: object) -> Config:
    return replace(Config(env=(EnvSection(name="demo", replicas=2, workers=2),)), **sections)


def test_minted_run_ids_are_legal_sort_by_time_and_differ() -> None:
    first, second = mint_run_id(NOW), mint_run_id(NOW)
    assert check_run(first).startswith("20260131-235958-")
    assert first != second
    assert first < mint_run_id(NOW + dt.timedelta(seconds=1))


def test_resolving_fills_in_absolute_folders_and_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = resolve(config(), run_id="r1", ports=[4711])
    assert (found.run.id, found.run.root, found.run.run_dir) == ("r1", str(tmp_path / "runs"), str(tmp_path / "runs/r1"))
    assert found.model.path == str(tmp_path / "runs/r1/model")
    assert found.inference.address == "http://127.0.0.1:4711"


def test_resolving_again_changes_nothing() -> None:
    found = resolve(config(), run_id="r1", ports=[4711])
    assert resolve(found, run_id="r1", ports=[1]) == found


def test_a_folder_of_the_run_may_hold_its_id(tmp_path: Path) -> None:
    given = config(run=RunSection(root="s3://bucket/runs", run_dir=str(tmp_path / "{id}")))
    assert resolve(given, run_id="r1", ports=[1]).run.run_dir == str(tmp_path / "r1")


def test_a_server_of_the_runs_own_is_filled_in_once_and_kept(tmp_path: Path) -> None:
    given = config(run=RunSection(root="s3://bucket/runs", run_dir=str(tmp_path)), store=StoreSection(server="seaweedfs"))
    found = resolve(given, run_id="r1", ports=[1, 4711])
    assert found.store.endpoint == "http://127.0.0.1:4711"
    assert found.store.credentials_file == str(tmp_path / "objectserver" / "credentials")
    assert resolve(found, run_id="r1", ports=[1]) == found


@pytest.mark.parametrize(
    ("root", "store", "said"),
    [
        ("runs", {}, "serves an s3:// root"),
        ("s3://bucket/runs", {"endpoint": "http://other:1"}, "leave store.endpoint empty"),
        ("s3://bucket/runs", {"profile": "mine"}, "leave store.profile empty"),
    ],
)
def test_a_server_of_the_runs_own_is_refused_where_it_cannot_be(root: str, store: dict[str, str], said: str) -> None:
    given = config(run=RunSection(root=root, run_dir="d"), store=StoreSection(server="seaweedfs", **store))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=said):
        resolve(given, run_id="r1", ports=[1, 2])


def test_a_role_cannot_start_the_runs_own_server() -> None:
    given = config(run=RunSection(root="s3://bucket/runs", run_dir="d"), store=StoreSection(server="seaweedfs"))
    with pytest.raises(ConfigError, match="the launcher starts it"):
        resolve(given, run_id="r1", ports=[1])


def test_given_folders_model_and_server_stay(tmp_path: Path) -> None:
    given = config(
        run=RunSection(root="s3://bucket/runs", run_dir=str(tmp_path)),
        model=ModelSection(path=str(tmp_path / "qwen")),
        inference=InferenceSection(address="http://10.0.0.7:8000"),
    )
    found = resolve(given, run_id="r1", ports=[4711])
    assert (found.run.root, found.run.run_dir) == ("s3://bucket/runs", str(tmp_path))
    assert (found.model.path, found.inference.address) == (str(tmp_path / "qwen"), "http://10.0.0.7:8000")


def test_a_remote_root_needs_a_run_folder() -> None:
    with pytest.raises(ConfigError, match=r"run\.run_dir is empty and run\.root 's3://bucket' is not a folder"):
        resolve(config(run=RunSection(root="s3://bucket")), run_id="r1", ports=[1])


def test_a_run_id_outside_the_grammar_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.id: .*'../up'"):
        resolve(config(), run_id="../up", ports=[1])


def test_a_layout_that_the_pipelines_trainer_does_not_train_is_refused_before_anything_starts() -> None:
    trainer = TrainerSection(parallel=ParallelSection(data=1, tensor=2))
    with pytest.raises(ConfigError, match="fsref trainer is data parallel"):
        resolve(config(trainer=trainer), run_id="r1", ports=[1])


def test_a_run_without_train_sources_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing would produce samples"):
        resolve(Config(env=(EnvSection(name="exam", split="eval"),)), run_id="r1", ports=[1])


def test_every_role_gets_its_command_line_and_log(tmp_path: Path) -> None:
    given = config(run=RunSection(root=str(tmp_path)), trainer=replace(TrainerSection(), threads=3))
    roles = role_commands(resolve(given, run_id="r1", ports=[1]), serve=True, master_port=999)
    run_dir = tmp_path / "r1"
    assert [r.command.name for r in roles] == [
        "inference",
        "envs/train/demo.local-0",
        "envs/train/demo.local-1",
        "trainer/rank_0",
        "trainer/rank_1",
        "orchestrator",
    ]
    assert {r.command.log.relative_to(run_dir).as_posix() for r in roles} == {f"logs/{r.command.name}.log" for r in roles}
    assert all(r.command.argv[:3] == (sys.executable, "-m", "fsref") for r in roles)
    assert all(("--config", str(run_dir / "config.json")) == r.command.argv[4:6] for r in roles)
    replica = roles[2]
    assert replica.command.argv[6:] == ("--env", "demo", "--replica", "1", "--node", "local-1")
    assert replica.address == run_dir / "envs/train/demo.local-1.address"
    assert roles[4].command.env == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "999",
        "OMP_NUM_THREADS": "3",
    }


def test_servers_that_someone_else_runs_are_not_started() -> None:
    env = EnvSection(name="far", serve_address="tcp://10.0.0.8:5000")
    roles = make_plan(Config(env=(env,), inference=InferenceSection(address="http://10.0.0.7:8000")), now=NOW).roles
    assert {r.part for r in roles} == {Part.TRAINER, Part.ORCHESTRATOR}


def test_free_ports_are_free_and_differ() -> None:
    ports = free_ports(3)
    assert len(set(ports)) == 3
    for port in ports:
        with socket.socket() as s:
            s.bind(("127.0.0.1", port))
