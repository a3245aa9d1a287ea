"""A disk that is full, as the command meets it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disks.tmpfs(tmp_path / "small", size="16k") as folder:
        yield folder


def run(root: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "fsref", "run", "local.toml", "--run.root", str(root), "--run.id", "r1"]
    return subprocess.run(command, cwd=root.parent, capture_output=True, text=True, check=False)


def test_a_disk_that_fills_while_the_model_is_made_is_one_line(small_disk: Path) -> None:
    done = run(small_disk)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: model exited with code 1: ")
    assert "disk that holds it is full" in done.stderr or "No space left" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert not (small_disk / "r1/run.json").exists()


def test_a_full_disk_is_one_line_and_no_run_is_left(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(b"x" * 16384)
    done = run(small_disk)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert [p.name for p in small_disk.iterdir()] == ["ballast"]
