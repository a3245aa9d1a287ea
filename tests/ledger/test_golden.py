"""Journals as version 1 wrote them, byte for byte: this and every later version reads them, and says what it said then."""

from pathlib import Path

import pytest

from fsref.journal.place import Ledger
from fsref.journal.read import LedgerReader
from fsref.ledger.lines import LineReader
from fsref.ledger.predicates import Evidence, StoreView
from fsref.ledger.records import encode_line
from fsref.ledger.report import Verdict, conclude

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.fault(66)
def test_journals_of_version_1_are_proved() -> None:
    reader = LedgerReader(Ledger(GOLDEN), run_uuid="0" * 32)
    reader.refresh()
    run = reader.merge()
    assert run.problems == []
    found = conclude("golden", Evidence(run, StoreView()))
    assert (found.verdict, found.violations) == (Verdict.PROVED, ())
    assert found.totals.dropped_by == {"trained": 2, "filtered": 1, "fetch_failed": 1, "abandoned": 1}
    assert (found.totals.kept, found.totals.void, found.totals.done, found.totals.done_retry) == (5, 2, 5, 1)


@pytest.mark.fault(66)
def test_this_version_writes_the_same_bytes() -> None:
    for path in sorted(GOLDEN.glob("*.jnl")):
        data = path.read_bytes()
        assert b"".join(encode_line(record) for _, record in LineReader().feed(data)) == data
