"""Surgery on the files of a proved run, at every byte: a flipped bit, a cut, a torn or zero-filled tail. None is falsely PROVED."""

import shutil
from pathlib import Path

import pytest

from fsref.journal.place import Ledger
from fsref.journal.read import LedgerReader
from fsref.ledger.predicates import Evidence, StoreView
from fsref.ledger.report import Audit, Verdict, conclude
from tests.ledger.test_golden import GOLDEN

pytestmark = pytest.mark.fault(36)
JOURNALS = sorted(p.name for p in GOLDEN.glob("*.jnl"))


def verdict(folder: Path) -> Audit:
    reader = LedgerReader(Ledger(folder))
    reader.refresh()
    run = reader.merge()
    return conclude("r", Evidence(run, StoreView(), complete=not run.problems))


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    for name in JOURNALS:
        shutil.copy(GOLDEN / name, tmp_path / name)
    assert verdict(tmp_path).verdict is Verdict.PROVED
    return tmp_path


@pytest.mark.parametrize("name", JOURNALS)
def test_a_flipped_bit_anywhere_is_noticed(ledger: Path, name: str) -> None:
    data = (ledger / name).read_bytes()
    last_line = data.rindex(b"\n", 0, -1)  # with the end of the line before: without it the two are one
    for at in range(0, len(data), 2):
        (ledger / name).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        found = verdict(ledger)
        if at < last_line:
            assert found.verdict in (Verdict.UNPROVABLE, Verdict.VIOLATED), at
            assert any(name in p for p in found.problems), at
        else:
            assert found.verdict is not Verdict.PROVED, at


@pytest.mark.parametrize("name", JOURNALS)
def test_a_journal_that_is_cut_anywhere_is_noticed(ledger: Path, name: str) -> None:
    data = (ledger / name).read_bytes()
    for end in range(0, len(data), 3):
        (ledger / name).write_bytes(data[:end])
        assert verdict(ledger).verdict is not Verdict.PROVED, end


@pytest.mark.parametrize("tail", [b"\0" * 4096, b"0123abcd {", b"00000000 {}\n", b"\n", b"\xff" * 100_000], ids=repr)
@pytest.mark.parametrize("name", JOURNALS)
def test_a_tail_that_is_no_record_is_ignored(ledger: Path, name: str, tail: bytes) -> None:
    with (ledger / name).open("ab") as journal:
        journal.write(tail)
    assert verdict(ledger).verdict is Verdict.PROVED
