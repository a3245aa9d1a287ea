"""The main job, small, with its three proofs: objects that any tool reads, byte identity with inline transport, real router replay."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr
from numpy.typing import NDArray

from fsref.config import StoreSection
from fsref.loader.fetch import StepFetcher
from fsref.plan import present_fields
from fsref.refs import Payload, PayloadRef, Schema, object_name
from fsref.steps import SampleSequence
from fsref.store import Store, open_root
from fsref.tensors import PackedMicroBatch
from tests.proofs.pipeline import ROOT, Watched, inline_payload, watch
from tests.support.payloads import cut
from tests.tensors.test_assembly import assert_identical, oracle

STEPS = 2
Opener = Callable[[], Store] | None
OPTIONS = [
    "--env.0.taskset", "tests.proofs.inline_tasks", "--env.0.args.fork_share", "0.4", "--env.0.args.two_turn_share", "0.4",
    "--env.0.workers=1", "--orchestrator.batch_size=16", "--orchestrator.group_size=4", "--orchestrator.sequence_tokens_max=90",
    "--orchestrator.tokens_per_micro_batch=300", "--orchestrator.filter_zero_advantage", "false",
    "--run.fields", '["routed_experts", "top_logprobs", "sampling_mask", "routing_weights"]',
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """Two steps on local.toml's shape, smaller, with forks, second turns, truncation and a field that fsref does not know by name."""
    return proved(tmp_path_factory.mktemp("pipeline"))


def proved(folder: Path, *, options: Sequence[str] = (), env: Mapping[str, str] = MappingProxyType({}), opened: Opener = None) -> Watched:
    """A run that ended well; further ``options`` and ``opened`` say where its root is."""
    config = folder / "proof.toml"
    config.write_text((ROOT / "configs" / "local.toml").read_text() + EXTRA)
    done = watch(folder, config=config, step_count=STEPS, options=[*OPTIONS, *options], env=dict(env), opened=opened)
    assert done.returncode == 0, done.output[-4000:]
    return done


EXTRA = """
[[field]]
name = "routing_weights"
alignment = "input"
dtype = "float32"
row_shape = [4, 4]
layer_ids = [0, 1, 2, 3]
"""


def sequences(run: Watched) -> Iterator[SampleSequence]:
    for rank in run.ranks:
        for micro_batch in rank.micro_batches:
            yield from micro_batch.sequences


def references(run: Watched) -> dict[str, PayloadRef]:
    return {s.ref.object_ids[0]: s.ref for s in sequences(run) if s.ref is not None and not s.padding}


def inline(run: Watched, object_id: str) -> Payload:
    return inline_payload(run.inline / (object_id.replace("/", "_") + ".npz"))


def test_the_run_ends_proved_and_leaves_nothing(run: Watched) -> None:
    assert "PROVED" in run.output
    assert [p for p in (run.run_dir / "obj").rglob("*") if p.is_file()] == []
    assert len(run.infos) == STEPS
    assert sum(i.n for i in run.infos) == len(references(run)) > 0


def test_the_run_has_the_shapes_that_the_proofs_are_about(run: Watched) -> None:
    traces = [s.sample.rsplit("/", 1)[0] for s in sequences(run) if not s.padding]
    assert len(traces) > len(set(traces)), "no trace has a second branch"
    assert any(s.ref.token_count < s.ref.hashed_count for s in sequences(run) if s.ref is not None), "no sample was truncated"
    assert any(len(m.sequences) > 1 for r in run.ranks for m in r.micro_batches), "nothing was packed"
    schema = run.infos[0].schema
    assert {f for r in references(run).values() for f in present_fields(r, schema)} == {
        "routed_experts",
        "top_logprobs",
        "sampling_mask",
        "routing_weights",
    }


def test_zarr_and_tensorstore_read_every_shipped_object_as_it_was_put(run: Watched) -> None:
    schema = run.infos[0].schema
    for object_id in references(run):
        path = run.copies / "proof" / object_name(object_id)
        given = inline(run, object_id)
        store = zarr.storage.ZipStore(path, mode="r")
        group = zarr.open_group(store, mode="r", zarr_format=3)
        for name, values in expected(given, schema).items():
            array = group[name]
            assert isinstance(array, zarr.Array)
            assert np.asarray(array[...]).tobytes() == values.tobytes(), f"{object_id} {name}"
            spec = {"driver": "zarr3", "kvstore": {"driver": "zip", "base": f"file://{path}", "path": f"{name}/"}}
            other = tensorstore.open(spec, open=True, read=True).result().read().result()
            assert np.ascontiguousarray(other).tobytes() == values.tobytes(), f"{object_id} {name}"
        store.close()


