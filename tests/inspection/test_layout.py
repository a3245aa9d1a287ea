"""What ranks of a parallel layout would read of a step, without reading it."""

import json
from pathlib import Path

import pytest

from fsref.cli.commands.runs import ContextLayouts
from fsref.cli.layout import main
from fsref.errors import ConfigError, ObjectMissing
from fsref.inspection.layout import layout_report
from fsref.parallel import Parallel
from fsref.plan import ContextLayout
from tests.inspection.conftest import TOKENS, Run


@pytest.mark.payload("D1", "D3")
def test_every_rank_of_a_layout_is_shown_with_what_it_would_read(run: Run) -> None:
    r = layout_report(run.place, 0, Parallel(layout=ContextLayout.ZIGZAG, context=2, multiple=5, pipeline=2, stages=[[[0, 1]], [[2], [3]]]))
    assert [(n.data_rank, n.pipeline_rank, n.context_rank) for n in r.ranks] == [
        (d, p, c) for d in range(2) for p in range(2) for c in range(2)
    ]
    assert {n.layers for n in r.ranks if n.pipeline_rank == 0} == {(1,)}
    assert {n.layers for n in r.ranks if n.pipeline_rank == 1} == {(3,)}
    for n in r.ranks:
        # Three sequences of 6 tokens, each padded to 8 and halved, then padded to a multiple of 5.
        assert (n.rows, n.tokens + n.padding) == (15, 15)
        assert n.bytes > 0
        assert n.requests >= 2
    halves = [n.tokens for n in r.ranks if (n.data_rank, n.pipeline_rank) == (0, 0)]
    assert sum(halves) == 3 * TOKENS


def test_one_rank_of_everything_reads_what_the_step_names(run: Run) -> None:
    r = layout_report(run.place, 0, Parallel())
    assert [(n.rows, n.padding, n.layers) for n in r.ranks] == [(3 * TOKENS, 0, (1, 3))] * 2
    assert 0 < sum(n.bytes for n in r.ranks) < r.objects_bytes


def test_what_does_not_divide_or_exist_is_said(run: Run) -> None:
    with pytest.raises(ConfigError, match="multiple is 1, which 4 tensor ranks with sequence parallelism do not divide"):
        layout_report(run.place, 0, Parallel(tensor=4, sequence=True))
    with pytest.raises(ConfigError, match=r"layers \[3\] of field 'routed_experts' are in none"):
        layout_report(run.place, 0, Parallel(stages=[[[0, 1]]]))
    with pytest.raises(ObjectMissing, match="published ones: 0 to 0"):
        layout_report(run.place, 7, Parallel())


def test_the_command_prints_a_table_or_json(run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.folder)

    def shown(*, as_json: bool, what: str = "step_000000") -> str:
        main(what, run="", json=as_json, layout="contiguous", context_ranks=2, tensor_ranks=1, stages="", multiple=1)
        return capsys.readouterr().out

    text = shown(as_json=False)
    assert "over 2 context ranks, contiguous" in text
    assert "1 3" in text
    found = json.loads(shown(as_json=True))
    assert [n["context_rank"] for n in found["ranks"]] == [0, 1, 0, 1]
    with pytest.raises(ConfigError, match="of a step"):
        shown(as_json=False, what="r1")
    assert Path.cwd() == run.folder


def test_the_command_line_offers_every_layout() -> None:
    assert [n.value for n in ContextLayouts] == [n.value for n in ContextLayout]
