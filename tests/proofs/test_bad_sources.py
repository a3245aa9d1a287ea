"""A run whose arrays cannot come ends with one clear line and a non-zero exit, leaving nothing behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proofs.pipeline import ROOT

ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "fsref", "run", str(ROOT / "configs" / "local.toml"), "--run.root", str(folder), "--run.id", "bad",
        "--run.steps=2", "--env.0.replicas=1", "--env.0.workers=1", "--orchestrator.batch_size=8", "--orchestrator.group_size=4", *options,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=ENV)


def assert_one_clear_line(done: subprocess.CompletedProcess[str], folder: Path, *words: str) -> None:
    assert done.returncode not in (0, None)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr[-3000:]
    for word in words:
        assert word in lines[0], lines[0]
    assert "Traceback" not in done.stderr + done.stdout
    assert [p for p in (folder / "bad" / "obj").rglob("*") if p.is_file()] == []


def test_a_sample_without_a_needed_field_names_the_field_and_the_fix(tmp_path: Path) -> None:
    done = run(tmp_path, "--sampling.top_k=-1", "--sampling.top_p=1.0")
    assert_one_clear_line(done, tmp_path, "sampling_mask", "run.fields", "top_k")


@pytest.fixture
def plain_address() -> Iterator[str]:
    """A plain verifiers server on a free loopback port."""
    command = [sys.executable, "-m", "tests.proofs.plain_server"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("address "))
        yield line.split()[1]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)


def test_a_source_served_by_a_plain_verifiers_server_is_named_as_such(tmp_path: Path, plain_address: str) -> None:
    done = run(tmp_path, "--env.0.serve_address", plain_address)
    assert_one_clear_line(done, tmp_path, "'demo'", plain_address, "plain verifiers server")
