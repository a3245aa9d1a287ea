"""What one object holds while it is there, and its fate."""

from collections.abc import Sequence
from pathlib import Path

from fsref.inspection.find import Place
from fsref.inspection.load import LayerLoad, LoadCounter, routing_field
from fsref.inspection.records import FieldReport, ObjectReport, codec_of, kind_of
from fsref.inspection.status import Status, statuses
from fsref.objects.view import ObjectView, view
from fsref.refs import Dense, Field, TokenRange, object_name
from fsref.store import Store
from fsref.store.posix import PosixStore


def object_report(place: Place, object_id: str) -> ObjectReport:
    """One object of a run; its arrays while it is present, its fate else. Raises ``StoreError``, also for a corrupt object."""
    name = object_name(object_id)
    with place.open() as store:
        status = statuses(place, store, [object_id])[object_id]
        if status.state not in {"present", "removing"}:
            return ObjectReport(name=name, status=status)
        return _object(store, name, status)


def file_report(path: Path) -> ObjectReport:
    """An object file outside a run, for example a copy."""
    with PosixStore(path.absolute().parent) as store:
        return _object(store, path.name, None)


def _object(store: Store, name: str, status: Status | None) -> ObjectReport:
    with store.open(name) as file:
        found = view(file)
        return ObjectReport(
            name=name,
            status=status,
            tokens=found.token_count,
            bytes=found.byte_count,
            token_hash=found.token_hash.hex(),
            codec=codec_of(found.schema),
            fields=tuple(_object_field(f, found) for f in found.schema.fields if f.name in found.fields),
            arrays=tuple(found.arrays()),
            load=_object_load(found),
        )


def _object_field(field: Field, found: ObjectView) -> FieldReport:
    gaps: Sequence[TokenRange] = found.missing.get(field.name, ())
    return FieldReport(
        name=field.name,
        kind=kind_of(field),
        samples=1,
        rows=found.token_count,
        rows_missing=sum(map(len, gaps)),
        values=found.stats.get(field.name, {}).get("values", 0),
    )


def _object_load(found: ObjectView) -> tuple[LayerLoad, ...]:
    field = routing_field(found.schema.fields)
    if field is None or field.name not in found.fields:
        return ()
    data = found.read(field.name)
    assert isinstance(data, Dense)
    counter = LoadCounter(field)
    counter.add(data, token_count=found.token_count)
    return counter.layers()
