"""How a step lies over the ranks of a parallel training run, and what each of them reads of it.

Owns the ``Parallel`` that a run states once, the place of a rank in it, and the plans of a rank for the micro batches of a step file: its
rows of each sequence, its layers, its fields. One planner for the loader, which reads, and for ``fsref inspect --layout``, which shows.
Refuses to guess: a layout, an order of ranks or lists of layers that are needed and not given are errors. No I/O, no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Final, NamedTuple, get_args

from fsref.config import ParallelAxis, ParallelSection, Targets
from fsref.errors import ConfigError
from fsref.plan import (
    ContextLayout,
    PackedRows,
    SlicePlan,
    Stages,
    check_stages,
    packed,
    padded_bounds,
    padding_count,
    plan_slice,
    rank_layers,
    rank_rows,
)
from fsref.refs import Schema
from fsref.refs.schema import LAYER_ID_MAX
from fsref.slices import sources_of
from fsref.steps import MicroBatch

AXES: Final[tuple[ParallelAxis, ...]] = get_args(ParallelAxis)


class Coordinate(NamedTuple):
    """A rank's place in a ``Parallel``: its number on every axis."""

    data: int = 0
    context: int = 0
    tensor: int = 0
    pipeline: int = 0


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The parallel layout of a training run; the same on every rank. The keys of ``[trainer.parallel]``."""

    data: int = 1
    """Data ranks; each has its own rank file in a step."""
    context: int = 1
    """Context parallel ranks, which share the rows of every sequence."""
    tensor: int = 1
    """Tensor parallel ranks."""
    pipeline: int = 1
    """Pipeline ranks."""
    layout: ContextLayout | None = None
    """How context ranks share rows; needed where there are several."""
    stages: Stages = ()
    """Global layer ids: per pipeline rank its virtual stages, each a list. Needed where there are several ranks; empty: all layers."""
    sequence: bool = False
    """Sequence parallelism: tensor ranks share the rows of a context rank. Off: all of them see the same rows."""
    sequence_multiple: int = 0
    """Every sequence is padded to a multiple of it before the split; 0: to the least that the layout divides."""
    multiple: int = 1
    """A context rank's rows are padded to a multiple of it, behind the split (all-gather: before it)."""
    expert_shards: int = 1
    """Expert parallel ranks that the experts of a layer are spread over; padding rows are balanced over them."""
    targets: Targets = "own"
    """Whose targets stand at a row: its token's own, or those of the ``next`` token, which it predicts. A split cuts them apart."""
    loss_stage: int = -1
    """Pipeline rank that has the logits, and reads the fields that have no layers; -1: the last."""
    order: tuple[ParallelAxis, ...] = ()
    """The axes, slowest first, that ranks are numbered along; needed where several have more than one rank."""

    def __post_init__(self) -> None:
        """Raises ``ConfigError`` for what is missing or does not fit together."""
        for axis in AXES:
            if self.ranks(axis) < 1:
                raise ConfigError(f"parallel: {self.ranks(axis)} {axis} ranks, there is at least one")
        self._check_layout()
        if self.pipeline > 1 and not self.stages:
            raise ConfigError(f"{self.pipeline} pipeline ranks need parallel.stages: the layer ids of each, for example 0-11;12-23")
        if self.stages and len(self.stages) != self.pipeline:
            raise ConfigError(f"parallel.stages lists the layers of {len(self.stages)} ranks, parallel.pipeline is {self.pipeline}")
        if not -1 <= self.loss_stage < self.pipeline:
            raise ConfigError(f"parallel.loss_stage is {self.loss_stage}, there are pipeline ranks 0 to {self.pipeline - 1}")
        if unknown := set(self.order) - set(AXES):
            raise ConfigError(f"parallel.order names {sorted(unknown)}; axes are {list(AXES)}")
        if len(set(self.order)) != len(self.order):
            raise ConfigError(f"parallel.order names an axis twice: {list(self.order)}")

    def _check_layout(self) -> None:
        if self.context > 1 and self.layout is None:
            raise ConfigError(
                f"{self.context} context ranks need parallel.layout ({', '.join(ContextLayout)}): frameworks that look alike lay tokens "
                f"out differently"
            )
        if self.multiple < 1 or self.sequence_multiple < 0:
            raise ConfigError(f"parallel: multiple {self.multiple} is at least 1, sequence_multiple {self.sequence_multiple} at least 0")
        if self.sequence and self.multiple % self.tensor:
            raise ConfigError(
                f"parallel.multiple is {self.multiple}, which {self.tensor} tensor ranks with sequence parallelism do not divide: "
                f"set a multiple of {self.tensor}"
            )
        if self.sequence_multiple % self.parts:
            raise ConfigError(
                f"parallel.sequence_multiple is {self.sequence_multiple}; {self.layout} over {self.context} ranks needs a multiple of "
                f"{self.parts}"
            )

    @classmethod
    def of(cls, section: ParallelSection) -> "Parallel":
        """From the config. Raises ``ConfigError``."""
        values = {name: getattr(section, name) for name in section.__struct_fields__}
        layout = ContextLayout(section.layout) if section.layout else None
        return cls(**(values | {"layout": layout, "stages": parse_stages(section.stages) or ()}))

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.data * self.context * self.tensor * self.pipeline

    @property
    def targets_ahead(self) -> int:
        """How many tokens further on a row's targets are: 0 or 1."""
        return int(self.targets == "next")

    def ranks(self, axis: ParallelAxis) -> int:
        """Ranks along one axis."""
        size: int = getattr(self, axis)
        return size

    @property
    def parts(self) -> int:
        """Equal parts that the layout cuts every sequence into."""
        return {ContextLayout.ZIGZAG: 2 * self.context, ContextLayout.CONTIGUOUS: self.context}.get(
            self.layout or ContextLayout.ALLGATHER, 1
        )

    def coordinate(self, rank: int) -> Coordinate:
        """Where rank ``rank`` of all stands. Raises ``ConfigError`` where the order is needed and not given, or there is no such rank."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} of {self.world_size}: ranks count from 0")
        several = [axis for axis in AXES if self.ranks(axis) > 1]
        order = self.order or tuple(several[:1])
        if missing := [axis for axis in several if axis not in order]:
            raise ConfigError(
                f"parallel.order {list(self.order)} leaves out {missing}: name the axes that ranks are numbered along, slowest first, "
                f"for example pipeline, data, context, tensor"
            )
        at: dict[str, int] = {}
        for axis in reversed(order):
            rank, at[axis] = divmod(rank, self.ranks(axis))
        return Coordinate(**at)

    def layers(self, at: Coordinate) -> tuple[int, ...] | None:
        """The rank's global layer ids, virtual stage by virtual stage; None for all."""
        return rank_layers(self.stages, at.pipeline) if self.stages else None

    def fields(self, schema: Schema, at: Coordinate) -> tuple[str, ...]:
        """What the rank reads: fields with layers wherever it has some of them, the others at the loss."""
        loss = at.pipeline == self.loss_stage % self.pipeline
        return tuple(f.name for f in schema.fields if f.layer_ids or loss)

    def check(self, schema: Schema) -> None:
        """Every layer of every field must be on exactly one pipeline rank. Raises ``ConfigError``."""
        for field in schema.fields:
            if self.stages and field.layer_ids:
                check_stages(field, self.stages)
            if field.expert_count % self.expert_shards:
                raise ConfigError(f"{field.expert_count} experts do not divide by parallel.expert_shards = {self.expert_shards}")


