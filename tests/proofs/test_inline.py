"""The inline transport that measurements compare with: what it packs is what the product's reader leaves, byte for byte."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsref.parallel import Coordinate, Parallel, StepRows
from fsref.reader import Reader
from fsref.refs import Dense, Payload, PayloadRef, Ragged, Schema, TokenRange
from fsref.slices import RankSlice, SliceBuffers
from fsref.steps import MicroBatch, RankFile, SampleSequence
from fsref.store import Store, open_root
from fsref.writer import Writer
from tests.support.payloads import Numbers, payload, schema
from tools.inline.messages import packed, packed_slice, unpacked
from tools.inline_run import MEAN_OF, PEAK_OF, below, figures, lines, planned

pytestmark = pytest.mark.torch  # layouts of ranks come with the loader

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_root(str(tmp_path), run="run", create=True)


def sequence(tokens: int, ref: PayloadRef | None, *, padding: bool = False) -> SampleSequence:
    blank = bytes(4 * tokens)
    return SampleSequence("s", blank, bytes(tokens), blank, blank, ref, padding=padding)


def same(one: RankSlice, other: RankSlice) -> None:
    assert set(one.fields) == set(other.fields)
    for name, data in one.fields.items():
        got: Any = other.fields[name]
        assert np.array_equal(one.valid[name], other.valid[name]), name
        assert data.missing == got.missing
        if isinstance(data, Dense):
            assert (data.rows.dtype, data.rows.tobytes()) == (got.rows.dtype, got.rows.tobytes()), name
            continue
        assert data.counts.tobytes() == got.counts.tobytes(), name
        assert {n: (c.dtype, c.tobytes()) for n, c in data.columns.items()} == {n: (c.dtype, c.tobytes()) for n, c in got.columns.items()}


def test_a_message_gives_back_the_arrays_and_what_is_missing() -> None:
    rng, run_schema = np.random.default_rng(0), schema()
    sent = payload(rng, run_schema, 40, missing={"routed_experts": [TokenRange(39, 40)], "spans": [TokenRange(0, 3)]}).checked(run_schema)
    got = unpacked(packed(sent))
    assert list(got) == list(sent.fields)
    for name, data in sent.fields.items():
        found: Any = got[name]
        assert found.missing == data.missing
        if isinstance(data, Ragged):
            assert np.array_equal(found.counts, data.counts)
            assert all(np.array_equal(found.columns[n], c) for n, c in data.columns.items())
        else:
            assert np.array_equal(found.rows, data.rows)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("expert_dtype", ["stored", "int32"])
def test_inline_packing_equals_what_the_reader_fetches(store: Store, seed: int, expert_dtype: Any) -> None:
    rng, run_schema = np.random.default_rng(seed), schema()
    writer = Writer(store, run_schema, Numbers(), durability="process")
    arrays, sequences = {}, [sequence(3, None)]
    for n in range(5):
        stored = int(rng.choice([2, 30, 500, 3000]))
        sent = payload(rng, run_schema, stored, missing={"routed_experts": [TokenRange(stored - 1, stored)]})
        if n == 1:
            sent = Payload(sent.token_ids, {k: v for k, v in sent.fields.items() if k != "sampling_mask"})
        kept = stored if n % 2 else int(rng.integers(1, stored + 1))
        ref = writer.put(sent)
        arrays[ref.object_ids[0]] = unpacked(packed(sent.checked(run_schema)))
        sequences.append(sequence(kept + int(rng.choice([0, 2])), ref.truncated(kept), padding=n == 4))
    micro_batch = MicroBatch(tuple(sequences))
    plan = _plan(store, run_schema, micro_batch)
    with Reader(store, run_schema) as reader:
        buffers = SliceBuffers(plan, run_schema, step=0, expert_shards=1, expert_dtype=expert_dtype)
        reader.read_into(plan.read, buffers.out)
        fetched = buffers.finish()
    same(fetched, packed_slice(micro_batch, arrays, plan, run_schema, expert_dtype=expert_dtype))


def test_inline_transport_is_for_data_parallel_ranks(store: Store) -> None:
    run_schema = schema()
    micro_batch = MicroBatch((sequence(8, Writer(store, run_schema, Numbers()).put(payload(np.random.default_rng(0), run_schema, 8))),))
    plan = _plan(store, run_schema, micro_batch)
    with pytest.raises(ValueError, match="data parallel ranks only"):
        packed_slice(MicroBatch((*micro_batch.sequences, sequence(2, None))), {}, plan, run_schema, expert_dtype="stored")


def _plan(store: Store, run_schema: Schema, micro_batch: MicroBatch) -> Any:
    rank = RankFile(v=1, run="run", step=0, data_rank=0, schema=run_schema, micro_batches=(micro_batch,), owned=())
    with Reader(store, run_schema) as reader:
        limits = {"request_bytes_max": reader.request_bytes_max, "gap_bytes_max": reader.gap_bytes_max}
    return StepRows(Parallel(), Coordinate(), rank.micro_batches).plan(0, run_schema, **limits)


def test_only_the_tools_own_processes_are_patched_and_only_if_asked(tmp_path: Path) -> None:
    asked = "import sys; from fsref.writer import Writer; import tools.inline.tasks as t; print(Writer.put is t.put)"

    def patched(transport: str) -> str:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "FSREF_TRANSPORT": transport}
        done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True, env=env, cwd=tmp_path, timeout=120)
        return done.stdout.strip()

    assert (patched("inline"), patched("reference"), patched("")) == ("True", "False", "False")


def test_runs_of_a_pair_differ_in_their_transport_only() -> None:
    plans = planned()
    for label, (transport, seed, options) in plans.items():
        if transport == "reference":
            assert plans[label.replace("reference", "inline")] == ("inline", seed, options)
    firsts = [transport for transport, _, options in plans.values() if not options][::2]
    assert set(firsts) == {"inline", "reference"}


def test_a_family_is_found_through_all_generations() -> None:
    assert below(1, {2: 1, 3: 2, 4: 9, 5: 3}) == [1, 2, 3, 5]


def test_figures_are_means_over_steps_and_highest_memory(tmp_path: Path) -> None:
    records = [
        {"role": "orchestrator", "step": n, "reward/mean": n + 1.0, "wire/bytes_received": 10.0, "memory/rss_peak_bytes": 100.0 + n}
        for n in range(2)
    ]
    named = {metric for role, metric in MEAN_OF.values() if role == "trainer"} | {"memory/rss_peak_bytes"}
    trainer = dict.fromkeys(named, 2.0)

    lines_ = [json.dumps(r) for r in records] + [json.dumps({"role": "trainer", "step": n, **trainer}) for n in range(2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines_))
    (tmp_path / "bytes").write_text("0 10\n1 30\n")
    found = figures(tmp_path, tmp_path / "bytes")
    assert (found["reward"], found["to the trainer, bytes"], found["orchestrator peak RSS, bytes"]) == (1.5, 20, 101.0)
    assert found["dropped micro batches"] == 2.0


def test_the_page_shows_each_seed_pair_and_what_is_not_comparable() -> None:
    def one(factor: float) -> dict[str, Any]:
        names = (*PEAK_OF, *MEAN_OF, "to the trainer, bytes")
        return dict.fromkeys(names, 100.0 * factor) | {"dropped micro batches": 0.0, "env_servers": {"peak_bytes": [10**8, 2 * 10**8]}}

    runs = {label: one((seed + 1) * (4 if transport == "inline" else 1)) for label, (transport, seed, _) in planned().items()}
    text = "\n".join(lines({"machine": "m", "runs": runs}))
    assert "| to the trainer | 200 B (100 B to 300 B) | 800 B (400 B to 1.2 kB) | 4.00 (4.00-4.00) |" in text
    assert "| dropped micro batches | 0 | 0 | - |" in text
    assert "| four replicas, highest | 100 MB to 200 MB | 100 MB to 200 MB |" in text
    assert "not comparable" in text
