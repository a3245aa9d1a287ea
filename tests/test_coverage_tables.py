"""docs/faults.md and docs/payloads.md are made from the marks of the tests, and no row lacks one."""

import pytest

from tools import coverage_tables


def test_both_pages_are_up_to_date_and_every_row_has_a_test(capsys: pytest.CaptureFixture[str]) -> None:
    assert coverage_tables.main(["--check"]) == 0, capsys.readouterr().out
