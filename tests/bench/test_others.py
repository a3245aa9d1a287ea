"""Other transports in the bench: their forms of the arrays, and the real libraries where they are installed."""

import importlib.util

import numpy as np
import pytest

from fsref.bench import methods, others
from fsref.bench.fetch import fetch
from fsref.bench.workload import Options
from tools.others import ray_lines, s3_lines

LEAST = Options(tokens=600, samples=2, repeats=2, threads=2)


def test_names_of_a_flat_store_keep_field_and_column() -> None:
    assert list(others.flat({"a": {"": np.zeros(1)}, "b": {"counts": np.zeros(1), "ids": np.zeros(1)}})) == ["a.", "b.counts", "b.ids"]


def test_without_a_package_its_method_is_named_as_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "NEEDS", dict.fromkeys(others.LOCAL, "a_package_that_is_not_there"))
    found = fetch(LEAST)
    assert {name: found["absent"][name] for name in others.LOCAL} == dict.fromkeys(others.LOCAL, "not installed")
    assert not {r["method"] for r in found["rows"]} & set(others.LOCAL)


@pytest.mark.parametrize("name", sorted(others.LOCAL))
@pytest.mark.parametrize("shape", ["qwen3-30b", "experts-512"])
def test_the_real_library_fills_the_buffers(name: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(others.NEEDS[name]) is None:
        pytest.skip(f"needs {others.NEEDS[name]}, which is no extra: docs/benchmarks.md has the pip line")
    monkeypatch.setattr(methods, "LOCAL", {m: methods.LOCAL[m] for m in (methods.FSREF, methods.HTTP)})
    monkeypatch.setattr(others, "LOCAL", {name: others.LOCAL[name]})
    found = fetch(Options(shape=shape, tokens=600, samples=2, repeats=2, kept=0.7))
    assert name in {r["method"] for r in found["rows"]}


def test_the_pages_show_every_row_that_was_measured() -> None:
    row = {"ms": 1.0, "ms_min": 1.0, "ms_max": 1.0, "cpu_ms": 1.0, "gb_per_s": 1.0, "bytes_read": 1, "requests": 1, "peak": 1}

    def found(names: list[str], ratio: str) -> dict[str, object]:
        ratios = [{"ratio": ratio, "median": 2.0, "least": 1.0, "most": 3.0, "cpu": 2.0, "reach": 0.0, "at_least": True}]
        rows = [{"method": n, **row} for n in names]
        return {"machine": "m", "samples": 4, "raw_bytes": 100, "threads": 2, "repeats": 7, "rows": rows, "ratios": ratios}

    local = found([*methods.LOCAL, *others.LOCAL], "fsref / Ray object store")
    remote = found([*methods.REMOTE, *others.REMOTE], "fsref / s3fs and decode")
    whole = {
        "versions": dict.fromkeys(("ray", "TransferQueue", "s3fs", "obstore"), "1"),
        "whole samples": local,
        "truncated to 60 %": local,
        "S3, 16,384 tokens": remote,
        "S3, 1,024 tokens": remote,
    }
    text = "\n".join([*ray_lines(whole), *s3_lines(whole)])
    assert all(f"| {name} |" in text for name in (*others.LOCAL, *others.REMOTE))
    assert "2.00 (1.00-3.00)" in text
