"""References: what they weigh, what they refuse, and that they survive every way they travel."""

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsref.errors import BadRef, ConfigError, PayloadError
from fsref.plan import missing_ranges, present_fields
from fsref.refs import (
    Alignment,
    Column,
    Dense,
    Field,
    Payload,
    PayloadRef,
    Ragged,
    Schema,
    TokenRange,
    expert_dtype,
    flags_of,
    narrow,
    object_name,
    ranges_where,
    routed_experts,
    sampling_mask,
    split_object_id,
    token_hash,
    top_logprobs,
)
from fsref.store import open_root
from fsref.writer import Writer
from tests.support.payloads import INC, Numbers, payload, schema

QWEN3_30B = Schema((routed_experts(layer_ids=range(48), top_k=8, expert_count=128), top_logprobs(), sampling_mask()))


def real_size(tmp_path: Path, tokens: int, holes: int) -> PayloadRef:
    """A reference with values as random as they come (the worst case for sizes) and ``holes`` missing ranges per field."""
    rng = np.random.default_rng(tokens)
    gaps = [TokenRange(int(a), int(a) + 3) for a in np.sort(rng.choice(np.arange(tokens // 8 - 8), holes, replace=False)) * 8]
    light = Schema((routed_experts(layer_ids=range(2), top_k=8, expert_count=128), top_logprobs(), sampling_mask()))
    arrays = payload(rng, light, tokens, longest=100, missing={f.name: gaps for f in light.fields})
    with open_root(str(tmp_path), run="run", create=True) as store:
        return Writer(store, light, Numbers(), durability="process").put(arrays)


@pytest.mark.parametrize(("tokens", "limit"), [(16_384, 512), (131_072, 1024)])
def test_a_reference_with_eight_holes_per_field_fits_its_budget(tmp_path: Path, tokens: int, limit: int) -> None:
    ref = real_size(tmp_path, tokens, 8)
    text = json.dumps(ref.to_json(), separators=(",", ":"))
    assert len(text) <= limit
    assert PayloadRef.decode(json.loads(text)) == ref
    stats = json.dumps(ref.stats, separators=(",", ":"))
    assert len(stats) <= 64
    assert {n: len(r) for n, r in missing_ranges(ref, _schema_of(ref)).items()} == dict.fromkeys(
        ("routed_experts", "top_logprobs", "sampling_mask"), 8
    )


def _schema_of(ref: PayloadRef) -> Schema:
    light = Schema((routed_experts(layer_ids=range(2), top_k=8, expert_count=128), top_logprobs(), sampling_mask()))
    assert light.hash == ref.schema_hash
    return light


def test_a_reference_survives_json_msgpack_pickle_and_hashing(tmp_path: Path) -> None:
    ref = real_size(tmp_path, 3000, 2)
    assert PayloadRef.decode(json.loads(json.dumps(ref.to_json()))) == ref
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ref), type=PayloadRef) == ref
    assert pickle.loads(pickle.dumps(ref)) == ref
    assert len({ref, PayloadRef.decode(ref.to_json()), ref.truncated(5)}) == 2
    assert ref.text("run-1") == f"fsref:run-1/{INC}/0"


def test_truncation_clips_the_missing_ranges(tmp_path: Path) -> None:
    run_schema = schema()
    arrays = payload(np.random.default_rng(0), run_schema, 10, missing={"routed_experts": [TokenRange(2, 4), TokenRange(6, 10)]})
    with open_root(str(tmp_path), run="run", create=True) as store:
        ref = Writer(store, run_schema, Numbers()).put(arrays)
    assert missing_ranges(ref, run_schema) == {"routed_experts": (TokenRange(2, 4), TokenRange(6, 10))}
    assert missing_ranges(ref.truncated(7), run_schema) == {"routed_experts": (TokenRange(2, 4), TokenRange(6, 7))}
    assert missing_ranges(ref.truncated(2), run_schema) == {}


def test_a_field_without_a_real_row_is_absent(tmp_path: Path) -> None:
    run_schema = schema()
    arrays = payload(np.random.default_rng(0), run_schema, 4, missing={"routed_experts": [TokenRange(0, 4)]})
    with open_root(str(tmp_path), run="run", create=True) as store:
        ref = Writer(store, run_schema, Numbers()).put(arrays)
    assert present_fields(ref, run_schema) == ("top_logprobs", "sampling_mask", "indexer_picks", "spans")


HOSTILE = [
    f"{INC}/../0", "/etc/passwd", f"{INC}/%2e%2e", f"file:///{INC}/0", f"http://x/{INC}/0", f"simplecache::file://{INC}/0",
    f"{INC}/0\x00", f"{INC}/0\n", f"{INC}/" + "1" * 10_000, f"{INC}/00", f"{INC}/-1", f"{INC}", "env..0123456789abcdef/0",
    "ENV.a.0123456789abcdef/0", f"{INC}/٣",
]  # fmt: skip


@pytest.mark.parametrize("object_id", HOSTILE)
@pytest.mark.fault(54)
def test_a_hostile_object_id_is_refused_before_any_io(object_id: str) -> None:
    with pytest.raises(BadRef):
        split_object_id(object_id)
    with pytest.raises(BadRef):
        PayloadRef.decode(["AAAAAAAAAAA=", 1, "AAAAAAAAAAA=", 1, [[object_id, 9, 0, 1, 0, ""]]])


GOOD: list[Any] = ["AAAAAAAAAAA=", 1, "AAAAAAAAAAA=", 1, [[f"{INC}/0", 9, 0, 1, 0, "AQA="]]]


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, "AAAA"), (1, 2), (1, -1), (2, ""), (3, 1 << 40), (3, 0), (4, [[f"{INC}/0", 0, 0, 1, 0, ""]]), (4, [[f"{INC}/0", 9, 1, 0, 0, ""]]),
     (4, [[f"{INC}/0", 9, 0, 1, 1, ""]]), (4, "x"), (1, "1"), (1, 1.5), (4, [[f"{INC}/0", 9, 0, 1, 0, "A" * 100_000]])],
)  # fmt: skip
def test_a_malformed_reference_is_refused(place: int, value: Any) -> None:
    PayloadRef.decode(GOOD)
    bad = list(GOOD)
    bad[place] = value
    with pytest.raises(BadRef):
        PayloadRef.decode(bad)
    others: list[Any] = [None, {}, [], "fsref:x", [*GOOD, "", [], 1, 2]]
    for other in others:
        with pytest.raises(BadRef):
            PayloadRef.decode(other)


