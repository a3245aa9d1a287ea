"""The records of a report: the JSON form of ``fsref inspect``, and what its tables show. No I/O."""

import msgspec

from fsref.inspection.load import LayerLoad
from fsref.inspection.status import Status
from fsref.objects import EntryInfo
from fsref.refs import Field, Schema


class FieldReport(msgspec.Struct, frozen=True):
    """One field over the samples of a step, or of one object."""

    name: str
    kind: str
    """Declaration in short, for example ``uint8[48,8] input``."""
    samples: int
    """Samples that hold it."""
    rows_missing: int
    """Token rows without data, among samples that hold it."""
    rows: int
    values: int
    """Ragged fields: values in all rows, from the references; else 0."""


class SampleReport(msgspec.Struct, frozen=True):
    """One sequence of a micro batch."""

    sample: str
    data_rank: int
    micro_batch: int
    tokens: int
    trained: int
    """Tokens in the loss."""
    reward: float
    advantage: float
    """Of the trained tokens, mean."""
    version: int
    padding: bool
    objects: tuple[str, ...]
    bytes: int
    fields: tuple[str, ...]
    missing: dict[str, int]
    """Missing rows by field, where there are any."""


class SliceReport(msgspec.Struct, frozen=True):
    """What one rank of a parallel layout would read of a step."""

    data_rank: int
    pipeline_rank: int
    context_rank: int
    tensor_rank: int
    micro_batches: int
    rows: int
    """Over all micro batches."""
    tokens: int
    padding: int
    """Rows where no token stands."""
    fields: tuple[str, ...]
    """Read by this rank: those without layers at the loss only."""
    layers: tuple[int, ...]
    """Global layer ids that it reads rows of."""
    bytes: int
    """Fetched from the store."""
    requests: int


class LayoutReport(msgspec.Struct, frozen=True):
    """``fsref inspect step_000012 --layout zigzag --context 2``."""

    run: str
    step: int
    layout: str
    context_ranks: int
    tensor_ranks: int
    multiple: int
    fields: tuple[str, ...]
    objects_bytes: int
    """Of the objects that the step names."""
    ranks: tuple[SliceReport, ...]


class RankReport(msgspec.Struct, frozen=True):
    """One data rank's file."""

    data_rank: int
    micro_batches: int
    samples: int
    padding: int
    tokens: int
    references: int
    owned: int


class StepReport(msgspec.Struct, frozen=True):
    """``fsref inspect step_000012``."""

    run: str
    step: int
    ms: int
    version: int
    samples: int
    tokens: int
    objects: int
    bytes: int
    complete: bool
    """Whether the rank files own exactly what was shipped."""
    ranks: tuple[RankReport, ...]
    fields: tuple[FieldReport, ...]
    states: dict[str, int]
    """Objects by state."""
    removed: dict[str, int]
    """Removed objects by ``<incarnation>: <reason>``."""
    rows: tuple[SampleReport, ...]
    status: dict[str, Status]
    load: tuple[LayerLoad, ...]
    """Expert load per layer over the objects that are still there; empty if none is."""
    load_objects: int
    notes: tuple[str, ...]
    metrics: dict[str, float]


class ObjectReport(msgspec.Struct, frozen=True):
    """``fsref inspect OBJECT``."""

    name: str
    status: Status | None
    """None: a file outside any run."""
    tokens: int = 0
    bytes: int = 0
    token_hash: str = ""
    codec: str = ""
    fields: tuple[FieldReport, ...] = ()
    arrays: tuple[EntryInfo, ...] = ()
    load: tuple[LayerLoad, ...] = ()


class StepLine(msgspec.Struct, frozen=True):
    """One published step of a run."""

    step: int
    samples: int
    tokens: int
    objects: int
    bytes: int
    version: int
    ms: int


class RunReport(msgspec.Struct, frozen=True):
    """``fsref inspect`` without a step or an object."""

    run: str
    run_uuid: str
    url: str
    ms: int
    fields: dict[str, str]
    codec: str
    steps: tuple[StepLine, ...]
    objects: int
    """Objects in the store now."""
    bytes: int
    incarnations: dict[str, int]
    """Journals by role."""


def kind_of(field: Field) -> str:
    """A field's declaration in short."""
    if field.ragged:
        return f"ragged({', '.join(f'{c.name} {c.dtype}' for c in field.columns)}) {field.alignment}"
    shape = ",".join(map(str, field.row_shape))
    experts = f" of {field.expert_count} experts" if field.expert_count else ""
    return f"{field.logical_dtype or field.dtype}[{shape}]{experts} {field.alignment}"


def codec_of(schema: Schema) -> str:
    """The codec in short."""
    return "none" if schema.codec.name == "none" else f"blosc {schema.codec.name} level {schema.codec.level}, bitshuffle"
