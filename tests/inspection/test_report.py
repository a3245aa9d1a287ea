"""What a step, an object and a run hold, and what became of their objects."""

import json
from pathlib import Path

import numpy as np
import pytest

from fsref.cli.show import main
from fsref.errors import ConfigError, MissingExtra, ObjectCorrupt, ObjectMissing
from fsref.inspection.load import LayerLoad
from fsref.inspection.object import file_report, object_report
from fsref.inspection.run import run_report
from fsref.inspection.step import step_report
from fsref.refs import object_name
from tests.inspection.conftest import TOKENS, Run, payload


def experts(*seeds: int) -> list[list[int]]:
    """Counts per layer over the real rows, by a plain loop."""
    counts = [[0] * 8, [0] * 8]
    for seed in seeds:
        rows = np.asarray(payload(seed).fields["routed_experts"].rows)  # type: ignore[union-attr]  # it is dense
        for token in range(TOKENS - 1):
            for layer in range(2):
                for slot in range(2):
                    counts[layer][rows[token, layer, slot]] += 1
    return counts


def test_a_step_shows_ranks_samples_coverage_and_present_objects(run: Run) -> None:
    r = step_report(run.place, 0)
    assert (r.samples, r.tokens, r.objects, r.version, r.complete) == (4, 24, 4, 3, True)
    assert [(k.data_rank, k.micro_batches, k.samples, k.padding, k.references, k.owned) for k in r.ranks] == [
        (0, 1, 2, 1, 3, 2),
        (1, 1, 2, 1, 3, 2),
    ]
    assert [(f.name, f.samples, f.rows, f.rows_missing, f.values) for f in r.fields] == [
        ("routed_experts", 4, 24, 4, 0),
        ("sampling_mask", 4, 24, 0, 24),
    ]
    assert r.states == {"present": 4}
    first = r.rows[0]
    assert (first.sample, first.tokens, first.trained, first.advantage, first.missing) == (f"{0:032x}/0", 6, 3, 0.5, {"routed_experts": 1})
    assert r.rows[2].padding
    assert r.status[first.objects[0]].byte_count == first.bytes == run.refs[0].byte_count


def test_expert_load_counts_real_rows_of_each_object_once(run: Run) -> None:
    told: list[tuple[int, int]] = []
    r = step_report(run.place, 0, progress=lambda done, total: told.append((done, total)))
    assert [(x.layer, list(x.counts)) for x in r.load] == list(zip((1, 3), experts(0, 1, 2, 3), strict=True))
    assert r.load_objects == 4
    assert told == [(n, 4) for n in range(4)]


def test_after_removal_the_step_says_by_whom_why_and_when(run: Run) -> None:
    run.train_and_remove()
    r = step_report(run.place, 0)
    assert r.states == {"removed": 4}
    assert list(r.removed.values()) == [4]
    assert next(iter(r.removed)).startswith("trn.")
    assert all(s.reason == "trained" and s.done_ms >= s.kept_ms > 0 for s in r.status.values())
    assert r.load == ()


def test_an_object_that_vanished_is_lost_and_a_damaged_one_is_noted(run: Run) -> None:
    lost, bad = run.refs[0].object_ids[0], run.refs[1].object_ids[0]
    (run.folder / object_name(lost)).unlink()
    path = run.folder / object_name(bad)
    path.write_bytes(path.read_bytes()[:-7])
    r = step_report(run.place, 0)
    assert r.states == {"lost": 1, "present": 3}
    assert (r.load_objects, len(r.notes)) == (2, 1)
    assert bad in r.notes[0]
    with pytest.raises(ObjectCorrupt):
        object_report(run.place, bad)


def test_a_dropped_object_tells_its_reason(run: Run) -> None:
    r = object_report(run.place, run.dropped[0])
    assert r.status is not None
    assert (r.status.state, r.status.reason, r.status.by.split(".")[0]) == ("removed", "filtered", "orc")
    assert r.arrays == ()


