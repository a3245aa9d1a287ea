"""The tools that write pages of figures: what they make of what was measured. They measure nothing here."""

from typing import Any

from tools.profiles import lines as profile_lines
from tools.profiles import summary, symbols_of
from tools.results import paragraph
from tools.scaling import lines as scaling_lines

STACKS = (
    "work_for (tools/profiles.py:117);Fsref.run (/home/a/fsref/bench/methods.py:9);decode_chunk (/home/a/fsref/objects/codec.py:71) 6",
    "work_for (tools/profiles.py:117);Fsref.run (/home/a/fsref/bench/methods.py:9);decode_chunk (/home/a/fsref/objects/codec.py:90) 2",
    "_bootstrap (threading.py:1002);run (threading.py:982);Threads.take (fsref/store/threads.py:50);Condition.wait (threading.py:327) 90",
    "work_for (tools/profiles.py:117);copyto (numpy/core.py:1) 2",
)
PERF = ("", "    36.93%  [.] bshuf_sse2        -      -  ", "             --9.86%--LZ4", "     9.86%  [k] _copy_to_iter  ")


def test_a_profile_counts_busy_threads_by_the_function_on_top_and_by_whatever_stands_under_it() -> None:
    found = summary(STACKS)
    assert found["looks"] == 10
    assert found["top"][0] == {"where": "fsref/objects/codec.py decode_chunk", "share": 0.8}
    assert {w["where"]: w["share"] for w in found["within"]} == {
        "fsref/objects/codec.py decode_chunk": 0.8,
        "fsref/bench/methods.py Fsref.run": 0.8,
    }


def test_symbols_of_the_kernel_are_marked() -> None:
    assert symbols_of(PERF) == [{"where": "bshuf_sse2", "share": 0.3693}, {"where": "_copy_to_iter (kernel)", "share": 0.0986}]


def test_the_page_of_profiles_has_a_table_for_each_work_with_and_without_perf() -> None:
    one = summary(STACKS) | {"symbols": symbols_of(PERF)}
    works = {"fetch": one, "fetch-none": one, "keep": one, "ledger": one | {"symbols": []}}
    text = "\n".join(profile_lines({"machine": "m", "py_spy": "py-spy", "works": works}))
    assert text.count("| `fsref/objects/codec.py decode_chunk` | 80.0% | `fsref/bench/methods.py Fsref.run` | 80.0% |") == 4
    assert "| `bshuf_sse2` | 36.9% |" in text
    assert "py-spy record" in text


def test_the_page_of_scaling_says_of_each_curve_why_it_bends() -> None:
    change = {"ratio": "change", "median": 0.1, "least": -0.1, "most": 0.2, "cpu": 0.1, "reach": 0.2, "at_least": False}
    curves: dict[str, Any] = {title: [{"x": 1}] for title in ("samples of a step", "tokens of a sample", "threads", "ranks")}
    text = "\n".join(scaling_lines({"machine": "m", "load": 1.0, "shape": "s", "repeats": 7, **curves, "ratios": [change]}))
    assert all(f"\n{title}:\n" in text for title in curves)
    assert "| change | 0.10 (-0.10-0.20) | 0.10 | at most 0.2 | yes |" in text


def test_prose_of_pages_fits_their_lines() -> None:
    assert all(len(line) <= 140 for line in paragraph("word " * 200))
