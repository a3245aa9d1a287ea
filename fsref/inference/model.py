"""Makes the tiny random Qwen3-MoE that the local run trains: weights, config and a tokenizer with Qwen3's special tokens.

Weights are drawn wider than a fresh model's, so that experts differ, routing has preferences, and a wrong route shows in the
mismatch KL. Everything follows from the seed and the sizes. Refuses to write into a folder that holds a model.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from fsref.config import Config
from fsref.errors import ConfigError, MissingExtra

try:
    import torch
    from safetensors.torch import save
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig
except ImportError as e:
    raise MissingExtra.of("demo", (e.name or "transformers").partition(".")[0]) from e

SPECIAL_TOKENS: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""In this order their ids are 0, 1, 2, ...; a turn ends with ``<|im_end|>``, id 2."""

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_WORDS: Final = (
    "zero one two three four five six seven eight nine ten plus minus times equals count sort reverse repeat copy letter word "
    "number answer question system user assistant tool hello world what is the sum of and or not first last next red green blue yes "
    "no true false sing long line table river mountain forest please write only with without from into after before left right "
    "above below small large"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of the tiny model; the defaults have a million parameters."""

    vocab_count: int = 512
    hidden: int = 64
    layers: int = 4
    heads: int = 4
    key_value_heads: int = 2
    head_dim: int = 32
    """vLLM's CPU attention has no kernel for less."""
    experts: int = 16
    top_k: int = 4
    expert_hidden: int = 64
    dense_hidden: int = 128
    dense_layers: tuple[int, ...] = ()
    """Layers with an ordinary MLP in place of experts."""
    context_tokens: int = 4096

    def __post_init__(self) -> None:
        if self.vocab_count < len(SPECIAL_TOKENS) + 256:
            raise ConfigError(f"vocab_count {self.vocab_count} is too small: {len(SPECIAL_TOKENS)} special tokens and 256 bytes are needed")
        if self.heads % self.key_value_heads or self.head_dim % 2:
            raise ConfigError(f"{self.heads} heads over {self.key_value_heads} key-value heads of size {self.head_dim} do not fit")
        if not 1 <= self.top_k <= self.experts:
            raise ConfigError(f"top_k {self.top_k} is not in 1..{self.experts}, the number of experts")


def make_model(folder: str | Path, *, seed: int, sizes: ModelSizes = ModelSizes()) -> None:
    """Writes config, bfloat16 safetensors and tokenizer into ``folder``, which is created.

    The same seed and sizes give the same bytes of weights. Raises ``ConfigError`` if the folder holds a model already.
    """
    folder = Path(folder)
    if (folder / "config.json").exists():
        raise ConfigError(f"{folder} holds a model already; choose another folder or set model.path to it")
    folder.mkdir(parents=True, exist_ok=True)
    _tokenizer(sizes.vocab_count).save_pretrained(folder)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: _draw(name, shape, generator) for name, shape in _shapes(sizes)}
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    _config(sizes).save_pretrained(folder)  # last: a folder with a config is complete


def main(config: Config) -> None:
    """The launcher's step before the roles start: makes ``config.model.path`` by ``config.run.seed``."""
    make_model(config.model.path, seed=config.run.seed)


def _shapes(sizes: ModelSizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Qwen3-MoE checkpoint in the layout of the Hugging Face hub: one entry per expert."""
    hidden = sizes.hidden
    yield "model.embed_tokens.weight", (sizes.vocab_count, hidden)
    for layer in range(sizes.layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        for name, heads in (("q", sizes.heads), ("k", sizes.key_value_heads), ("v", sizes.key_value_heads)):
            yield f"{at}.self_attn.{name}_proj.weight", (heads * sizes.head_dim, hidden)
        yield f"{at}.self_attn.o_proj.weight", (hidden, sizes.heads * sizes.head_dim)
        yield f"{at}.self_attn.q_norm.weight", (sizes.head_dim,)
        yield f"{at}.self_attn.k_norm.weight", (sizes.head_dim,)
        if layer in sizes.dense_layers:
            yield from _mlp_shapes(f"{at}.mlp", hidden, sizes.dense_hidden)
            continue
        yield f"{at}.mlp.gate.weight", (sizes.experts, hidden)
        for expert in range(sizes.experts):
            yield from _mlp_shapes(f"{at}.mlp.experts.{expert}", hidden, sizes.expert_hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (sizes.vocab_count, hidden)


def _mlp_shapes(at: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{at}.gate_proj.weight", (inner, hidden)
    yield f"{at}.up_proj.weight", (inner, hidden)
    yield f"{at}.down_proj.weight", (hidden, inner)


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Unit-variance activations everywhere: std 1/sqrt(inputs) for a projection, 1 for embeddings, ones for norms."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    std = 1.0 if "embed_tokens" in name else 1.0 / math.sqrt(shape[-1])
    return torch.empty(shape).normal_(0.0, std, generator=generator).to(torch.bfloat16)


def _config(sizes: ModelSizes) -> Any:
    make: Any = Qwen3MoeConfig  # its generated signature lacks fields that it takes
    return make(
        vocab_size=sizes.vocab_count,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.dense_hidden,
        moe_intermediate_size=sizes.expert_hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.key_value_heads,
        head_dim=sizes.head_dim,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        mlp_only_layers=list(sizes.dense_layers),
        max_position_embeddings=sizes.context_tokens,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index("<|im_end|>"),
        pad_token_id=SPECIAL_TOKENS.index("<|endoftext|>"),
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
    )


def _tokenizer(vocab_count: int) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_count,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = _WORDS.split()
    tokenizer.train_from_iterator([f"{a} {b}" for a in words for b in words], trainer)
    make: Any = PreTrainedTokenizerFast
    return make(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",  # noqa: S106  (a token of a vocabulary)
        pad_token="<|endoftext|>",  # noqa: S106
        chat_template=CHAT_TEMPLATE,
        model_max_length=1 << 20,
    )