def test_a_present_object_shows_arrays_coverage_and_load(run: Run) -> None:
    r = object_report(run.place, run.refs[0].object_ids[0])
    assert (r.tokens, r.bytes) == (6, run.refs[0].byte_count)
    assert {a.path: (a.dtype, a.shape) for a in r.arrays} == {
        "routed_experts": ("uint8", (6, 2, 2)),
        "sampling_mask/counts": ("int32", (6,)),
        "sampling_mask/flags": ("uint8", (6,)),
        "sampling_mask/ids": ("int32", (6,)),
    }
    assert [(f.name, f.rows_missing, f.values) for f in r.fields] == [("routed_experts", 1, 0), ("sampling_mask", 0, 6)]
    assert [list(x.counts) for x in r.load] == experts(0)


def test_a_copy_outside_any_run_is_read_by_itself(run: Run, tmp_path: Path) -> None:
    copy = tmp_path / "copy.zip"
    copy.write_bytes((run.folder / object_name(run.refs[2].object_ids[0])).read_bytes())
    r = file_report(copy)
    assert r.status is None
    assert [list(x.counts) for x in r.load] == experts(2)


def test_a_step_that_is_not_published_names_the_ones_that_are(run: Run) -> None:
    with pytest.raises(ObjectMissing, match=r"step 7 of .* is not published; published ones: 0 to 0"):
        step_report(run.place, 7)


def test_a_run_shows_fields_steps_objects_and_journals(run: Run) -> None:
    r = run_report(run.place)
    assert (r.run, r.run_uuid) == ("r1", run.info.run_uuid)
    assert r.fields == {"routed_experts": "uint8[2,2] of 8 experts input", "sampling_mask": "ragged(ids int32) target"}
    assert [(s.step, s.samples, s.objects) for s in r.steps] == [(0, 4, 4)]
    assert (r.objects, r.bytes) == (4, sum(ref.byte_count for ref in run.refs))
    assert r.incarnations == {"env": 1, "orc": 1}


def test_load_tells_imbalance_and_idle_experts() -> None:
    layer = LayerLoad(0, (6, 2, 0, 0))
    assert (layer.busiest, layer.idle) == (3.0, 2)
    assert LayerLoad(0, (0, 0)).busiest == 0.0


@pytest.mark.parametrize("what", ["step_000000", "demo-0-0/0", "demo-0-0/4", ""])
def test_tables_and_json_tell_the_same_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    monkeypatch.chdir(run.root.parent)
    main(what, run="", json=False, plot=None)
    shown = capsys.readouterr().out
    main(what, run="r1", json=True, plot=None)
    told = json.loads(capsys.readouterr().out)
    assert ("removed (filtered) by orc.main" in shown) == (what == "demo-0-0/4")
    assert told["run" if "run" in told else "name"] in shown
    assert ("expert load" in shown) == (what in {"step_000000", "demo-0-0/0"})


def test_a_path_into_a_run_names_run_and_object(run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir("/")
    main(str(run.folder / object_name(run.refs[0].object_ids[0])), run="", json=True, plot=None)
    assert json.loads(capsys.readouterr().out)["status"]["state"] == "present"
    main(f"fsref:r1/{run.refs[0].object_ids[0]}", run=str(run.folder), json=True, plot=None)
    assert json.loads(capsys.readouterr().out)["status"]["state"] == "present"


def test_nonsense_is_refused(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"is neither a step .* nor an object"):
        main("step_12", run=str(run.folder), json=False, plot=None)


def test_a_plot_needs_its_extra_or_is_written(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "load.png"
    try:
        main("step_000000", run=str(run.folder), json=True, plot=picture)
    except MissingExtra as e:
        assert "fsref[plot]" in str(e)  # noqa: PT017  either outcome is right, and each is checked
    else:
        assert picture.read_bytes().startswith(b"\x89PNG")
