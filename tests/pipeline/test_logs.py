"""The one line of a log that tells why a role ended."""

from pathlib import Path

import pytest

from fsref.pipeline.logs import BYTES_TAIL, LINE_MAX, last_error

TRACEBACK = """Traceback (most recent call last):
  File "x.py", line 1, in <module>
{raised}
resource_tracker: there appear to be 2 leaked objects
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("started\nstopped\n", "stopped"),
        ("error: no space\nINFO closing\n", "error: no space"),
        ("error: first\nerror: second\n", "error: second"),
        (TRACEBACK.format(raised="ValueError: 3 rows"), "ValueError: 3 rows"),
        (TRACEBACK.format(raised="torch.distributed.DistBackendError: closed"), "torch.distributed.DistBackendError: closed"),
        ("error: told\n" + TRACEBACK.format(raised="ValueError: later"), "error: told"),
    ],
)
def test_a_told_error_wins_over_a_traceback_and_that_over_the_last_line(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "log").write_text(text)
    assert last_error(tmp_path / "log") == line


def test_an_earlier_life_of_the_role_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("error: of yesterday\nfine today\n")
    assert last_error(tmp_path / "log", start=len("error: of yesterday\n")) == "fine today"


def test_only_the_end_of_a_large_log_is_read_and_lines_are_cut(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"error: long ago\n" + b"x" * BYTES_TAIL + b"\n\xff\n" + b"y" * 9999)
    assert last_error(tmp_path / "log") == "y" * LINE_MAX


def test_a_missing_log_has_no_line(tmp_path: Path) -> None:
    assert last_error(tmp_path / "none") == ""
