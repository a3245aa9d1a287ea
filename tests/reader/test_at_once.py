"""Local files are read many requests at once, by the kernels: what goes wrong there is done again, and counted as what it was."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsref.errors import ObjectCorrupt
from fsref.objects import Fetch, Fetched, native
from fsref.plan import ReadPlan
from fsref.reader import Reader, allocate, chunks
from fsref.reader.buffers import DenseOut
from fsref.reader.chunks import Placer
from fsref.refs import Codec, Dense, PayloadRef, Schema, TokenRange, object_name, routed_experts
from fsref.store.posix import PosixFile, PosixStore
from fsref.writer import Receipts, Writer
from tests.support import needs
from tests.support.payloads import payload, schema

TOKENS = 9000


class World:
    """One object, its file, and a reader that takes it in several requests."""

    def __init__(self, folder: Path, run_schema: Schema) -> None:
        needs.program("cc")
        assert native.KERNELS is not None
        self.schema = run_schema
        self.store = PosixStore(folder, create=True)
        self.arrays = payload(np.random.default_rng(1), run_schema, TOKENS).checked(run_schema)
        self.ref: PayloadRef = Writer(self.store, run_schema, Receipts("t"), durability="process").put(self.arrays)
        self.path = folder / object_name(self.ref.object_ids[0])
        self.data = self.path.read_bytes()
        self.path.chmod(0o600)

    def reader(self, **settings: Any) -> Reader:
        reader = Reader(self.store, self.schema, threads=1, **settings)
        reader.request_bytes_max = 1
        return reader


@pytest.fixture(params=["lz4", "none"])
def world(tmp_path: Path, request: pytest.FixtureRequest) -> World:
    return World(tmp_path, Schema((routed_experts(layer_ids=range(4), top_k=2, expert_count=100),), codec=Codec(name=request.param)))


def before_reads(monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
    """``then`` runs before every read that is done with a look at its errors."""
    for name in ("read_into", "read_scattered"):
        original = getattr(PosixFile, name)

        def read(self: PosixFile, offset: int, out: Any, original: Any = original) -> None:
            then()
            original(self, offset, out)

        monkeypatch.setattr(PosixFile, name, read)


def read_all(world: World, reader: Reader) -> ReadPlan:
    plan = reader.plan(world.ref)
    out = {f.name: allocate(plan, world.schema, f.name) for f in world.schema.fields}
    reader.read_into(plan, out)
    rows, put = out["routed_experts"], world.arrays.fields["routed_experts"]
    assert isinstance(rows, DenseOut)
    assert isinstance(put, Dense)
    assert np.array_equal(rows.rows, put.rows)
    return plan


def test_every_request_is_read_once_and_counted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    before_reads(monkeypatch, lambda: pytest.fail("the kernels left a request"))
    with world.reader() as reader:
        plan = read_all(world, reader)
        assert plan.request_count > 3
        assert (reader.counters.requests, reader.counters.bytes_fetched) == (plan.request_count, plan.byte_count)
        assert reader.counters.retries == 0


@pytest.mark.fault(43)
def test_a_chunk_that_was_damaged_once_is_a_retry_and_a_request_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    before_reads(monkeypatch, lambda: world.path.write_bytes(world.data))
    with world.reader() as reader:
        request = reader.plan(world.ref).segments[0].requests[2]
        at = request.offset + request.size // 2
        world.path.write_bytes(world.data[:at] + bytes([world.data[at] ^ 1]) + world.data[at + 1 :])
        plan = read_all(world, reader)
        assert reader.counters.retries == 1
        assert reader.counters.requests == plan.request_count + 1
        assert reader.counters.bytes_fetched == plan.byte_count + request.size


@pytest.mark.fault(43)
def test_a_chunk_that_stays_damaged_is_named(world: World) -> None:
    at = len(world.data) // 3
    world.path.write_bytes(world.data[:at] + bytes([world.data[at] ^ 1]) + world.data[at + 1 :])
    with world.reader(retry_s=1) as reader, pytest.raises(ObjectCorrupt, match=r"'routed_experts' rows \d+\.\.\d+: .* fails its crc32c"):
        read_all(world, reader)


@pytest.mark.fault(42)
def test_a_read_that_came_up_short_once_is_a_retry(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = Placer.fetch

    def cut_first(self: Placer, fd: int, reads: Sequence[Fetch]) -> Fetched:
        world.path.write_bytes(world.data[: reads[2].offset + 5])
        return fetch(self, fd, reads)

    monkeypatch.setattr(Placer, "fetch", cut_first)
    before_reads(monkeypatch, lambda: world.path.write_bytes(world.data))
    with world.reader() as reader:
        plan = read_all(world, reader)
        assert reader.counters.retries == 1
        assert (reader.counters.requests, reader.counters.bytes_fetched) == (plan.request_count, plan.byte_count)


def test_chunks_that_need_another_decoder_are_not_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of eight bytes, which the kernels leave to numcodecs."""
    fetch, found = Placer.fetch, []

    def seen(self: Placer, fd: int, reads: Sequence[Fetch]) -> Fetched:
        found.append((len(reads), fetch(self, fd, reads)))
        return found[-1][1]

    monkeypatch.setattr(Placer, "fetch", seen)
    world = World(tmp_path, schema())
    with world.reader() as reader:
        plan = read_all(world, reader)
        assert reader.counters.requests == plan.request_count
    assert found
    assert all(result == (count, count, False) for count, result in found)


def test_a_buffer_that_is_read_only_is_refused_and_stays_as_it_is(world: World) -> None:
    with world.reader() as reader:
        plan = reader.plan(world.ref)
        given = bytes(TOKENS * 8)
        rows = np.frombuffer(given, world.schema.fields[0].dtype).reshape(TOKENS, 4, 2)
        with pytest.raises(ValueError, match="read-only"):
            reader.read_into(plan, {"routed_experts": DenseOut(rows)})
    assert not any(given)


@pytest.mark.parametrize("codec", ["lz4", "none", "zstd"])
@pytest.mark.parametrize("layers_per_chunk", [0, 3])
@pytest.mark.parametrize("layers", [(10, 11, 12, 13), (14, 15, 16, 17), (12,), (13, 14), (11, 13), (17, 16)])
def test_layers_side_by_side_go_straight_to_their_places_and_others_by_scratch_memory(
    tmp_path: Path, codec: str, layers_per_chunk: int, layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    field = routed_experts(layer_ids=range(10, 18), top_k=2, expert_count=100, layers_per_chunk=layers_per_chunk)
    world = World(tmp_path, Schema((field,), codec=Codec(name=codec)))  # type: ignore[arg-type]
    apart: list[int] = []
    decode = chunks.decode_chunk  # type: ignore[attr-defined]

    def counted(stored: Any, out: Any, how: Codec) -> None:
        apart.append(len(out))
        decode(stored, out, how)

    monkeypatch.setattr(chunks, "decode_chunk", counted)
    rows = world.arrays.fields["routed_experts"]
    assert isinstance(rows, Dense)
    with world.reader() as reader:
        for tokens in (TokenRange(0, TOKENS), TokenRange(100, 5000), TokenRange(TOKENS - 1, TOKENS)):
            found = reader.read(world.ref, tokens=tokens, layers=layers)["routed_experts"]
            assert isinstance(found, Dense)
            assert np.array_equal(found.rows, rows.rows[tokens.start : tokens.stop][:, [layer - 10 for layer in layers]])
    side_by_side = list(layers) == list(range(layers[0], layers[-1] + 1))
    assert bool(apart) != side_by_side
