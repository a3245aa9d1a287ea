"""What the env server loads: no torch, even where it is installed."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verifiers", reason="needs verifiers: install the extra of that name")

KEEP = """
import sys
from pathlib import Path

import numpy as np

import fsref.envserver.main
from fsref.envserver.capture import Capture, turn_arrays
from fsref.envserver.keep import KeepJob
from fsref.envserver.payloads import branch_payload
from fsref.episodes.branches import Branch
from fsref.journal.run import create_run
from fsref.reaper import EnvHolder
from fsref.refs import Schema, routed_experts
from fsref.store import open_root
from fsref.writer import Writer

folder = Path(sys.argv[1])
schema = Schema((routed_experts(layer_ids=[0, 1], top_k=2, expert_count=16),))
with open_root(str(folder), run="r1", create=True) as store:
    run = create_run(store, "r1", schema)
    with EnvHolder(store, folder / "r1" / "ledger", run=run, label="demo-0-0") as holder:
        capture = Capture()
        capture.open("t")
        rows = np.ones((3, 2, 2), np.uint8)
        capture.add("t", turn_arrays(prompt_ids=[1, 2], completion_ids=[3, 4], dense={"routed_experts": (0, rows)}, ragged={}))
        sampled = np.asarray([False, False, True, True])
        branch = Branch("t", 0, np.asarray([1, 2, 3, 4], np.int32), sampled, sampled, np.zeros(4, np.float32), ())
        payload = branch_payload(capture, branch, schema=schema, needed=("routed_experts",), missing="strict")
        kept = KeepJob(lambda: iter([(branch, payload)]), Writer(store, schema, holder), holder).run()
        assert kept["t", 0].token_count == 4
        holder.discard(kept["t", 0].object_ids)
print(sorted(m for m in sys.modules if m.split(".")[0] in ("torch", "transformers", "vllm")))
"""


def test_importing_the_env_server_and_one_keep_load_no_torch(tmp_path: Path) -> None:
    found = subprocess.run([sys.executable, "-c", KEEP, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "[]"


def test_episodes_load_no_server(tmp_path: Path) -> None:
    code = "import sys, fsref.episodes; print(sorted(m for m in sys.modules if m.startswith('fsref.envserver') or m == 'torch'))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert (found.returncode, found.stdout.strip()) == (0, "[]"), found.stderr
