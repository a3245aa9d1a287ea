"""The code of the pages on the library, on parallel layouts and on assembly runs as it stands."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsref.plan import PackedRows

PAGE = Path(__file__).resolve().parent.parent / "docs" / "library.md"
LAYOUTS = PAGE.with_name("parallel-layouts.md")
ASSEMBLY = PAGE.with_name("assembly.md")


@pytest.mark.torch
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


def _shown(rows: PackedRows) -> list[str]:
    """Rows as the page's drawings have them."""
    text = zip(rows.sequence_ids().tolist(), rows.positions().tolist(), rows.padding().tolist(), strict=True)
    return ["_" if s < 0 else "·" if pad else f"{'ab'[s]}{p}" for s, p, pad in text]


@pytest.mark.payload("D2", "D3", "D4", "D15", "C4", "C5")
def test_the_page_on_layouts_runs_and_its_drawings_are_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = LAYOUTS.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, str(LAYOUTS), "exec"), names)
    drawings = re.findall(r"^    rank \d  (.*?)(?:   +\S+\(\).*)?$", page, re.MULTILINE)
    drawn = [d.replace("|", " ").split() for d in drawings]
    assert drawn == [_shown(rows) for layout in ("zigzag", "contiguous", "allgather") for rows in names[layout]]
    assert names["zigzag"][0].cu_seqlens().tolist() == [0, 4, 8, 10]
    assert names["zigzag"][1].index().tolist() == [2, 3, 4, -1, 7, 8, 9, 10, -1, -1]
    assert _shown(names["half"]) == ["b1", "b6", "·", "_", "_"]
    assert _shown(names["first"]) == ["b0", "b1", "b2", "b3", "b4", "b5", "b6", "·"]
    assert names["layers"] == (0, 1, 4, 5)
    assert names["parts"] == (slice(0, 2), slice(2, 4))
    routed, (a, b) = names["routed"], names["arrays"]
    assert routed.dtype == np.int32
    assert routed.shape == (10, 4, 2)
    held = [0, 1, 3, 4]
    assert np.array_equal(routed[[0, 1, 4, 5, 6]], np.concatenate([a[:2], b[[0, 1, 6]]])[:, held])
    assert names["got"].padding.tolist() == [n in (2, 3, 7, 8, 9) for n in range(10)]


@pytest.mark.torch
@pytest.mark.payload("A17", "E7")
def test_the_page_on_assembly_runs_and_its_drawings_are_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ASSEMBLY.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, str(ASSEMBLY), "exec"), names)
    first, second = re.findall(r"^    (?:LeftPadded|          ) (.*)$", page, re.MULTILINE)
    drawn = [[re.sub(r"[A-Za-z]{3,}|\|", "", part).split() for part in re.split(r" {6,}", line.strip())] for line in (first, second)]
    for number, name in enumerate(("left", "right", "both")):
        got = names[name]
        shown = [
            [f"{'ab'[row]}{p}" if there else "·" for p, there in zip(*columns, strict=True)]
            for row, columns in enumerate(zip(got.position_ids.tolist(), got.attention_mask.tolist(), strict=True))
        ]
        assert shown == [drawn[0][number], drawn[1][number]]
    batch, routed = names["batch"], names["routed"]
    assert (str(routed.rows.dtype), tuple(routed.rows.shape), routed.layer_ids) == ("torch.int32", (8, 2, 2), (0, 2))
    assert np.array_equal(routed.rows.numpy(), np.concatenate(names["experts"]))
    assert routed.valid.all()
    assert names["mask"].counts.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert names["wide"].columns["ids"].tolist()[-1] == [6, 7, 8, 9]
    assert names["narrow"].values_cut == 3
    assert names["narrow"].truncated.tolist() == [False] * 6 + [True] * 2
    for back in (names["same"], names["left"].packed(), names["both"].packed()):
        assert back.token_ids.tolist() == batch.token_ids.tolist()
        assert np.array_equal(back.fields["routed_experts"].rows, routed.rows)
