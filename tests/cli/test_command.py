"""The command as a user meets it: in processes of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from fsref.cli.app import app
from fsref.cli.failures import exit_code, one_line
from fsref.cli.roles import ROLES, Role, find
from fsref.errors import ConfigError, FsrefError, MissingExtra, ObjectMissing, StoreFull

FOUND = typer.main.get_group(app).commands
COMMANDS = sorted(FOUND)


def fsref(*args: str, cwd: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1", **env}
    return subprocess.run([sys.executable, "-m", "fsref", *args], cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def refused(done: "subprocess.CompletedProcess[str]", code: int) -> str:
    """The one line of a known failure; nothing else may be on stderr, and no traceback."""
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ")
    return done.stderr.removeprefix("error: ").strip()


def test_every_command_is_listed_and_explains_itself(tmp_path: Path) -> None:
    assert {"run", "inference", "env-server", "orchestrator", "trainer", "eval", "inspect", "audit", "close", "recover", "doctor"} <= set(
        COMMANDS
    )
    listed = fsref("--help", cwd=tmp_path).stdout
    hidden = {name for name, command in FOUND.items() if command.hidden}
    assert all(name in listed for name in set(COMMANDS) - hidden)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_needs_no_run(tmp_path: Path, command: str) -> None:
    done = fsref(command, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "Usage" in done.stdout


def test_every_command_stands_in_the_docs() -> None:
    docs = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    missing = [c for c in COMMANDS if f"fsref {c}" not in docs and c != "model"]
    assert not missing


def test_version(tmp_path: Path) -> None:
    assert fsref("--version", cwd=tmp_path).stdout.startswith("fsref ")


@pytest.mark.parametrize("args", [("--help",), ("--version",), ("run", "--help")])
def test_starting_loads_no_heavy_package(tmp_path: Path, args: tuple[str, ...]) -> None:
    code = (
        "import sys\nsys.argv = ['fsref', *sys.argv[1:]]\nfrom fsref.cli import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        "loaded = {'torch', 'transformers', 'verifiers', 'numpy', 'zarr', 'fsspec', 'starlette'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code, *args], cwd=tmp_path, check=True, capture_output=True)


def test_launching_and_looking_load_no_torch_and_no_verifiers(tmp_path: Path) -> None:
    code = (
        "import sys, fsref.cli.launch, fsref.cli.show, fsref.cli.ledger, fsref.cli.check, fsref.cli.roles\n"
        "loaded = {'torch', 'transformers', 'verifiers', 'matplotlib', 'starlette'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)


def test_completion_offers_the_commands(tmp_path: Path) -> None:
    code = "import sys; sys.argv = ['fsref']; from fsref.cli import main; main()"
    env = {**os.environ, "_FSREF_COMPLETE": "complete_bash", "COMP_WORDS": "fsref in", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["inspect", "inference"]


def test_a_dry_run_prints_config_and_commands_and_makes_nothing(tmp_path: Path) -> None:
    done = fsref("run", "local.toml", "--dry-run", "--run.id", "r1", "--orchestrator.batch_size=32", cwd=tmp_path)
    assert done.returncode == 0
    assert "local.toml is not there; using the packaged" in done.stderr
    config, _, commands = done.stdout.partition("\n\n")
    assert json.loads(config)["orchestrator"]["batch_size"] == 32
    assert json.loads(config)["run"]["run_dir"] == str(tmp_path / "runs/r1")
    assert commands.count("\n# ") + commands.startswith("# ") == 6
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ("run", "nowhere.toml"),
            "the config 'nowhere.toml' does not exist; packaged ones: local-vllm.toml, local.toml, s3-embedded.toml, s3.toml, slurm.toml",
        ),
        (("run", "typo.toml"), "typo.toml: unknown key orchestrator.batchsize; did you mean orchestrator.batch_size?"),
        (
            ("run", "good.toml", "--orchestrator.batch_sze", "64"),
            "unknown key orchestrator.batch_sze; did you mean orchestrator.batch_size?",
        ),
        (("run", "good.toml", "--run.steps", "many"), "Expected `int`, got `str` at `run.steps`"),
        (("run", "good.toml", "--run.steps"), "the setting --run.steps needs a value"),
        (("run", "broken.toml"), "broken.toml: not valid TOML"),
        (("run", "good.toml", "--run.fields", '["routing"]'), "run.fields lists 'routing'"),
        (("run", "good.toml", "--run.id", "Not Legal"), "run.id: run id 'Not Legal' does not match"),
        (("run", "good.toml", "--run.root", "gopher://x", "--run.run_dir", "d"), "gopher"),
        (("trainer", "--config", "good.toml"), "run.id is empty: a role needs the id of its run"),
        (("trainer", "--config", "none.json"), "cannot read the config 'none.json': No such file"),
        (("inspect", "--run", "r9"), "no run 'r9'"),
    ],
)
def test_a_bad_config_or_command_line_is_one_line_and_exit_code_2(tmp_path: Path, args: tuple[str, ...], said: str) -> None:
    (tmp_path / "good.toml").write_text('[[env]]\nname = "demo"\n')
    (tmp_path / "typo.toml").write_text("[orchestrator]\nbatchsize = 64\n")
    (tmp_path / "broken.toml").write_text("[orchestrator\n")
    before = sorted(p.name for p in tmp_path.rglob("*"))
    assert said in refused(fsref(*args, cwd=tmp_path), 2)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_a_root_that_cannot_be_reached_is_one_line_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text('[[env]]\nname = "demo"\n')
    (tmp_path / "file").touch()
    done = fsref("run", "good.toml", "--run.root", "file/runs", "--run.id", "r1", cwd=tmp_path)
    assert "opening the root" in refused(done, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "good.toml"]


def test_audit_commands_say_2_where_there_is_no_verdict(tmp_path: Path) -> None:
    assert "which run?" in refused(fsref("audit", cwd=tmp_path), 2)
    (tmp_path / "r1").mkdir()
    (tmp_path / "r1/run.json").write_text("{}")
    for command in ("audit", "close", "recover"):
        assert "run.json cannot be read" in refused(fsref(command, "r1", cwd=tmp_path), 2)


def test_a_package_that_is_missing_names_its_extra(tmp_path: Path) -> None:
    """A role is run where its packages are hidden: one line, exit code 1."""
    hide = tmp_path / "sitecustomize.py"
    hide.write_text("import sys\nfor name in ('torch', 'verifiers', 'transformers'): sys.modules[name] = None\n")
    (tmp_path / "good.toml").write_text('run.id = "r1"\n[[env]]\nname = "demo"\n')
    for role, options, extra in (("trainer", (), "demo|torch"), ("env-server", ("--env", "demo"), "verifiers"), ("model", (), "demo")):
        done = fsref(role, "--config", "good.toml", *options, cwd=tmp_path, PYTHONPATH=str(tmp_path))
        said = refused(done, 1)
        assert any(f"pip install 'fsref[{e}]'" in said for e in extra.split("|")), said


def test_a_role_without_its_package_raises_missing_extra() -> None:
    class Hiding:
        """Finds nothing for one name."""

        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            del path, target
            if name == "fsref_needs_me":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Hiding)
    try:
        with pytest.raises(MissingExtra, match=r"needs the package 'fsref_needs_me'.*fsref\[demo\]"):
            find(Role("fsref_needs_me", "main", "demo"))
    finally:
        sys.meta_path.remove(Hiding)


def test_a_bug_in_our_own_code_keeps_its_traceback() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"fsref\.no_such_module"):
        find(Role("fsref.no_such_module", "main", "demo"))


def test_every_role_has_its_main() -> None:
    assert set(ROLES) == {"inference", "env-server", "orchestrator", "trainer", "eval", "model"}


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (ConfigError("a\n  b"), "a b", 2),
        (ObjectMissing("obj/x is not there"), "obj/x is not there", 1),
        (StoreFull(28, "No space left on device"), "No space left on device", 1),
        (FsrefError(), "FsrefError", 1),
    ],
)
def test_errors_read_as_one_line(error: FsrefError, line: str, code: int) -> None:
    assert (one_line(error), exit_code(error)) == (line, code)


def test_output_into_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m fsref doctor --root {tmp_path} | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""
