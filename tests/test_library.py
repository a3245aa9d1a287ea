"""The library page's code runs as it stands."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PAGE = Path(__file__).resolve().parent.parent / "docs" / "library.md"


def test_the_page_runs_and_gives_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ten, two_processes, turns = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    first: dict[str, Any] = {}
    exec(compile(ten, str(PAGE), "exec"), first)
    assert len([line for line in ten.splitlines() if line]) == 10
    assert np.array_equal(first["rows"], first["experts_TLK"])
    names: dict[str, Any] = {}
    for code in (two_processes, turns):
        exec(compile(code, str(PAGE), "exec"), names)
    assert names["rows"].dtype == np.uint8
    assert np.array_equal(names["rows"], names["experts_TLK"][10:60])
    assert np.array_equal(names["ids"], np.arange(30, 180))
    assert names["arrays"]["routed_experts"].missing == ()
    assert len(names["message"]) < 300
    assert names["gaps"] == {}
    assert np.array_equal(names["tensor"].numpy(), names["experts_TLK"][:9])
