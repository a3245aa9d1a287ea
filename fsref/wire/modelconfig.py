"""What a model folder's config.json says about its experts, read as plain JSON: no torch, no transformers.

The schema of a run (which layers have experts, how many, how many are used) is built from this by the launcher and the env servers.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Final

from fsref.errors import ConfigError

_EXPERTS: Final = ("num_experts", "n_routed_experts", "num_local_experts")
_LAYERS_MAX: Final = 4096


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The sizes of a mixture-of-experts model that its arrays depend on."""

    layer_ids: tuple[int, ...]
    """Ids of the layers that route, ascending; dense layers are left out."""
    layer_count: int
    """All decoder layers."""
    top_k: int
    """Experts per token."""
    expert_count: int
    """Experts per layer, shared ones not counted."""
    vocab_count: int
    """Token ids are in ``[0, vocab_count)``."""
    mtp_count: int = 0
    """Prediction layers behind the decoder (MTP). An engine that sends their rows sends them last; they are not decoder layers."""


def read_model_shape(folder: str | Path) -> ModelShape:
    """Reads ``<folder>/config.json``; raises ``ConfigError`` that names the file and the key."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"cannot read the model's {str(path)!r}: {e.strerror}") from e
    except (UnicodeDecodeError, json.JSONDecodeError) as e:
        raise ConfigError(f"{path}: not valid JSON: {e}") from e
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: a JSON object expected, {type(config).__name__} found")
    return model_shape(config, source=str(path))


def model_shape(config: dict[str, Any], *, source: str = "config.json") -> ModelShape:
    """From a Hugging Face config as plain data; a nested ``text_config`` (multimodal models) is looked into.

    Dense layers are recognised by the rules of the families that have them: ``mlp_only_layers`` and ``decoder_sparse_step``
    (Qwen2/3-MoE), ``first_k_dense_replace`` and ``moe_layer_freq`` (DeepSeek, GLM), ``hybrid_override_pattern`` (Nemotron-H: E routes; M, *
    and - do not), ``expert_layer_period`` and ``expert_layer_offset`` (Jamba). Raises ``ConfigError`` if the model has no experts.
    """
    nested = config.get("text_config")
    if isinstance(nested, dict) and not any(k in config for k in _EXPERTS):
        return model_shape(nested, source=f"{source}: text_config")
    expert_key = next((k for k in _EXPERTS if config.get(k)), None)
    if expert_key is None:
        raise ConfigError(f"{source}: none of {', '.join(_EXPERTS)} is set: the model has no experts, so it has no routing to keep")
    layer_count = _natural(config, "num_hidden_layers", source, high=_LAYERS_MAX)
    expert_count = _natural(config, expert_key, source, high=1 << 16)
    top_k = _natural(config, "num_experts_per_tok", source, high=expert_count)
    layer_ids = tuple(n for n in range(layer_count) if _routes(config, n, source))
    if not layer_ids:
        raise ConfigError(f"{source}: all {layer_count} layers are dense by its own rules")
    mtp_count = _natural(config, "num_nextn_predict_layers", source, low=0, high=_LAYERS_MAX, default=0)
    return ModelShape(layer_ids, layer_count, top_k, expert_count, _natural(config, "vocab_size", source, high=1 << 31), mtp_count)


def _routes(config: dict[str, Any], layer: int, source: str) -> bool:
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and "E" in pattern:
        return layer < len(pattern) and pattern[layer] == "E"
    if config.get("expert_layer_period"):
        period = _natural(config, "expert_layer_period", source)
        return layer % period == _natural(config, "expert_layer_offset", source, low=0, default=0)
    dense = config.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple):
        raise ConfigError(f"{source}: mlp_only_layers is {dense!r}, a list of layer ids expected")
    if layer in dense or layer < _natural(config, "first_k_dense_replace", source, low=0, default=0):
        return False
    freq = config.get("moe_layer_freq") or 1
    if isinstance(freq, list):  # one flag per layer
        return layer < len(freq) and bool(freq[layer])
    if layer % _natural(config, "moe_layer_freq", source, default=1):
        return False
    return (layer + 1) % _natural(config, "decoder_sparse_step", source, default=1) == 0


def _natural(config: dict[str, Any], key: str, source: str, *, low: int = 1, high: int = 1 << 31, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"{source}: {key} is {value!r}, a whole number in {low}..{high} expected")
    return value
