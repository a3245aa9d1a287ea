"""Qwen3-MoE's forward pass over a key-value cache, for many sequences at once, with the experts that each token used.

Owns the arithmetic: the same operations in the same order as transformers' ``Qwen3MoeForCausalLM`` (norms, rotary phases and softmaxes in
float32, the rest in the weights' dtype), without its module overhead, which would dominate a model this small. Expert layers compute all
experts for all tokens and weigh unused ones by zero: right for a handful of experts, wasteful for many, so large models are refused.
Refuses sampling, scheduling and HTTP.

Shape letters: B sequences, T new tokens of each, N new tokens of all, C cached tokens, H hidden size, D head size, E experts,
K experts per token, L layers that route, V vocabulary.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fsref.errors import ConfigError, MissingExtra
from fsref.wire.modelconfig import ModelShape, read_model_shape

try:
    import torch
    from safetensors import SafetensorError, safe_open
    from torch.nn import functional
except ImportError as e:
    raise MissingExtra.of("demo", (e.name or "torch").partition(".")[0]) from e

EXPERTS_MAX: Final = 64
HIDDEN_MAX: Final = 2048
Tensors = Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes and constants of the network, from config.json."""

    shape: ModelShape
    hidden: int
    heads: int
    key_value_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    norm_topk: bool
    tied: bool
    eos_token_id: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """Weights of one decoder layer; ``gate`` is empty where the layer is dense (then one expert of weight one)."""

    norm_in: torch.Tensor
    norm_out: torch.Tensor
    qkv: torch.Tensor
    qk_norm: torch.Tensor
    """[query heads + key heads, D]."""
    out: torch.Tensor
    gate: torch.Tensor | None
    gate_up: torch.Tensor
    """[E, hidden, 2 * inner]."""
    down: torch.Tensor
    """[E, inner, hidden]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """One version of the policy, ready to run."""

    embed: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: torch.Tensor


def read_architecture(folder: str | Path) -> Architecture:
    """From ``<folder>/config.json``; raises ``ConfigError`` unless it is a Qwen3-MoE of a size that this server is for."""
    shape = read_model_shape(folder)
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("model_type") != "qwen3_moe":
        raise ConfigError(f'{path}: the demo server runs qwen3_moe, {config.get("model_type")!r} found; set inference.kind = "vllm"')
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    if shape.expert_count > EXPERTS_MAX or hidden > HIDDEN_MAX:
        raise ConfigError(
            f"{path}: {shape.expert_count} experts of hidden size {hidden} found; the demo server is for at most {EXPERTS_MAX} of "
            f'{HIDDEN_MAX}: set inference.kind = "vllm"'
        )
    if config.get("attention_bias") or config.get("use_sliding_window") or config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{path}: attention_bias, sliding windows and activations other than silu are not implemented by the demo server")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise ConfigError(f"{path}: rope_type {rope['rope_type']!r} is not implemented by the demo server")
    eos = config.get("eos_token_id")
    return Architecture(
        shape=shape,
        hidden=hidden,
        heads=heads,
        key_value_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        norm_topk=bool(config.get("norm_topk_prob", False)),
        tied=bool(config.get("tie_word_embeddings", False)),
        eos_token_id=eos if isinstance(eos, int) else None,
    )


def read_weights(folder: str | Path, arch: Architecture, dtype: torch.dtype) -> Weights:
    """Reads the folder's safetensors. Experts may be stored one by one (the hub's layout) or stacked (transformers' modules).

    Raises ``ConfigError`` if a tensor is missing, of another shape, or not finite: those weights would serve noise.
    """
    folder = Path(folder)
    tensors: dict[str, torch.Tensor] = {}
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"{folder} holds no *.safetensors")
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
        except (SafetensorError, OSError) as e:
            raise ConfigError(f"cannot read weights from {path}: {e}") from e
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"{folder}: tensor {name} holds values that are not finite")
    return build_weights(tensors, arch, dtype, source=str(folder))


def build_weights(tensors: Tensors, arch: Architecture, dtype: torch.dtype, *, source: str = "weights") -> Weights:
    """From a state dict with Hugging Face names; see ``read_weights``."""

    def take(name: str, *shape: int) -> torch.Tensor:
        if name not in tensors:
            raise ConfigError(f"{source}: tensor {name} is missing; is it of the same model?")
        if tuple(tensors[name].shape) != shape:
            raise ConfigError(f"{source}: tensor {name} is {tuple(tensors[name].shape)}, the model's config asks for {shape}")
        return tensors[name].to(dtype)

    embed = take("model.embed_tokens.weight", arch.shape.vocab_count, arch.hidden)
    return Weights(
        embed=embed,
        layers=tuple(_layer(take, tensors, arch, n) for n in range(arch.shape.layer_count)),
        norm=take("model.norm.weight", arch.hidden),
        head=embed if arch.tied else take("lm_head.weight", arch.shape.vocab_count, arch.hidden),
    )


def _layer(take: Any, tensors: Tensors, arch: Architecture, n: int) -> Layer:
    at, hidden, dim = f"model.layers.{n}", arch.hidden, arch.head_dim
    heads = {"q": arch.heads, "k": arch.key_value_heads, "v": arch.key_value_heads}
    routed = n in arch.shape.layer_ids
    gate_up, down = _experts(take, tensors, arch, f"{at}.mlp", routed=routed)
    return Layer(
        norm_in=take(f"{at}.input_layernorm.weight", hidden),
        norm_out=take(f"{at}.post_attention_layernorm.weight", hidden),
        qkv=torch.cat([take(f"{at}.self_attn.{name}_proj.weight", count * dim, hidden) for name, count in heads.items()]),
        qk_norm=torch.cat([take(f"{at}.self_attn.{name}_norm.weight", dim).expand(heads[name], dim) for name in ("q", "k")]),
        out=take(f"{at}.self_attn.o_proj.weight", hidden, arch.heads * dim),
        gate=take(f"{at}.mlp.gate.weight", arch.shape.expert_count, hidden) if routed else None,
        gate_up=gate_up.transpose(1, 2).contiguous(),
        down=down.transpose(1, 2).contiguous(),
    )


def _experts(take: Any, tensors: Tensors, arch: Architecture, at: str, *, routed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate and up [E, 2 * inner, hidden], down [E, hidden, inner])."""
    count, hidden = arch.shape.expert_count, arch.hidden
    stacked = f"{at}.experts.gate_up_proj"
    if routed and stacked in tensors:
        inner = tensors[stacked].shape[1] // 2
        return take(stacked, count, 2 * inner, hidden), take(f"{at}.experts.down_proj", count, hidden, inner)
    names = [f"{at}.experts.{e}" for e in range(count)] if routed else [at]
    first = f"{names[0]}.gate_proj.weight"
    inner = tensors[first].shape[0] if first in tensors else 0
    gate_up = [torch.cat([take(f"{e}.{part}_proj.weight", inner, hidden) for part in ("gate", "up")]) for e in names]
    return torch.stack(gate_up), torch.stack([take(f"{e}.down_proj.weight", hidden, inner) for e in names])


class Cache:
    """Keys and values of ``slots`` sequences of up to ``context`` tokens, and the experts that each token used.

    Slots in use are kept at ``0..n``: ``move`` puts the last one into a hole. Nothing is cleared: a token is only ever read
    after it was written, because attention looks no further than the sequence's length.
    """

    def __init__(self, arch: Architecture, *, slots: int, context: int, dtype: torch.dtype) -> None:
        layers, routed = arch.shape.layer_count, len(arch.shape.layer_ids)
        self.keys = torch.zeros(layers, slots, arch.key_value_heads, context, arch.head_dim, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.routes = torch.zeros(slots, context, routed, arch.shape.top_k, dtype=torch.int32)
        self.route_weights = torch.zeros(slots, context, routed, arch.shape.top_k)
        """The weight of each of them, as the expert outputs were summed with."""
        self.cos, self.sin = (t.to(dtype) for t in _phases(arch, context))

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first ``length`` tokens of one slot over another."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]
        self.routes[target, :length] = self.routes[source, :length]
        self.route_weights[target, :length] = self.route_weights[source, :length]


def _phases(arch: Architecture, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [context, D] of the rotary embedding."""
    dim = arch.head_dim
    inverse = 1.0 / (arch.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    angles = torch.arange(context).float()[:, None] * inverse
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Group:
    """Sequences that are fed equally many tokens in one pass: those that decode, or those that start."""

    slots: slice
    """B cache slots in a row."""
    token_ids: torch.Tensor
    """int64 [B, T]; shorter inputs are padded at the end."""
    starts: torch.Tensor
    """int64 [B]; the position of each sequence's first new token."""
    lasts: torch.Tensor
    """int64 [B]; the index in T of each sequence's last real token."""


@torch.inference_mode()
def forward(weights: Weights, arch: Architecture, cache: Cache, groups: Sequence[Group]) -> torch.Tensor:
    """Feeds every group its tokens and returns float32 logits [B, V] after the last one of each sequence, groups in order.

    Keys, values and routes of the new tokens are written to the cache. What padding writes lies behind its sequence, where the next real
    token overwrites it before anything looks.
    """
    views, first = [], 0
    for group in groups:
        views.append(_View(group, arch, first))
        first = views[-1].rows.stop
    positions_N = torch.cat([v.positions for v in views])
    slots_N = torch.cat([v.slots for v in views])
    cos_ND, sin_ND = cache.cos[positions_N][:, None], cache.sin[positions_N][:, None]
    x_NH = weights.embed[torch.cat([g.token_ids.reshape(-1) for g in groups])]
    routes = []
    heads = arch.heads + arch.key_value_heads
    for n, layer in enumerate(weights.layers):
        h = functional.linear(_norm(x_NH, layer.norm_in, arch.eps), layer.qkv).view(len(x_NH), -1, arch.head_dim)
        qk = _rotate(_norm(h[:, :heads], layer.qk_norm, arch.eps), cos_ND, sin_ND)
        keys, values = cache.keys[n], cache.values[n]
        keys[slots_N, :, positions_N] = qk[:, arch.heads :]
        values[slots_N, :, positions_N] = h[:, heads:]
        o_NH = torch.cat([v.attend(qk[v.rows, : arch.heads], keys, values) for v in views])
        x_NH = x_NH + functional.linear(o_NH, layer.out)
        y_NH, route = _experts_forward(_norm(x_NH, layer.norm_out, arch.eps), layer, arch)
        x_NH = x_NH + y_NH
        if route is not None:
            routes.append(route)
    cache.routes[slots_N, positions_N] = torch.stack([ids for ids, _ in routes], dim=1).int()
    cache.route_weights[slots_N, positions_N] = torch.stack([top for _, top in routes], dim=1)
    last_BH = x_NH[torch.cat([v.lasts for v in views])]
    return functional.linear(_norm(last_BH, weights.norm, arch.eps), weights.head).float()


class _View:
    """One group's part of the flat batch, and its attention."""

    def __init__(self, group: Group, arch: Architecture, first: int) -> None:
        self.count_b, self.count_t = group.token_ids.shape
        self.arch = arch
        positions_BT = group.starts[:, None] + torch.arange(self.count_t)
        self.context = int(group.starts.max()) + self.count_t
        self.group_slots = group.slots
        self.positions = positions_BT.reshape(-1)
        self.slots = torch.arange(group.slots.start, group.slots.stop).repeat_interleave(self.count_t)
        self.rows = slice(first, first + len(self.positions))
        self.lasts = first + torch.arange(self.count_b) * self.count_t + group.lasts
        # Query rows of one key-value head are its query heads times T, so that no key is repeated.
        seen_BTC = torch.arange(self.context) <= positions_BT[:, :, None]
        self.seen = seen_BTC[:, None].repeat(1, 1, arch.heads // arch.key_value_heads, 1)

    def attend(self, q_NHD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[N, heads * D] for this group's N tokens."""
        arch, b, t = self.arch, self.count_b, self.count_t
        q = q_NHD.view(b, t, arch.key_value_heads, -1, arch.head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        k, v = (c[self.group_slots, :, : self.context] for c in (keys, values))
        o = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.seen)
        return o.view(b, arch.key_value_heads, -1, t, arch.head_dim).permute(0, 3, 1, 2, 4).reshape(b * t, -1)


def _experts_forward(x_NH: torch.Tensor, layer: Layer, arch: Architecture) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """The layer's output for N tokens, with ids and weights [N, K] of the experts used (``None`` if the layer is dense)."""
    inner = torch.bmm(x_NH.expand(len(layer.gate_up), *x_NH.shape), layer.gate_up)
    gate, up = inner.chunk(2, dim=-1)
    out_ENH = torch.bmm(functional.silu(gate) * up, layer.down)
    if layer.gate is None:
        return out_ENH[0], None
    scores = functional.linear(x_NH, layer.gate).softmax(dim=-1, dtype=torch.float32)
    top, ids_NK = scores.topk(arch.shape.top_k, dim=-1)
    if arch.norm_topk:
        top = top / top.sum(dim=-1, keepdim=True)
    weight_NE = torch.zeros_like(scores, dtype=x_NH.dtype).scatter_(1, ids_NK, top.to(x_NH.dtype))
    return torch.bmm(weight_NE[:, None], out_ENH.transpose(0, 1))[:, 0], (ids_NK, top)
