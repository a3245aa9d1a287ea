"""The whole pipeline with a real vLLM in inference's place: nothing else knows the difference.

Runs where ``FSREF_VLLM_PYTHON`` names an interpreter that has vLLM's CPU build and the capture plugin of ``tools/``.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.inference.vllm import NEEDS_VLLM, PYTHON
from tests.proofs.pipeline import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), NEEDS_VLLM]


def test_the_pipeline_trains_on_a_real_vllm_and_ends_proved(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "fsref", "run", str(ROOT / "configs" / "local-vllm.toml"), "--run.root", str(tmp_path), "--run.id", "vllm",
        "--run.steps=2", "--inference.python", PYTHON, "--env.0.replicas=1", "--env.0.workers=1", "--orchestrator.batch_size=8",
        "--orchestrator.group_size=4", "--orchestrator.filter_zero_advantage", "false", "--trainer.loss.compare_replay", "true",
        "--env.0.args.fork_share", "0.5", "--orchestrator.ahead_max=0",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "PROVED" in done.stdout
    assert [p for p in (tmp_path / "vllm" / "obj").rglob("*") if p.is_file()] == []
    events = [json.loads(line) for line in (tmp_path / "vllm" / "metrics.jsonl").read_text().splitlines()]
    steps = [e for e in events if e["role"] == "trainer" and "mismatch_kl/mean" in e]
    assert [e["step"] for e in steps] == [0, 1]
    for event in steps:
        assert event["routing/rows"] > 500
        assert event["routing/rows_different"] == 0
        assert event["mismatch_kl/fresh_tokens"] == event["loss/tokens"]
        assert 0 < event["mismatch_kl/fresh"] < 1e-2
        assert event["routing/rows_different_share_without_replay"] > 0
        assert event["payload/dropped_micro_batches"] == 0
        assert event["top_logprobs/share"] == 1.0
