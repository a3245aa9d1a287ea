"""Small models and packed micro batches, made by hand after the contract of ``fsref.tensors``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from fsref.tensors import DenseTensor, PackedMicroBatch, RaggedTensor
from fsref.trainer import attention

VOCABULARY = 48
EXPERTS = 8
TOP_K = 2
LAYERS = 3
DENSE_LAYERS = (1,)
MOE_LAYERS = (0, 2)


def tiny_config(**changes: Any) -> Qwen3MoeConfig:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": LAYERS,
        "mlp_only_layers": list(DENSE_LAYERS),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
    }
    return Qwen3MoeConfig(**{**settings, **changes})


def tiny_model(seed: int = 0, **changes: Any) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = Qwen3MoeForCausalLM(tiny_config(**changes, attn_implementation=attention.NAME))
    return model


def save_tiny_model(folder: Path, seed: int = 0) -> None:
    tiny_model(seed).save_pretrained(folder)  # type: ignore[operator]


def dense(rows: Any, valid: Any = None) -> DenseTensor:
    rows = torch.as_tensor(rows)
    return DenseTensor(rows=rows, valid=torch.ones(len(rows), dtype=torch.bool) if valid is None else torch.as_tensor(valid))


def ragged(lists: Sequence[Sequence[Any]], columns: Sequence[str] = ("ids",)) -> RaggedTensor:
    """From one list per token; an item is a value, or a tuple where there are several columns."""
    counts = torch.tensor([len(x) for x in lists], dtype=torch.int32)
    flat = [v if isinstance(v, tuple) else (v,) for x in lists for v in x]
    dtypes = {"ids": torch.int32, "logprobs": torch.float32}
    values = {name: torch.tensor([v[n] for v in flat], dtype=dtypes[name]) for n, name in enumerate(columns)}
    return RaggedTensor(counts=counts, columns=values, valid=torch.ones(len(lists), dtype=torch.bool))


def packed(
    sequences: Sequence[Sequence[int]],
    *,
    trained: Sequence[Sequence[int]],
    logprobs: Any = None,
    advantages: Any = None,
    temperature: float = 1.0,
    fields: dict[str, DenseTensor | RaggedTensor] | None = None,
) -> PackedMicroBatch:
    """``trained``: 0 or 1 per token, per sequence; logprobs and advantages flat over the packed tokens."""
    lengths = [len(s) for s in sequences]
    count = sum(lengths)
    mask = torch.tensor([v for t in trained for v in t], dtype=torch.bool)
    return PackedMicroBatch(
        token_ids=torch.tensor([v for s in sequences for v in s], dtype=torch.int64),
        position_ids=torch.cat([torch.arange(n) for n in lengths]) if lengths else torch.zeros(0, dtype=torch.int64),
        cu_seqlens=torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32),
        loss_mask=mask,
        logprobs=torch.zeros(count) if logprobs is None else torch.as_tensor(logprobs, dtype=torch.float32),
        advantages=torch.ones(count) if advantages is None else torch.as_tensor(advantages, dtype=torch.float32),
        temperature=torch.full((count,), temperature),
        padding=torch.zeros(count, dtype=torch.bool),
        fields=fields or {},
        samples=tuple(f"trace-{n}/0" for n in range(len(sequences))),
        bytes_read=0,
    )


def random_sequences(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, n).tolist() for n in lengths]


def random_routes(token_count: int, seed: int = 0, layers: int = len(MOE_LAYERS)) -> torch.Tensor:
    """int32 [T, L, K], distinct experts in each row, in no order."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.permuted(np.tile(np.arange(EXPERTS), (token_count, layers, 1)), axis=-1)[..., :TOP_K].astype(np.int32))
