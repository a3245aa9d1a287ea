"""Who gets the figures: one line per event, a text file of the newest ones, a tracking run, and nothing that was not asked for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsref.config import Config, MetricsSection, build
from fsref.errors import ConfigError, MissingExtra
from fsref.events import Backends, Event, JsonLines, TextFile, check_installed, open_backends
from fsref.events.textfile import _number


def event(step: int, role: str = "trainer", **metrics: float) -> Event:
    return Event(role=role, step=step, metrics={name.replace("__", "/"): value for name, value in metrics.items()})


def run_python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])


def test_every_backend_gets_every_event_and_all_are_closed_although_one_raises(tmp_path: Path) -> None:
    told: list[str] = []

    class Listener:
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, event: Event) -> None:
            told.append(f"{self.name} {event.step}")

        def close(self) -> None:
            told.append(f"{self.name} closed")
            if self.name == "b":
                raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"), Backends([Listener("a"), Listener("b"), Listener("c")]) as hook:
        hook(event(3))
    assert told == ["a 3", "b 3", "c 3", "c closed", "b closed", "a closed"]
    with open_backends(MetricsSection(), tmp_path, run="r", role="trainer") as hook:
        hook(event(0, payload__fetch_time=0.5))
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (line["role"], line["step"], line["payload/fetch_time"]) == ("trainer", 0, 0.5)


def test_the_text_file_holds_the_newest_value_of_every_metric(tmp_path: Path) -> None:
    settings = MetricsSection(backends=("jsonl", "prometheus"), textfile_dir=str(tmp_path / "collector"))
    with open_backends(settings, tmp_path, run='we"ird\\\n', role="trainer") as hook:
        hook(event(4, payload__fetch_time=0.25, payload__dropped_micro_batches=2.0))
        hook(event(5, payload__fetch_time=0.5))
        hook(event(-1, payload__bytes_removed=7.0))
    (path,) = (tmp_path / "collector").iterdir()
    labels = '{run="we\\"ird\\\\\\n",role="trainer"}'
    assert path.read_text() == (
        f"# TYPE fsref_payload_bytes_removed gauge\nfsref_payload_bytes_removed{labels} 7.0\n"
        f"# TYPE fsref_payload_dropped_micro_batches gauge\nfsref_payload_dropped_micro_batches{labels} 2.0\n"
        f"# TYPE fsref_payload_fetch_time gauge\nfsref_payload_fetch_time{labels} 0.5\n"
        f"# TYPE fsref_step gauge\nfsref_step{labels} 5.0\n"
    )
    assert [_number(v) for v in (float("nan"), float("inf"), float("-inf"), 1e-9, 3.0)] == ["NaN", "+Inf", "-Inf", "1e-09", "3.0"]


def test_a_reader_never_sees_half_a_text_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = TextFile(tmp_path / "x.prom", run="r", role="trainer")
    hook(event(0, a=1.0))
    seen = []
    replace = Path.replace

    def watched(self: Path, to: Path) -> Path:
        seen.append((tmp_path / "x.prom").read_text())
        return replace(self, to)

    monkeypatch.setattr(Path, "replace", watched)
    hook(event(1, a=2.0))
    assert seen[0].endswith('fsref_step{run="r",role="trainer"} 0.0\n')
    assert [p.name for p in tmp_path.iterdir()] == ["x.prom"]


TRACKED = """
import json, sys
from pathlib import Path
from tests.support.fakewandb import Package
package = sys.modules["wandb"] = Package()
from fsref.config import MetricsSection
from fsref.events import Event, open_backends
settings = MetricsSection(backends=("jsonl", "wandb"), project="replay", name="nightly", mode="offline")
with open_backends(settings, Path(sys.argv[1]), run="r-1", role="trainer") as hook:
    for step, metrics in ((0, {"payload/fetch_time": 0.5, "payload/dropped_micro_batches": 1.0}), (1, {"payload/fetch_time": 0.25}),
                          (0, {"eval/reward": 1.0}), (-1, {"payload/bytes_removed": 9.0})):
        hook(Event(role="trainer", step=step, metrics=metrics))
