"""Every bench at the least size: what it measures is right, its report has what it promises. No figure of time is looked at."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fsref.bench import methods, others
from fsref.bench.codecs import best, codecs, moved
from fsref.bench.fetch import fetch
from fsref.bench.keep import keep
from fsref.bench.ledger import ledger
from fsref.bench.measure import Timing, interleaved, quantile, ratio
from fsref.bench.memory import memory
from fsref.bench.paper import Cluster, on_paper
from fsref.bench.report import facts, markdown, plot, tables
from fsref.bench.scaling import _change, _slices, scaling
from fsref.bench.shapes import SHAPES, payload, shape_of
from fsref.bench.suite import NAMES, plan
from fsref.bench.workload import Options
from fsref.errors import ConfigError
from fsref.refs import Dense, Ragged
from tests.support.s3servers import BUCKET, REGION, S3Server

LEAST = Options(tokens=600, samples=2, repeats=2, threads=2)


def ratios(found: dict[str, Any]) -> dict[str, float]:
    return {r["ratio"]: r["median"] for r in found["ratios"]}


@pytest.fixture(scope="module")
def fetched() -> dict[str, Any]:
    return fetch(LEAST)


def test_every_method_of_fetch_fills_the_same_buffers_and_is_reported(fetched: dict[str, Any]) -> None:
    rows = {r["method"]: r for r in fetched["rows"]}
    assert set(rows) | set(fetched["absent"]) == {*methods.LOCAL, *others.LOCAL}
    assert set(fetched["absent"].values()) <= {"not installed"}
    assert rows[methods.FSREF]["bytes_read"] < rows[methods.HTTP]["bytes_read"]
    assert rows[methods.HTTP]["requests"] == 2
    assert all(r["ms_min"] <= r["ms"] <= r["ms_max"] for r in fetched["rows"])
    assert json.loads(json.dumps(fetched)) == fetched


def test_a_method_that_fills_the_buffers_wrongly_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(methods.Http):
        def one(self, sample: int) -> None:
            if not sample:
                super().one(sample)

    monkeypatch.setattr(methods, "LOCAL", {methods.HTTP: Lazy, methods.FSREF: methods.LOCAL[methods.FSREF]})
    with pytest.raises(AssertionError):
        fetch(LEAST)


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_payloads_have_the_models_shape_and_legal_rows(shape: str) -> None:
    model = shape_of(shape)
    made = payload(model, 300, seed=1).checked(model.schema())
    routing, heads = made.fields["routed_experts"], made.fields["top_logprobs"]
    assert isinstance(routing, Dense)
    assert isinstance(heads, Ragged)
    assert routing.rows.shape == (300, model.layers, model.top_k)
    ordered = np.sort(routing.rows.reshape(-1, model.top_k), axis=1)
    assert (ordered[:, 1:] != ordered[:, :-1]).all()
    rows = heads.columns["ids"].reshape(-1, model.head)
    assert all(len(set(r.tolist())) == model.head for r in rows)
    assert (np.diff(heads.columns["logprobs"].reshape(-1, model.head), axis=1) <= 0).all()


def test_skew_makes_some_experts_busier() -> None:
    model = shape_of("qwen3-30b")

    def busiest(skew: float) -> float:
        data = payload(model, 1024, skew=skew).fields["routed_experts"]
        assert isinstance(data, Dense)
        return float(np.bincount(data.rows[:, 0].reshape(-1), minlength=128).max() / data.rows[:, 0].size * 128)

    assert busiest(0.0) < 2 < busiest(0.7)


def test_an_unknown_shape_or_bench_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match="qwen3-30b, deepseek-v3"):
        fetch(Options(shape="gpt"))
    with pytest.raises(ConfigError, match="fetch, keep"):
        plan("speed", LEAST, size="least")


def test_keep_compares_with_the_same_arrays_written_by_others() -> None:
    found = keep(LEAST, steady_keeps=12)
    assert {r["method"] for r in found["rows"]} >= {"fsref, rename only", "zarr-python, ZipStore, the same codec"}
    assert found["object_bytes"] < found["raw_bytes"]
    assert {"idle_p99_ms", "p99_ms"} <= set(found["pause"])


def test_codecs_give_back_what_they_got_and_the_rule_weighs_storage() -> None:
    routes = np.random.default_rng(0).integers(0, 64, (512, 4, 8)).astype(np.uint8)
    found = codecs(Options(tokens=512, repeats=2), routes=routes)
    arrays = {r["array"] for r in found["rows"]}
    assert arrays == {"routing, synthetic", "routing, real router", "top_logprobs/ids", "top_logprobs/logprobs", "sampling_mask/ids"}
    seven = next(r for r in found["rows"] if r["way"].startswith("7 bits"))
    assert seven["packed"] == 0.875
    tight = {"array": "a", "way": "tight", "packed": 0.5, "encode_gb_per_s": 1.0, "decode_gb_per_s": 1.0}
    loose = {"array": "a", "way": "loose", "packed": 1.0, "encode_gb_per_s": 9.0, "decode_gb_per_s": 9.0}
    assert best([tight, loose], "a", 0.5, 2) == "tight"
    assert best([tight, loose], "a", 8.0, 2) == "loose"
    assert moved(loose, 2.0, 2) == 1.0


def test_memory_by_reference_does_not_follow_the_arrays() -> None:
    found = memory(Options(tokens=600, threads=2), samples=60)
    slopes = {r["way"]: r["slope_bytes"] for r in found["rows"]}
    assert slopes["inline"] > 500_000 > 50 * slopes["by reference"] / 2


def test_the_ledgers_bench_counts_every_object() -> None:
    found = ledger(objects=500, audited=1_000)
    assert len(found["rows"]) == 4
    assert found["audit"]["objects"] == 960


def test_scaling_reports_samples_tokens_threads_and_ranks() -> None:
    found = scaling(LEAST, samples=(1, 3), tokens=(600,), ranks=(1, 2))
    titles = [title for title, _ in tables(found)]
    assert titles == ["samples of a step", "tokens of a sample", "threads", "ranks", "ratios"]
    assert [r["ranks"] for r in found["ranks"]] == [1, 2]
    assert not found["ratios"]
    assert all(r["us_min"] <= r["us_per_sample"] <= r["us_max"] for r in found["samples of a step"])


def test_the_change_of_the_cost_per_sample_is_that_of_the_least_rounds() -> None:
    timings = {"100": Timing((1.0, 2.0, 1.0), (1.0,) * 3), "1000": Timing((6.0, 12.0, 7.0), (5.0,) * 3)}
    (change,) = _change((1, 100, 1_000), {100: 20, 1_000: 100}, timings)
    assert (change["median"], change["least"], change["most"]) == (0.88, -0.88, -0.86)
    assert _change((1, 100), {}, timings) == []
    numbers: Any = list(range(10))
    assert _slices(numbers, 4, 2) == [numbers[:4], numbers[4:8]]


def test_on_paper_reads_follow_the_ranks_that_read_by_themselves() -> None:
    def each(cluster: Cluster, what: str) -> float:
        return float(next(r["each_second"] for r in on_paper(cluster, object_storage=True) if r["what"] == what))

    alone = each(Cluster(readers_per_data_rank=8), "bytes read")
    assert alone == pytest.approx(8 * each(Cluster(), "bytes read"), rel=1e-3)
    assert each(Cluster(), "metadata reads") == 0
    assert [r["what"] for r in on_paper(Cluster(), object_storage=False)][-1] == "ledger writes"


def test_repeats_are_interleaved_and_start_with_another_method_each_round() -> None:
    order: list[str] = []
    cases = {n: lambda n=n: order.append(n) for n in "abc"}
    timings = interleaved(cases, repeats=2, turn_s=0, after=lambda: order.append("."))
    assert "".join(order) == "aa.bb.cc.bb.cc.aa."  # a run that is not counted, and one that is
    assert all(len(t.wall_s) == 2 for t in timings.values())


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    timings = {"fast": Timing((1.0, 2.0, 1.0), (1.0,) * 3), "slow": Timing((4.0, 4.0, 3.0), (2.0,) * 3)}
    found = ratio(timings, "fast", "slow")
    assert found is not None
    assert (found.median, found.least, found.most, found.cpu) == (3.0, 2.0, 4.0, 2.0)
    assert ratio(timings, "fast", "absent") is None
    assert quantile([3, 1, 2, 4], 0.5) == 2
    assert quantile([], 0.99) == 0


def test_a_finding_becomes_tables_and_a_picture(fetched: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: install the extra plot")
    text = "\n".join(line for _, rows in tables(fetched) for line in markdown(rows))
    assert "| fsref / zarr-python |" in text
    assert facts(fetched)["tokens"] == "600"
    plot([fetched], tmp_path / "fetch.png")
    assert (tmp_path / "fetch.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="rate to draw"):
        plot([{"rows": []}], tmp_path / "none.png")


def test_all_runs_every_bench_and_quick_adds_what_the_docs_show() -> None:
    assert list(plan("all", LEAST, size="least")) == list(NAMES)
    assert set(plan("all", LEAST, size="quick")) > set(NAMES)
    assert len(plan("all", LEAST, size="full")) > len(plan("all", LEAST, size="quick"))
    assert list(plan("keep", LEAST, size="full")) == ["keep"]


def test_on_object_storage_fsref_stands_beside_plain_gets_with_one_request_a_sample(weed: S3Server, s3_credentials: dict[str, str]) -> None:
    del s3_credentials
    found = fetch(msgspec.structs.replace(LEAST, root=f"s3://{BUCKET}/bench", endpoint=weed.endpoint, region=REGION))
    rows = {r["method"]: r for r in found["rows"]}
    assert set(rows) == {*methods.REMOTE, *others.REMOTE}
    assert ratios(found)["requests per sample"] == 1
    assert rows[methods.FSREF]["bytes_read"] == rows[methods.GETS_DECODE]["bytes_read"] == rows[others.S3FS_DECODE]["bytes_read"]
    assert rows[methods.FSREF_NONE]["requests"] == rows[others.S3FS]["requests"] == 2
