"""The guard against regressions of the hot path: counts of operations, which are the same on every machine.

Counted are reads and their bytes, opened files, chunks that are decoded and where to, Python calls per sample. Limits are what the
code does today and little room above it: a change that raises one is a mistake, or says why here.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from fsref.bench.shapes import payload, shape_of
from fsref.objects import ChunkJob, Fetch, Fetched, Memory, encode
from fsref.reader import DenseOut, Reader, allocate
from fsref.reader import chunks as placing
from fsref.refs import Codec, PayloadRef, Schema
from fsref.store import open_root
from fsref.store.base import Store
from fsref.writer import Receipts, Writer

TOKENS = 16_384
SHAPE = shape_of("qwen3-30b")


def python_calls(work: Callable[[], Any]) -> int:
    """Calls of Python functions by this thread while ``work`` runs."""
    count = 0

    def profile(frame: FrameType, event: str, arg: object) -> None:  # noqa: ARG001
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def reads_of_process() -> tuple[int, int]:
    """Reading system calls so far and their bytes, of all threads and of C code too; looking takes one or two itself."""
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(found["syscr"]), int(found["rchar"])


@pytest.fixture(scope="module", params=["lz4", "none"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Schema, PayloadRef]]:
    schema = SHAPE.schema(Codec(name=request.param))
    with open_root(str(tmp_path_factory.mktemp("root")), run="counts", create=True) as store:
        ref = Writer(store, schema, Receipts("c"), durability="process").put(payload(SHAPE, TOKENS))
        yield store, schema, ref


def test_a_sample_is_read_with_few_requests_and_no_byte_beside_its_chunks(
    stored: tuple[Store, Schema, PayloadRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, schema, ref = stored
    seen: Counter[str] = Counter()
    opened = os.open

    def count_open(path: Any, *args: Any, **kwargs: Any) -> int:
        seen["opens"] += str(path).endswith(".zip")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", count_open)
    with Reader(store, schema, threads=1) as reader:
        plan = reader.plan(ref)
        needed = sum(c.size for s in plan.segments for r in s.requests for c in r.chunks)
        out = {f.name: allocate(plan, schema, f.name) for f in schema.fields}
        before = reads_of_process()
        reader.read_into(plan, out)
        calls, byte_count = (a - b for a, b in zip(reads_of_process(), before, strict=True))
        assert calls >= reader.counters.requests > 0
    assert calls <= -(-ref.byte_count // (1 << 20)) + 2
    assert needed <= byte_count <= 1.001 * needed + 4096
    assert seen["opens"] <= calls


def test_every_chunk_is_decoded_once_and_all_but_the_small_ones_in_place(
    stored: tuple[Store, Schema, PayloadRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, schema, ref = stored
    whole: list[ChunkJob] = []
    parts: list[np.ndarray[Any, Any]] = []
    real_unpack, real_fetch, real_decode = placing.unpack, placing.fetch, placing.decode_chunk  # type: ignore[attr-defined]

    def unpack(stored: Any, jobs: Sequence[ChunkJob], codec: Codec, **kwargs: Any) -> Any:
        whole.extend(jobs)
        return real_unpack(stored, jobs, codec, **kwargs)

    def fetch(fd: int, reads: Sequence[Fetch], memory: Memory, codec: Codec) -> Fetched:
        found: Fetched = real_fetch(fd, reads, memory, codec)
        whole.extend(j for r in reads[: found.done] for j in r.jobs)
        return found

    def decode(packed: Any, out: np.ndarray[Any, Any], codec: Codec) -> None:
        parts.append(out)
        real_decode(packed, out, codec)

    monkeypatch.setattr(placing, "unpack", unpack)
    monkeypatch.setattr(placing, "fetch", fetch)
    monkeypatch.setattr(placing, "decode_chunk", decode)
    with Reader(store, schema, threads=1) as reader:
        plan = reader.plan(ref)
        out = {f.name: allocate(plan, schema, f.name) for f in schema.fields}
        reader.read_into(plan, out)
    wanted = sum(len(r.chunks) for s in plan.segments for r in s.requests)
    assert len(whole) + len(parts) == wanted
    routing = out["routed_experts"]
    assert isinstance(routing, DenseOut)
    in_place = sum(j.nbytes for j in whole if np.may_share_memory(j.out.bytes, routing.rows) and j.take == j.nbytes)
    assert in_place == routing.rows.nbytes


def test_planning_a_sample_takes_few_python_calls(stored: tuple[Store, Schema, PayloadRef]) -> None:
    store, schema, ref = stored
    with Reader(store, schema, threads=1) as reader:
        reader.plan(ref)
        assert python_calls(lambda: reader.plan(ref)) < 1_500


def test_putting_a_sample_takes_few_python_calls_and_system_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema, sample = SHAPE.schema(), payload(SHAPE, TOKENS)
    seen: Counter[str] = Counter()
    for name in ("fsync", "fdatasync", "rename", "replace", "link", "writev"):
        real = getattr(os, name)

        def count(*args: Any, name: str = name, real: Any = real, **kwargs: Any) -> Any:
            seen[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, count)
    with open_root(str(tmp_path), run="counts", create=True) as store:
        writer = Writer(store, schema, Receipts("c"), durability="node")
        writer.put(sample)
        seen.clear()
        assert python_calls(lambda: writer.put(sample)) < 6_000
    assert seen["fsync"] + seen["fdatasync"] <= 2
    assert seen["rename"] + seen["replace"] + seen["link"] == 1
    assert seen["writev"] <= 4


@pytest.mark.parametrize(("name", "packed_max"), [("qwen3-30b", 0.70), ("deepseek-v3", 0.78), ("experts-512", 0.75)])
def test_objects_stay_as_small_as_they_are(name: str, packed_max: float) -> None:
    shape = shape_of(name)
    sample = payload(shape, 2_500).checked(shape.schema())
    plain = encode(sample, shape.schema(Codec(name="none")))
    assert encode(sample, shape.schema()).byte_count < packed_max * plain.byte_count


def test_the_masks_of_a_short_branch_pack_although_their_count_is_odd() -> None:
    shape = shape_of("qwen3-30b").without(heads=False, masks=True)
    sample = payload(shape, 301).checked(shape.schema())
    masks = sample.fields["sampling_mask"]
    assert len(masks.columns["ids"]) % 8  # type: ignore[union-attr]
    packed = encode(sample, shape.schema())
    plain = encode(sample, shape.schema(Codec(name="none")))
    assert plain.byte_count - packed.byte_count > 0.3 * masks.columns["ids"].nbytes  # type: ignore[union-attr]
