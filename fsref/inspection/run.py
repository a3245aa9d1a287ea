"""What a run holds: its schema, steps, objects and journals."""

from collections import Counter

from fsref.inspection.find import Place
from fsref.inspection.records import RunReport, StepLine, codec_of, kind_of
from fsref.journal.place import Ledger
from fsref.journal.read import LedgerReader
from fsref.journal.run import read_run
from fsref.steps import published, read_info


def run_report(place: Place) -> RunReport:
    """The run as a whole. Raises ``RunMismatch`` if there is none, ``StoreError``."""
    with place.open() as store:
        info = read_run(store)
        steps = [read_info(store, n) for n in published(store)]
        objects = [e.byte_count for e in store.list("obj") if e.name.endswith(".zip")]
        url = store.url
        journals = LedgerReader(Ledger.of(store, place.ledger_dir)).names()
    return RunReport(
        run=info.run,
        run_uuid=info.run_uuid,
        url=url,
        ms=info.ms,
        fields={f.name: kind_of(f) for f in info.schema.fields},
        codec=codec_of(info.schema),
        steps=tuple(StepLine(i.step, i.samples, i.tokens, i.n, i.bytes, i.version, i.ms) for i in steps),
        objects=len(objects),
        bytes=sum(objects),
        incarnations=dict(Counter(name.split(".", 1)[0] for name in journals)),
    )
