"""What a step holds, and what became of its objects.

Refuses to change anything, and to fail because of one bad object: what cannot be read is a note in the report.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from fsref.errors import BadRef, ObjectMissing, StepError, StoreError
from fsref.inspection.find import Place
from fsref.inspection.load import LayerLoad, LoadCounter, routing_field
from fsref.inspection.records import FieldReport, RankReport, SampleReport, StepReport, kind_of
from fsref.inspection.status import Status, statuses
from fsref.plan import missing_ranges, present_fields
from fsref.reader import Reader
from fsref.refs import Dense, Field, PayloadRef, Schema
from fsref.steps import RankFile, SampleSequence, StepInfo, check_counts, published, read_info, read_rank
from fsref.store import Store

LOAD_SAMPLES_MAX: Final = 512
"""Samples of a step whose routing is read for the expert load; the report says if that is not all."""
Progress = Callable[[int, int], None]
"""Called with (done, all) while objects are read."""


def _silent(done: int, total: int) -> None:
    del done, total


def step_report(place: Place, step: int, *, progress: Progress = _silent) -> StepReport:
    """Everything about one step. Raises ``ObjectMissing`` if it was not published (naming the steps that were), ``StepError``,
    ``StoreError``.
    """
    with place.open() as store:
        info = info_of(store, step)
        ranks = [read_rank(store, info, n) for n in range(info.data_ranks)]
        rows = tuple(_samples(ranks, info.schema))
        owned = [i for r in ranks for i in r.owned]
        status = statuses(place, store, owned)
        load = _step_load(store, info.schema, ranks, status, progress=progress)
    notes = load.notes
    try:
        check_counts(info, ranks)
        complete = True
    except StepError as e:
        complete = False
        notes.append(str(e))
    return StepReport(
        run=info.run,
        step=step,
        ms=info.ms,
        version=info.version,
        samples=info.samples,
        tokens=info.tokens,
        objects=info.n,
        bytes=info.bytes,
        complete=complete,
        ranks=tuple(_rank(r) for r in ranks),
        fields=tuple(_field(f, info.schema, ranks) for f in info.schema.fields),
        states=dict(Counter(s.state for s in status.values())),
        removed=dict(Counter(f"{s.by}: {s.reason}" for s in status.values() if s.state == "removed")),
        rows=rows,
        status=status,
        load=load.layers,
        load_objects=load.objects,
        notes=tuple(notes),
        metrics=info.metrics,
    )


def info_of(store: Store, step: int) -> StepInfo:
    """``STEP.json``; raises ``ObjectMissing`` that names the published steps if there is none."""
    try:
        return read_info(store, step)
    except ObjectMissing:
        there = published(store)
        said = f"published ones: {there[0]} to {there[-1]}" if there else "none is published"
        raise ObjectMissing(f"step {step} of {store.url} is not published; {said}") from None


def _sequences(ranks: Iterable[RankFile]) -> Iterable[tuple[int, int, SampleSequence]]:
    for rank in ranks:
        for number, micro_batch in enumerate(rank.micro_batches):
            for sequence in micro_batch.sequences:
                yield rank.data_rank, number, sequence


def _samples(ranks: Sequence[RankFile], schema: Schema) -> Iterable[SampleReport]:
    for data_rank, number, s in _sequences(ranks):
        mask = np.frombuffer(s.loss_mask, np.uint8).astype(bool)
        advantages = np.frombuffer(s.advantages, "<f4")[mask]
        yield SampleReport(
            sample=s.sample,
            data_rank=data_rank,
            micro_batch=number,
            tokens=s.token_count,
            trained=int(mask.sum()),
            reward=s.reward,
            advantage=float(advantages.mean()) if len(advantages) else 0.0,
            version=s.version,
            padding=s.padding,
            objects=s.ref.object_ids if s.ref else (),
            bytes=s.ref.byte_count if s.ref else 0,
            fields=present_fields(s.ref, schema) if s.ref else (),
            missing={n: sum(map(len, r)) for n, r in missing_ranges(s.ref, schema).items()} if s.ref else {},
        )


def _rank(rank: RankFile) -> RankReport:
    sequences = [s for m in rank.micro_batches for s in m.sequences]
    return RankReport(
        data_rank=rank.data_rank,
        micro_batches=len(rank.micro_batches),
        samples=sum(not s.padding for s in sequences),
        padding=sum(s.padding for s in sequences),
        tokens=sum(s.token_count for s in sequences),
        references=sum(s.ref is not None for s in sequences),
        owned=len(rank.owned),
    )


def _field(field: Field, schema: Schema, ranks: Sequence[RankFile]) -> FieldReport:
    refs = [s.ref for _, _, s in _sequences(ranks) if s.ref is not None and not s.padding and field.name in present_fields(s.ref, schema)]
    return FieldReport(
        name=field.name,
        kind=kind_of(field),
        samples=len(refs),
        rows=sum(r.token_count for r in refs),
        rows_missing=sum(sum(map(len, missing_ranges(r, schema).get(field.name, ()))) for r in refs),
        values=_values(field, schema, refs),
    )


def _values(field: Field, schema: Schema, refs: Sequence[PayloadRef]) -> int:
    if not field.ragged:
        return 0
    at = [f.name for f in schema.fields if f.ragged].index(field.name)
    return sum(r.stats[at][1] for r in refs if at < len(r.stats))


class _Load(NamedTuple):
    layers: tuple[LayerLoad, ...]
    objects: int
    notes: list[str]


def _step_load(store: Store, schema: Schema, ranks: Sequence[RankFile], status: dict[str, Status], *, progress: Progress) -> _Load:
    """Expert load over the kept tokens of the samples whose objects are still there."""
    field = routing_field(schema.fields)
    if field is None:
        return _Load((), 0, [])
    there = [ref for ref in _routed(field, schema, ranks) if all(_is_there(status, i) for i in ref.object_ids)]
    notes = [f"expert load is of {LOAD_SAMPLES_MAX} of {len(there)} samples"] if len(there) > LOAD_SAMPLES_MAX else []
    counter, objects = LoadCounter(field), 0
    with Reader(store, schema, threads=1, retries_max=0) as reader:
        for done, ref in enumerate(there[:LOAD_SAMPLES_MAX]):
            progress(done, min(len(there), LOAD_SAMPLES_MAX))
            try:
                data = reader.read(ref, fields=[field.name])[field.name]
            except (StoreError, BadRef) as e:
                notes.append(f"{', '.join(ref.object_ids)}: {e}")
                continue
            assert isinstance(data, Dense)
            counter.add(data, token_count=ref.token_count)
            objects += len(ref.object_ids)
    return _Load(counter.layers() if objects else (), objects, notes)


def _is_there(status: dict[str, Status], object_id: str) -> bool:
    return object_id in status and status[object_id].state in {"present", "removing"}


def _routed(field: Field, schema: Schema, ranks: Sequence[RankFile]) -> list[PayloadRef]:
    """References of samples that hold the field."""
    return [s.ref for _, _, s in _sequences(ranks) if s.ref is not None and not s.padding and field.name in present_fields(s.ref, schema)]
