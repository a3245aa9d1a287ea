"""``python -m tools.simulate``: goes on where it stopped, says how to repeat what it found, and writes its section of the results."""

import json
from pathlib import Path

import pytest

from tools import results, simulate


def counts(out: Path) -> list[tuple[int, int]]:
    return [(b["from"], b["count"]) for b in map(json.loads, out.read_text().splitlines())]


def test_it_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "BLOCK_SEEDS", 2)
    out = tmp_path / "sim.jsonl"
    assert simulate.main(["--seeds", "3", "--out", str(out)]) == 0
    assert counts(out) == [(0, 2), (2, 1)]
    with out.open("a") as torn:
        torn.write('{"code": "torn')  # it was killed while it wrote
    out.write_text(out.read_text().rpartition("\n")[0] + "\n")
    assert simulate.main(["--seeds", "6", "--out", str(out)]) == 0
    assert counts(out) == [(0, 2), (2, 1), (2, 2), (4, 2)], "a block that was not whole is played again"
    assert "6 seeds, 0 with a violation" in capsys.readouterr().out
    assert simulate.main(["--seeds", "6", "--out", str(out)]) == 0
    assert len(counts(out)) == 4, "nothing was left to play"


def test_a_broken_rule_comes_with_a_command_that_shows_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--seeds", "20", "--mutant", "no_w1"]) == 0
    said = capsys.readouterr().out
    command = next(line for line in said.splitlines() if "python -m tools.simulate" in line).split()[3:]
    assert simulate.main(command) == 0
    assert "noticed in 1 of 1" in capsys.readouterr().out


def test_the_table_holds_what_was_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "ROOT", tmp_path)
    monkeypatch.setattr(simulate, "MUTANTS", {"no_w1": "drops are not synced"})
    monkeypatch.setattr(simulate, "digest", lambda: "code")
    monkeypatch.setattr(simulate, "replace_section", lambda title, lines: results.replace_section(title, lines, path=tmp_path / "r.md"))
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "r.md").write_text("# Results\n\n## Before\n\ntext\n\n## The ledger survives a simulation\n\nold\n\n## After\n\ntext\n")
    out, mutants = tmp_path / "sim.jsonl", tmp_path / "mutants.json"
    assert simulate.main(["--seeds", "4", "--out", str(out)]) == 0
    assert simulate.main(["--mutants", "--out", str(mutants)]) == 0
    assert simulate.main(["--table", str(out), "--mutants", str(mutants)]) == 0
    text = (tmp_path / "r.md").read_text()
    assert "old" not in text
    assert text.startswith("# Results\n\n## Before\n\ntext\n\n## The ledger survives a simulation\n\n`python -m tools.simulate")
    assert text.endswith("\n## After\n\ntext\n")
    assert "(`no_w1`) | 1 | 10 of 1" in text
    found = json.loads((tmp_path / "docs" / "results" / "simulation.json").read_text())
    assert (found["count"], found["violations"], found["verdicts"]) == (4, [], {"PROVED": 4})