def expected(payload: Payload, schema: Schema) -> dict[str, NDArray[Any]]:
    out = {}
    for name, data in payload.fields.items():
        spec = schema.field(name)
        rows, columns = cut(data, 0, payload.token_count)
        if spec.ragged:
            out[f"{name}/counts"] = rows.astype(np.int32)
            out |= {f"{name}/{c.name}": columns[c.name].astype(c.dtype) for c in spec.columns}
        else:
            out[name] = rows.astype(spec.dtype)
    return out


def test_packed_tensors_are_byte_for_byte_those_of_inline_transport(run: Watched) -> None:
    schema = run.infos[0].schema
    compared = 0
    with open_root(str(run.copies), run="proof") as store, StepFetcher(store, schema, config=StoreSection()) as loader:
        for rank in run.ranks:
            for micro_batch, batch in zip(rank.micro_batches, loader.take(rank), strict=True):
                assert isinstance(batch, PackedMicroBatch)
                parts = [
                    (inline(run, s.ref.object_ids[0]), s.ref.token_count, s.token_count, s.padding)
                    if s.ref is not None
                    else (None, 0, s.token_count, s.padding)
                    for s in micro_batch.sequences
                ]
                assert_identical(batch, oracle(parts, schema), schema)
                compared += 1
            loader.release(rank.step)
    assert compared == sum(len(r.micro_batches) for r in run.ranks) > STEPS


class Logged:
    """The server's own log of routes, outside fsref: per completion its tokens and the experts of each."""

    def __init__(self, folder: Path) -> None:
        self._rows: dict[bytes, tuple[int, NDArray[Any]]] = {}
        for path in folder.glob("*.npz"):
            with np.load(path) as log:
                self._rows[log["token_ids"].astype(np.int32).tobytes()] = int(log["start"]), log["routes"]

    def check(self, token_ids: NDArray[np.int32], experts: NDArray[Any], valid: NDArray[np.bool_], *, shift: int = 0) -> tuple[int, int]:
        """(rows compared, rows that differ) over every completion that is a prefix of ``token_ids`` or has it as one."""
        compared = different = 0
        seen = np.zeros(len(token_ids), np.bool_)
        for raw, (start, routes) in self._rows.items():
            logged = np.frombuffer(raw, np.int32)
            shared = min(len(logged), len(token_ids))
            if not np.array_equal(logged[:shared], token_ids[:shared]):
                continue
            stop = min(start + len(routes), len(token_ids))
            for t in range(start, stop):
                if valid[t] and not seen[t] and t + shift < stop:
                    seen[t] = True
                    compared += 1
                    different += int(not np.array_equal(experts[t], routes[t + shift - start]))
        return compared, different


def dispatched(run: Watched) -> Iterator[tuple[NDArray[np.int32], NDArray[Any], NDArray[np.bool_]]]:
    """Per sequence: token ids, the experts that the trainer's forward really used, and which rows are real."""
    for path in sorted((run.run_dir / "routes").rglob("*.npz")):
        with np.load(path) as seen:
            ends = seen["cu_seqlens"]
            for n, start in enumerate(ends[:-1]):
                stop = ends[n + 1]
                if not seen["padding"][start]:
                    yield seen["token_ids"][start:stop].astype(np.int32), seen["experts"][start:stop], seen["valid"][start:stop]


def test_with_replay_no_row_routes_differently_from_what_the_server_logged(run: Watched) -> None:
    logged = Logged(run.routes_log)
    compared = different = rows = 0
    for token_ids, experts, valid in dispatched(run):
        n, bad = logged.check(token_ids, experts, valid)
        compared, different, rows = compared + n, different + bad, rows + int(valid.sum())
    assert different == 0
    assert compared == rows > 500


def test_rows_that_are_shifted_by_one_are_noticed(run: Watched) -> None:
    logged = Logged(run.routes_log)
    found = [logged.check(*sequence, shift=1) for sequence in dispatched(run)]
    assert sum(bad for _, bad in found) > sum(n for n, _ in found) / 2