def test_object_names_are_built_from_validated_parts_only() -> None:
    assert object_name(f"{INC}/42") == f"obj/{INC}/0000000042.zip"


def test_the_token_hash_depends_on_the_ids_alone() -> None:
    ids = [1, 2, 70_000]
    assert token_hash(ids) == token_hash(np.asarray(ids, ">i8")) == token_hash(np.asarray([*ids, 9], np.int32)[:3])
    assert token_hash(ids) != token_hash(ids[:2])
    assert token_hash([]) == token_hash(np.zeros(0, np.int32))


def test_the_expert_dtype_follows_from_the_count_not_the_values() -> None:
    assert [expert_dtype(n) for n in (1, 256, 257, 65536)] == ["uint8", "uint8", "uint16", "uint16"]
    for count in (0, 65537):
        with pytest.raises(ConfigError):
            expert_dtype(count)
    wide = Schema((routed_experts(layer_ids=[0], top_k=4, expert_count=512),))
    rows = np.asarray([[[0, 255, 256, 511]]])
    got = Payload(np.zeros(1, np.int32), {"routed_experts": Dense(rows)}).checked(wide).fields["routed_experts"]
    assert isinstance(got, Dense)
    assert got.rows.dtype == np.uint16
    assert got.rows.ravel().tolist() == [0, 255, 256, 511]