(run,) = package.runs
print(json.dumps([run.settings, run.axes, run.logged, run.finished]))
"""


def test_a_tracking_run_gets_names_and_step_numbers_also_of_steps_that_come_late(tmp_path: Path) -> None:
    done = run_python(TRACKED, str(tmp_path))
    assert done.returncode == 0, done.stderr
    settings, axes, logged, finished = json.loads(done.stdout)
    assert settings == {
        "project": "replay", "name": "nightly-trainer", "group": "r-1", "job_type": "trainer", "id": "r-1-trainer", "resume": "allow",
        "dir": str(tmp_path), "mode": "offline",
    }  # fmt: skip
    assert axes == {"step": None, "*": "step"}, "the step is an axis of its own: the client's counter never goes back"
    assert logged == [
        {"payload/fetch_time": 0.5, "payload/dropped_micro_batches": 1.0, "step": 0},
        {"payload/fetch_time": 0.25, "step": 1},
        {"eval/reward": 1.0, "step": 0},
        {"payload/bytes_removed": 9.0},
    ]
    assert finished == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


WITHOUT = """
import sys
from pathlib import Path
sys.modules["wandb"] = None
from fsref.config import MetricsSection
from fsref.events import check_installed, open_backends
open_backends(MetricsSection(), Path(sys.argv[1]), run="r", role="trainer").close()
check_installed(MetricsSection())
print("so far")
{last}
"""


@pytest.mark.parametrize(
    "last",
    [
        'check_installed(MetricsSection(backends=("jsonl", "wandb")))',
        'open_backends(MetricsSection(backends=("jsonl", "wandb")), Path(sys.argv[1]), run="r", role="trainer")',
    ],
    ids=["before", "at the start"],
)
def test_the_package_is_needed_only_where_it_is_asked_for_and_then_named_with_its_extra(tmp_path: Path, last: str) -> None:
    done = run_python(WITHOUT.format(last=last), str(tmp_path))
    assert done.stdout == "so far\n"
    assert "MissingExtra: this needs the package 'wandb', which is not installed: pip install 'fsref[wandb]'" in done.stderr


def test_nothing_is_loaded_for_a_backend_that_nobody_named() -> None:
    code = "import sys, fsref.events; assert 'wandb' not in sys.modules; assert 'torch' not in sys.modules"
    assert run_python(code).returncode == 0


def test_a_client_that_refuses_to_start_is_told_and_the_others_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.fakewandb import Package

    closed: list[JsonLines] = []
    close = JsonLines.close

    def counted(lines: JsonLines) -> None:
        closed.append(lines)
        close(lines)

    monkeypatch.setitem(sys.modules, "wandb", Package("api_key not configured"))
    monkeypatch.setattr(JsonLines, "close", counted)
    with pytest.raises(ConfigError, match="wandb, which did not start: api_key not configured; run `wandb login`"):
        open_backends(MetricsSection(backends=("jsonl", "wandb")), tmp_path, run="r", role="trainer")
    assert len(closed) == 1


def test_the_settings_name_known_backends_once_and_always_the_lines_that_the_launcher_reads() -> None:
    assert build({"metrics": {"backends": ["jsonl", "wandb"], "project": "p"}}).metrics.project == "p"
    for wrong in (["wandb"], ["jsonl", "jsonl"], []):
        with pytest.raises(ConfigError, match="jsonl among them"):
            build({"metrics": {"backends": wrong}})
    with pytest.raises(ConfigError, match="tensorboard"):
        build({"metrics": {"backends": ["jsonl", "tensorboard"]}})


def test_a_run_with_a_backend_that_is_not_installed_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsref.config import RunSection
    from fsref.events import backends
    from fsref.pipeline.prepare import claim

    monkeypatch.setattr(backends, "installed", lambda: False)
    run = RunSection(id="r", root=str(tmp_path / "root"), run_dir=str(tmp_path / "root" / "r"))
    config = Config(run=run, metrics=MetricsSection(backends=("jsonl", "wandb")))
    with pytest.raises(MissingExtra, match="wandb"):
        claim(config)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(MissingExtra, match="wandb"):
        check_installed(config.metrics)
