"""The schema of a run: from the names in ``run.fields``, the model's config.json and the ``[[field]]`` tables. Pure."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from fsref.config import Config
from fsref.errors import ConfigError
from fsref.refs import Field, Schema, routed_experts, sampling_mask, top_logprobs
from fsref.wire.modelconfig import ModelShape, read_model_shape


def _routed_experts(shape: ModelShape, layers_per_chunk: int) -> Field:
    layers = len(shape.layer_ids)
    if layers_per_chunk > layers:
        raise ConfigError(f"payload.layers_per_chunk is {layers_per_chunk}, the model routes in {layers} layers")
    return routed_experts(
        layer_ids=shape.layer_ids,
        top_k=shape.top_k,
        expert_count=shape.expert_count,
        layers_per_chunk=layers_per_chunk,
        layer_count=shape.layer_count,
    )


KNOWN: Final[Mapping[str, Callable[[Config], Field]]] = MappingProxyType(
    {
        "routed_experts": lambda config: _routed_experts(read_model_shape(config.model.path), config.payload.layers_per_chunk),
        "top_logprobs": lambda _: top_logprobs(),
        "sampling_mask": lambda _: sampling_mask(),
    }
)
"""Fields that need no declaration; each is made from the model folder."""


def build_schema(config: Config) -> Schema:
    """The schema in the order of ``run.fields``. A ``[[field]]`` table wins over the declaration that this version has for its name.

    Raises ``ConfigError`` for a name that is neither known nor declared, for a declared one that ``run.fields`` does not list,
    or for a model folder that does not say what a field needs.
    """
    declared = {f.name: f for f in config.field}
    if idle := sorted(set(declared) - set(config.run.fields)):
        raise ConfigError(f"[[field]] declares {', '.join(idle)}, which run.fields does not list: add it there or remove the table")
    fields = []
    for name in config.run.fields:
        if name in declared:
            fields.append(declared[name])
        elif name in KNOWN:
            fields.append(KNOWN[name](config))
        else:
            raise ConfigError(f"run.fields lists {name!r}: not one of {', '.join(KNOWN)}, so it needs a [[field]] table that declares it")
    return Schema(fields=tuple(fields), codec=config.codec)


def check_names(config: Config) -> None:
    """The part of ``build_schema`` that needs no model folder, so that a typo is found before anything is made."""
    unknown = [n for n in config.run.fields if n not in KNOWN and n not in {f.name for f in config.field}]
    if unknown:
        raise ConfigError(f"run.fields lists {unknown[0]!r}: not one of {', '.join(KNOWN)}, so it needs a [[field]] table that declares it")
