"""Tensors: dtypes that collectives carry, sentinels, layers of a pipeline stage, heads of different sizes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsref.errors import ConfigError, PayloadError
from fsref.plan import packed
from fsref.reader import Reader
from fsref.refs import Alignment, Dense, Field, FieldData, Payload, PayloadRef, Ragged, Schema, TokenRange, routed_experts, top_logprobs
from fsref.slices import read_slice, sources_of
from fsref.steps import MicroBatch, SampleSequence
from fsref.store import Store, open_root
from fsref.tensors import DenseTensor, ExpertIds, RaggedTensor, rank_batch
from fsref.trainer.replay import RouterReplay
from fsref.writer import Receipts, Writer


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_root(str(tmp_path), run="run", create=True)


def put(store: Store, schema: Schema, tokens: int, **fields: FieldData) -> PayloadRef:
    return Writer(store, schema, Receipts("t"), durability="process").put(Payload(np.arange(tokens, dtype=np.int32), fields))


def assembled(store: Store, schema: Schema, ref: PayloadRef, *, layers: list[int] | None = None, expert_ids: ExpertIds = "int32") -> Any:
    tokens = ref.token_count
    sequence = SampleSequence(
        sample="s", token_ids=bytes(4 * tokens), loss_mask=bytes(tokens), logprobs=bytes(4 * tokens), advantages=bytes(4 * tokens),
        ref=ref, temperature=1.0, padding=False,
    )  # fmt: skip
    with Reader(store, schema) as reader:
        got = read_slice(
            reader, sources_of([sequence], schema), schema, rows=packed([0, tokens], [0, tokens]), fields=[f.name for f in schema.fields],
            layers=layers, step=0, expert_shards=1,
        )  # fmt: skip
    return rank_batch(MicroBatch((sequence,)), got, schema, expert_ids=expert_ids).fields


@pytest.mark.payload("B5")
@pytest.mark.parametrize(("form", "dtype"), [("int32", torch.int32), ("int64", torch.int64), ("bytes", torch.uint8)])
def test_expert_ids_come_in_a_dtype_that_collectives_carry(store: Store, form: ExpertIds, dtype: torch.dtype) -> None:
    schema = Schema((routed_experts(layer_ids=range(2), top_k=2, expert_count=512),))
    rows = np.asarray([[[0, 255], [256, 511]], [[1, 2], [3, 4]], [[5, 6], [7, 8]]])
    got = assembled(store, schema, put(store, schema, 3, routed_experts=Dense(rows)), expert_ids=form)["routed_experts"]
    assert got.rows.dtype == dtype
    values = got.rows.numpy().view("<u2") if form == "bytes" else got.rows.numpy()
    assert values.tolist() == rows.tolist()
    got.rows.add_(0)


@pytest.mark.payload("B6", "B17")
def test_missing_rows_can_be_exported_as_a_sentinel(store: Store) -> None:
    schema = Schema((routed_experts(layer_ids=[0], top_k=2, expert_count=16),))
    ref = put(store, schema, 2, routed_experts=Dense(np.asarray([[[3, 1]], [[0, 0]]]), (TokenRange(1, 2),)))
    got = assembled(store, schema, ref)["routed_experts"]
    assert isinstance(got, DenseTensor)
    assert got.valid.tolist() == [True, False]
    assert got.with_sentinel().tolist() == [[[3, 1]], [[-1, -1]]]
    assert got.rows.tolist() == [[[3, 1]], [[3, 1]]], "the rows themselves stay fillers"


@pytest.mark.payload("C3", "C4", "C7")
def test_a_stage_gets_its_layers_and_their_ids_to_compare_with_what_it_consumed(store: Store) -> None:
    schema = Schema((routed_experts(layer_ids=[1, 2, 4, 5], top_k=1, expert_count=16, layers_per_chunk=2),))
    ref = put(store, schema, 2, routed_experts=Dense(np.asarray([[[1], [2], [4], [5]], [[6], [7], [8], [9]]])))
    whole = assembled(store, schema, ref)["routed_experts"]
    assert whole.layer_ids == (1, 2, 4, 5)
    stage = assembled(store, schema, ref, layers=[4, 1])["routed_experts"]
    assert stage.layer_ids == (4, 1)
    assert stage.rows[:, :, 0].tolist() == [[4, 1], [8, 6]]
    assert len(stage.layer_ids) == stage.rows.shape[1]


@pytest.mark.payload("C7")
def test_a_model_that_routes_in_layers_without_rows_is_refused() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8, "head_dim": 8, "vocab_size": 16}
    heads: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    config = Qwen3MoeConfig(**sizes, **heads)
    model = Qwen3MoeForCausalLM(config)
    with pytest.raises(ConfigError, match=r"covers the layers \[0\], but the model also routes in \[1\]"):
        RouterReplay(model, layer_ids=[0])
    replay = RouterReplay(model, layer_ids=[0, 1])
    with pytest.raises(PayloadError, match=r"the model needs \[tokens, 2, 2\]"), replay.block(torch.zeros(3, 4, 2), replay=True):
        pass


@pytest.mark.payload("B14")
def test_eight_bit_floats_come_back_as_themselves(store: Store) -> None:
    schema = Schema(
        (Field(name="hidden", alignment=Alignment.INPUT, dtype="uint8", row_shape=(4,), logical_dtype="float8_e4m3fn"),),
    )
    values = torch.tensor([[0.5, -1.0, 2.0, 0.0]]).to(torch.float8_e4m3fn)
    ref = put(store, schema, 1, hidden=Dense(values.view(torch.uint8).numpy()))
    got = assembled(store, schema, ref)["hidden"]
    assert got.rows.dtype == torch.float8_e4m3fn
    assert got.rows.float().tolist() == values.float().tolist()


@pytest.mark.payload("E7", "E10")
def test_heads_of_different_k_become_a_rectangle_on_request(store: Store) -> None:
    schema = Schema((top_logprobs(),))
    heads = Ragged(np.asarray([2, 0, 4], np.int32), {"ids": np.asarray([1, 2, 5, 6, 7, 8]), "logprobs": -np.arange(6, dtype=np.float32)})
    got = assembled(store, schema, put(store, schema, 3, top_logprobs=heads))["top_logprobs"]
    assert isinstance(got, RaggedTensor)
    wide = got.densified(width=4)
    assert wide.columns["ids"].tolist() == [[1, 2, -1, -1], [-1] * 4, [5, 6, 7, 8]]
    assert wide.columns["logprobs"].tolist() == [[0, -1, -np.inf, -np.inf], [-np.inf] * 4, [-2, -3, -4, -5]]
    assert wide.inside.sum(1).tolist() == wide.counts.tolist() == [2, 0, 4]
    assert got.densified(width=4, fill={"logprobs": 0}).columns["logprobs"][1].tolist() == [0, 0, 0, 0]
    with pytest.raises(PayloadError, match="row 2 has 4 values, which do not fit a width of 3"):
        got.densified(width=3)
