"""Which layers a pipeline stage holds: the caller's lists of global layer ids, in any order and number, never derived from sizes.

``stages[rank]`` lists a rank's virtual stages, each a list of layer ids: ``[[[0, 1], [4, 5]], [[2, 3], [6]]]`` are two ranks with two
virtual stages each, uneven. Layers that a field does not have (dense ones, Mamba) may stand in them; they are skipped.
"""

from collections import Counter
from collections.abc import Sequence

from fsref.errors import ConfigError
from fsref.refs import Field

Stages = Sequence[Sequence[Sequence[int]]]


def rank_layers(stages: Stages, rank: int) -> tuple[int, ...]:
    """All layers of a rank, virtual stage by virtual stage. Raises ``ConfigError`` for a rank that there is not."""
    if not 0 <= rank < len(stages):
        raise ConfigError(f"pipeline rank {rank} of {len(stages)}: ranks count from 0")
    return tuple(layer for chunk in stages[rank] for layer in chunk)


def held_layers(field: Field, layers: Sequence[int]) -> tuple[int, ...]:
    """Of ``layers`` those that the field has rows for, in that order: the layer axis of what a rank reads."""
    known = set(field.layer_ids)
    return tuple(layer for layer in layers if layer in known)


def virtual_slices(field: Field, stages: Stages, rank: int) -> tuple[slice, ...]:
    """Where each virtual stage's layers lie on the layer axis of what the rank reads."""
    rank_layers(stages, rank)
    out, at = [], 0
    for chunk in stages[rank]:
        count = len(held_layers(field, chunk))
        out.append(slice(at, at + count))
        at += count
    return tuple(out)


def check_stages(field: Field, stages: Stages) -> None:
    """Every layer of the field must stand on exactly one rank. Raises ``ConfigError`` that names those that do not."""
    found = Counter(layer for rank in range(len(stages)) for layer in rank_layers(stages, rank))
    missing = [layer for layer in field.layer_ids if not found[layer]]
    twice = [layer for layer, count in found.items() if count > 1]
    if missing or twice:
        raise ConfigError(f"{len(stages)} pipeline stages: layers {missing} of field {field.name!r} are in none, layers {twice} in several")
