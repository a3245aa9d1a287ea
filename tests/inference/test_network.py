"""The batched forward pass against transformers' modules on the same weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fsref.errors import ConfigError
from fsref.inference.network import Architecture, Cache, Group, Weights, build_weights, forward, read_architecture, read_weights

LENGTHS = (23, 9, 1)


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 512, (count,), generator=generator).tolist()


PROMPTS = [tokens(n, seed=n) for n in LENGTHS]


def group(first: int, inputs: list[list[int]], starts: list[int]) -> Group:
    width = max(map(len, inputs))
    return Group(
        slots=slice(first, first + len(inputs)),
        token_ids=torch.tensor([ids + [0] * (width - len(ids)) for ids in inputs]),
        starts=torch.tensor(starts),
        lasts=torch.tensor([len(ids) - 1 for ids in inputs]),
    )


def reference(folder: Path, ids: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' logits [T, V] and, from its own router modules' outputs, expert ids [T, layers, K]."""
    from transformers import Qwen3MoeForCausalLM

    model: Any = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model.eval()
    used: list[torch.Tensor] = []
    routers = [m for m in model.modules() if type(m).__name__ == "Qwen3MoeTopKRouter"]
    hooks = [m.register_forward_hook(lambda _m, _i, out: used.append(out[2])) for m in routers]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    for hook in hooks:
        hook.remove()
    return logits.float(), torch.stack(used, dim=1)


def run(weights: Weights, arch: Architecture, dtype: torch.dtype) -> tuple[torch.Tensor, Cache]:
    cache = Cache(arch, slots=4, context=64, dtype=dtype)
    return forward(weights, arch, cache, [group(0, PROMPTS, [0, 0, 0])]), cache


def test_float32_logits_and_routes_are_transformers(model_folder: Path, arch: Architecture) -> None:
    logits, cache = run(read_weights(model_folder, arch, torch.float32), arch, torch.float32)
    for row, ids in enumerate(PROMPTS):
        want, used = reference(model_folder, ids, torch.float32)
        torch.testing.assert_close(logits[row], want[-1], rtol=1e-5, atol=2e-5)
        assert torch.equal(cache.routes[row, : len(ids)].long(), used)


def test_bfloat16_logits_are_close_and_nearly_all_routes_equal(model_folder: Path, arch: Architecture) -> None:
    logits, cache = run(read_weights(model_folder, arch, torch.bfloat16), arch, torch.bfloat16)
    same = total = 0
    for row, ids in enumerate(PROMPTS):
        want, used = reference(model_folder, ids, torch.bfloat16)
        torch.testing.assert_close(logits[row], want[-1], rtol=0, atol=0.25)
        same += int((cache.routes[row, : len(ids)].long() == used).sum())
        total += used.numel()
    assert same / total > 0.9


def test_tokens_fed_one_by_one_beside_a_prefill_give_what_one_prefill_gives(model_folder: Path, arch: Architecture) -> None:
    weights = read_weights(model_folder, arch, torch.float32)
    ids = PROMPTS[0]
    cache = Cache(arch, slots=4, context=64, dtype=torch.float32)
    forward(weights, arch, cache, [group(0, [ids[:10], ids[:4]], [0, 0])])
    forward(weights, arch, cache, [group(0, [[ids[10]], [ids[4]]], [10, 4]), group(2, [ids[:20]], [0])])
    logits = forward(weights, arch, cache, [group(0, [[ids[11]], [ids[5]], [ids[20]]], [11, 5, 20])])
    whole, used = reference(model_folder, ids, torch.float32)
    torch.testing.assert_close(logits, whole[[11, 5, 20]], rtol=1e-5, atol=2e-5)
    for slot, count in enumerate((12, 6, 21)):
        assert torch.equal(cache.routes[slot, :count].long(), used[:count])


def test_a_moved_sequence_goes_on_as_if_it_had_stayed(model_folder: Path, arch: Architecture) -> None:
    weights = read_weights(model_folder, arch, torch.float32)
    cache = Cache(arch, slots=2, context=64, dtype=torch.float32)
    forward(weights, arch, cache, [group(0, [PROMPTS[1], PROMPTS[0][:-1]], [0, 0])])
    cache.move(1, 0, len(PROMPTS[0]) - 1)
    logits = forward(weights, arch, cache, [group(0, [[PROMPTS[0][-1]]], [len(PROMPTS[0]) - 1])])
    whole, used = reference(model_folder, PROMPTS[0], torch.float32)
    torch.testing.assert_close(logits[0], whole[-1], rtol=1e-5, atol=2e-5)
    assert torch.equal(cache.routes[0, : len(used)].long(), used)


def test_stacked_experts_are_the_same_weights(model_folder: Path, arch: Architecture) -> None:
    from transformers import Qwen3MoeForCausalLM

    stacked = Qwen3MoeForCausalLM.from_pretrained(model_folder, dtype=torch.float32).state_dict()
    assert "model.layers.0.mlp.experts.gate_up_proj" in stacked
    mine = build_weights(stacked, arch, torch.float32)
    assert torch.equal(run(mine, arch, torch.float32)[0], run(read_weights(model_folder, arch, torch.float32), arch, torch.float32)[0])


def damaged(folder: Path, out: Path, change: Any) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors")
    return out


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: t.pop("lm_head.weight"), r"lm_head\.weight is missing"),
        (lambda t: t.pop("model.layers.2.mlp.experts.5.up_proj.weight"), r"experts\.5\.up_proj\.weight is missing"),
        (lambda t: t.update({"model.norm.weight": torch.ones(31)}), r"model\.norm\.weight is \(31,\)"),
        (lambda t: t["model.embed_tokens.weight"].fill_(float("nan")), r"embed_tokens\.weight holds values that are not finite"),
    ],
)
def test_weights_that_are_not_this_models_are_refused_by_name(
    model_folder: Path, arch: Architecture, tmp_path: Path, change: Any, word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        read_weights(damaged(model_folder, tmp_path, change), arch, torch.float32)


def test_a_torn_or_absent_weights_file_is_refused(model_folder: Path, arch: Architecture, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no"):
        read_weights(tmp_path, arch, torch.float32)
    data = (model_folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match="cannot read weights"):
        read_weights(tmp_path, arch, torch.float32)


@pytest.mark.parametrize(
    ("over", "word"),
    [
        ({"model_type": "mixtral"}, "mixtral"),
        ({"num_local_experts": 128}, "128 experts"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
    ],
)
def test_models_that_it_cannot_serve_are_refused(model_folder: Path, tmp_path: Path, over: dict[str, Any], word: str) -> None:
    config = json.loads((model_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **over}))
    with pytest.raises(ConfigError, match=word):
        read_architecture(tmp_path)


def test_routes_are_expert_ids(model_folder: Path, arch: Architecture) -> None:
    _, cache = run(read_weights(model_folder, arch, torch.float32), arch, torch.float32)
    routes = cache.routes[0, : LENGTHS[0]].numpy()
    assert routes.shape == (LENGTHS[0], 2, 2)
    assert np.all((routes >= 0) & (routes < 8))
    assert np.all(routes[..., 0] != routes[..., 1])
