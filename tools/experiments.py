"""The experiments behind docs/results.md: real runs of `fsref run`, their curves and tables. Every figure there comes from here.

    python -m tools.experiments learning   # three seeds, each also with shuffled advantages; writes docs/results/learning.{json,png}
    python -m tools.experiments replay     # with replay, beside the same batches routed by the trainer itself; docs/results/replay.json
    python -m tools.experiments bytes      # env server to orchestrator to trainer, inline against by reference; docs/results/bytes.json

Options after the name go to `fsref run` (for example --run.steps 8). Runs lie under $FSREF_EXPERIMENTS (default: a new temporary folder).
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from matplotlib.figure import Figure

from fsref import steps
from fsref.bench.measure import machine
from fsref.refs import Dense, Payload, Ragged, Schema, TokenRange, routed_experts, sampling_mask, top_logprobs
from fsref.store import open_root
from fsref.writer import Receipts, Writer
from tests.proofs.pipeline import inline_payload, watch
from tools.results import series

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
SEEDS = (0, 1, 2)


def main() -> int:
    name, *options = sys.argv[1:] or ["help"]
    experiments = {"learning": learning, "replay": replay, "bytes": bytes_moved}
    if name not in experiments:
        print(__doc__)
        return 2
    RESULTS.mkdir(parents=True, exist_ok=True)
    experiments[name](options)
    return 0


def run(config: str, run_id: str, options: Sequence[str]) -> Path:
    """One `fsref run`; returns its run folder. Raises if it did not end PROVED."""
    out = Path(os.environ.get("FSREF_EXPERIMENTS") or tempfile.mkdtemp(prefix="fsref-experiments-"))
    command = [sys.executable, "-m", "fsref", "run", str(ROOT / "configs" / config), "--run.root", str(out), "--run.id", run_id, *options]
    print("$", " ".join(command[1:]), flush=True)
    subprocess.run(command, check=True, cwd=ROOT)
    return out / run_id


def rise(rewards: Sequence[float]) -> dict[str, float]:
    """Mean of the last quarter of the steps minus the first quarter's, and its standard error from the scatter of steps."""
    n = max(2, len(rewards) // 4)
    first, last = rewards[:n], rewards[-n:]
    error = math.sqrt(statistics.variance(first) / n + statistics.variance(last) / n)
    gain = statistics.mean(last) - statistics.mean(first)
    return {"first": statistics.mean(first), "last": statistics.mean(last), "rise": gain, "standard_error": error, "ratio": gain / error}


def learning(options: Sequence[str]) -> None:
    """Mean reward by step, with advantages and with shuffled ones."""
    curves: dict[str, Any] = {}
    for shuffled in (False, True):
        for seed in SEEDS:
            label = f"seed {seed}{', shuffled advantages' if shuffled else ''}"
            extra = ["--run.seed", str(seed), *(["--orchestrator.shuffle_advantages", "true"] if shuffled else []), *options]
            folder = run("local.toml", f"learning-{seed}-{'shuffled' if shuffled else 'real'}", extra)
            rewards = series(folder, "orchestrator", "reward/mean")
            curves[label] = {"rewards": rewards, **rise(rewards)}
            print(label, {k: round(v, 4) for k, v in rise(rewards).items()}, flush=True)
    write("learning", {"machine": machine(), "options": list(options), "curves": curves})
    plot(curves)


def plot(curves: dict[str, Any]) -> None:
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for label, curve in curves.items():
        axes.plot(curve["rewards"], label=label, linestyle="--" if "shuffled" in label else "-", linewidth=1.5)
    axes.set_xlabel("training step")
    axes.set_ylabel("mean reward of the batch")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(RESULTS / "learning.png", dpi=110)


REPLAY_METRICS = (
    "mismatch_kl/fresh",
    "mismatch_kl/fresh_without_replay",
    "mismatch_kl/mean",
    "mismatch_kl/without_replay",
    "routing/rows_different_share",
    "routing/rows_different_share_without_replay",
)


def replay(options: Sequence[str]) -> None:
    """The same batches through the trainer with the sampler's routes and with its own."""
    out: dict[str, Any] = {}
    configs = {"demo server (bfloat16)": "local.toml"}
    if os.environ.get("FSREF_VLLM_PYTHON"):
        configs["vLLM"] = "local-vllm.toml"
    for label, config in configs.items():
        extra = ["--trainer.loss.compare_replay", "true", "--orchestrator.ahead_max", "0", *options]
        folder = run(config, f"replay-{label.split()[0].lower()}", extra)
        out[label] = {name: statistics.mean(series(folder, "trainer", name)) for name in REPLAY_METRICS}
        print(label, out[label], flush=True)
    write("replay", {"machine": machine(), "options": list(options), "means_over_steps": out})


def bytes_moved(options: Sequence[str]) -> None:
    """Bytes on both hops, per step: what was sent, and what the same payloads, repaired and uncut, would have added inline."""
    folder = Path(tempfile.mkdtemp(prefix="fsref-bytes-"))
    step_count = 6
    extra = ["--env.0.taskset", "tests.proofs.inline_tasks", "--orchestrator.filter_zero_advantage", "false", *options]
    run = watch(folder, config=ROOT / "configs" / "local.toml", step_count=step_count, options=extra, env={})
    if run.returncode:
        raise SystemExit(run.output[-3000:])
    arrays = {path.stem: inline_bytes(inline_payload(path)) for path in run.inline.glob("*.npz")}
    received = sum(series(run.run_dir, "orchestrator", "wire/bytes_received"))
    by_reference = sum(len(data) for r in run.ranks for data in steps.encode_rank_files([r]))
    shipped = [i for r in run.ranks for i in r.owned]
    inline_rank = sum(arrays[i.replace("/", "_")] for i in shipped)
    out = {
        "env server to orchestrator": {"by reference": received / step_count, "inline": (received + sum(arrays.values())) / step_count},
        "orchestrator to trainer": {"by reference": by_reference / step_count, "inline": (by_reference + inline_rank) / step_count},
    }
    whole = {"demo run, bytes a step": out, **real_sizes()}
    print(json.dumps(whole, indent=1), flush=True)
    write("bytes", {"machine": machine(), "options": list(options), **whole})


def inline_bytes(payload: Payload) -> int:
    """The msgpack form of a payload's arrays, as a message would carry them."""
    arrays: list[bytes] = []
    for data in payload.fields.values():
        parts = [data.rows] if isinstance(data, Dense) else [data.counts, *data.columns.values()]
        arrays += [np.ascontiguousarray(p).tobytes() for p in parts]
    return len(msgspec.msgpack.encode(arrays))


def real_sizes() -> dict[str, Any]:
    """One sample of Qwen3-30B-A3B's shape with all three fields: inline bytes, the reference, and its object."""
    rng = np.random.default_rng(0)
    schema = Schema((routed_experts(layer_ids=range(48), top_k=8, expert_count=128), top_logprobs(), sampling_mask()))
    out = {}
    for tokens in (16_384, 131_072):
        sampled = np.arange(tokens) >= tokens // 4
        counts = np.where(sampled, 128, 0).astype(np.int32)
        kept = np.where(sampled, rng.integers(1, 128, tokens), 0).astype(np.int32)
        payload = Payload(
            rng.integers(0, 150_000, tokens).astype(np.int32),
            {
                "routed_experts": Dense(rng.integers(0, 128, (tokens, 48, 8)).astype(np.uint8), (TokenRange(tokens - 1, tokens),)),
                "top_logprobs": Ragged(
                    counts,
                    {
                        "ids": rng.integers(0, 150_000, int(counts.sum())).astype(np.int32),
                        "logprobs": -rng.exponential(5, int(counts.sum())).astype(np.float32),
                    },
                ),
                "sampling_mask": Ragged(kept, {"ids": rng.integers(0, 150_000, int(kept.sum())).astype(np.int32)}),
            },
        )
        with tempfile.TemporaryDirectory() as folder, open_root(folder, run="sizes", create=True) as store:
            ref = Writer(store, schema, Receipts("sizes")).put(payload)
        inline = inline_bytes(payload)
        reference = len(json.dumps(ref.to_json(), separators=(",", ":")))
        out[f"one sample of {tokens} tokens, 48 x 8 of 128, heads of 128, masks"] = {
            "inline": inline, "reference": reference, "object": ref.byte_count, "inline / reference": round(inline / reference),
        }  # fmt: skip
    return out


def write(name: str, data: dict[str, Any]) -> None:
    (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