def data_parallel(section: ParallelSection) -> Parallel:
    """The layout of ``fsref trainer``. Raises ``ConfigError`` for one that needs a trainer of one's own."""
    parallel = Parallel.of(section)
    if parallel.world_size != parallel.data or parallel.multiple > 1 or parallel.sequence_multiple > 1 or parallel.targets != "own":
        raise ConfigError(
            "fsref trainer is data parallel and packs without padding: leave trainer.parallel.context, tensor, pipeline, multiple, "
            "sequence_multiple and targets at their defaults, or train with a trainer of your own over fsref.loader"
        )
    return parallel


@dataclass(frozen=True, eq=False)
class StepRows:
    """One rank's rows of the micro batches of a step file, and the reads for them. Sequences are numbered within their micro batch."""

    parallel: Parallel
    at: Coordinate
    micro_batches: Sequence[MicroBatch]

    @cached_property
    def _paddings(self) -> list[int]:
        """[M + 1]: padding rows of the sequences in the micro batches before; a step's padding rows have different slots."""
        return [0, *accumulate(padding_count(self._packed(m)) for m in self.micro_batches)]

    def whole(self, number: int) -> PackedRows:
        """Micro batch ``number`` before it is split, with the padding of its sequences."""
        rows = self._packed(self.micro_batches[number])
        return replace(rows, slots=tuple(slot + self._paddings[number] for slot in rows.slots))

    def of(self, number: int) -> PackedRows:
        """The rank's rows of micro batch ``number``. Raises ``ConfigError`` where something does not divide."""
        p = self.parallel
        return rank_rows(
            self.whole(number),
            p.layout or ContextLayout.ALLGATHER,  # with one context rank all layouts are the same
            context_rank=self.at.context,
            context_ranks=p.context,
            tensor_rank=self.at.tensor if p.sequence else 0,
            tensor_ranks=p.tensor if p.sequence else 1,
            multiple=p.multiple,
            first_slot=self._paddings[-1] + number * p.multiple * p.context,
        )

    def plan(self, number: int, schema: Schema, *, request_bytes_max: int, gap_bytes_max: int) -> SlicePlan:
        """What the rank reads of micro batch ``number``. Raises ``BadRef`` for a reference that does not add up."""
        return plan_slice(
            sources_of(self.micro_batches[number].sequences, schema),
            schema,
            rows=self.of(number),
            fields=self.parallel.fields(schema, self.at),
            layers=self.parallel.layers(self.at),
            request_bytes_max=request_bytes_max,
            gap_bytes_max=gap_bytes_max,
            targets_ahead=self.parallel.targets_ahead,
        )

    def _packed(self, micro_batch: MicroBatch) -> PackedRows:
        bounds = [0, *accumulate(s.token_count for s in micro_batch.sequences)]
        return packed(bounds, padded_bounds(bounds, multiple=self.parallel.sequence_multiple or self.parallel.parts))


def parse_stages(text: str) -> list[list[list[int]]]:
    """``0-2,7;3-6`` are two pipeline ranks; ``|`` separates a rank's virtual stages; empty for none. Raises ``ConfigError``."""
    return [[_layers(chunk) for chunk in rank.split("|")] for rank in text.split(";")] if text else []


def _layers(text: str) -> list[int]:
    out: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or max(int(first), int(last or 0)) > LAYER_ID_MAX:
            raise ConfigError(f"layers {part!r}: ids and ranges of them are meant, for example 0-2,7;3-6")
        out += range(int(first), int(last or first) + 1)
    return out