def test_any_byte_order_stride_and_read_only_input_is_normalised() -> None:
    run_schema = Schema((Field(name="x", alignment=Alignment.INPUT, dtype="uint16", row_shape=(2, 3)),))
    plain = np.arange(24, dtype=np.uint16).reshape(4, 2, 3)
    locked = plain.copy()
    locked.flags.writeable = False
    for given_rows in (plain.astype(">u2"), np.asfortranarray(plain), plain.astype(np.int64), np.repeat(plain, 2, 0)[::2], locked):
        got = Payload(np.zeros(4, np.int32), {"x": Dense(given_rows)}).checked(run_schema).fields["x"]
        assert isinstance(got, Dense)
        assert got.rows.dtype == np.dtype("<u2")
        assert got.rows.flags.c_contiguous
        assert np.array_equal(got.rows, plain)


def test_narrowing_never_changes_a_value() -> None:
    assert narrow("x", np.asarray([0, 255]), "uint8").tolist() == [0, 255]
    for values, dtype in (([300], "uint8"), ([-1], "uint16"), ([2], "bool"), ([1 << 31], "int32")):
        with pytest.raises(PayloadError, match="'x'"):
            narrow("x", np.asarray(values), dtype)
    for array, wanted in ((np.asarray([0.5]), "float16"), (np.asarray([1.0]), "int32"), (np.asarray([1]), "float32")):
        with pytest.raises(PayloadError):
            narrow("x", array, wanted)


def test_missing_ranges_must_be_ascending_and_apart() -> None:
    run_schema = schema()
    for ranges in ([TokenRange(2, 2)], [TokenRange(1, 3), TokenRange(3, 4)], [TokenRange(3, 9)], [TokenRange(3, 4), TokenRange(0, 1)]):
        data = Dense(np.zeros((4, 3), np.uint16), tuple(ranges))
        with pytest.raises(PayloadError, match="ascending"):
            Payload(np.zeros(4, np.int32), {"indexer_picks": data}).checked(run_schema)
    mask = Ragged(np.asarray([1, 0, 0, 0]), {"ids": np.zeros(1, np.int32)}, (TokenRange(0, 1),))
    with pytest.raises(PayloadError, match="declared missing but has values"):
        Payload(np.zeros(4, np.int32), {"sampling_mask": mask}).checked(run_schema)


@given(st.lists(st.booleans(), max_size=60))
def test_flags_and_ranges_are_inverse(flags: list[bool]) -> None:
    array = np.asarray(flags, np.bool_)
    ranges = ranges_where(array)
    assert flags_of(ranges, len(flags)).tolist() == flags
    assert all(a.stop < b.start for a, b in itertools.pairwise(ranges))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Field(name="Bad", alignment=Alignment.INPUT, dtype="uint8"),
        lambda: Field(name="x", alignment=Alignment.INPUT, dtype="object"),
        lambda: Field(name="x", alignment=Alignment.INPUT, dtype="uint8", columns=(Column("ids", "int32"),)),
        lambda: Field(name="x", alignment=Alignment.INPUT, dtype="uint8", row_shape=(2,), layer_ids=(0, 1, 2)),
        lambda: Field(name="x", alignment=Alignment.INPUT, dtype="uint8", row_shape=(2,), layer_ids=(1, 1)),
        lambda: Field(name="x", alignment=Alignment.INPUT, dtype="uint8", expert_count=512),
        lambda: Field(name="x", alignment=Alignment.INPUT, dtype="int16", logical_dtype="bfloat16"),
        lambda: Column("counts", "int32"),
        lambda: Column("ids", "O"),
        lambda: Schema((top_logprobs(), top_logprobs())),
        lambda: Schema(()),
    ],
)
def test_a_schema_that_cannot_be_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


def test_the_schema_hash_names_everything_that_is_equal_for_a_run() -> None:
    assert schema().hash == schema().hash
    assert len({schema().hash, schema(experts=17).hash, schema(layers_per_chunk=2).hash, QWEN3_30B.hash}) == 4
    assert msgspec.json.decode(msgspec.json.encode(schema()), type=Schema).hash == schema().hash
