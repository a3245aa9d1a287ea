"""Takes the figures of docs/benchmarks.md and README: `fsref bench all --quick`, in about five minutes on two cores.

python -m tools.benchmarks               # measures, writes docs/results/bench.json, the sections of docs/benchmarks.md and README
python -m tools.benchmarks --write       # writes the sections again from docs/results/bench.json; measures nothing
python -m tools.benchmarks --full        # all shapes and lengths; half an hour
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from fsref.bench import methods
from fsref.bench.paper import Cluster, on_paper
from fsref.bench.report import facts, markdown, tables
from fsref.bench.suite import Size, in_process, plan
from fsref.bench.workload import Options
from tools.results import replace_section

ROOT: Final = Path(__file__).resolve().parent.parent
JSON: Final = ROOT / "docs" / "results" / "bench.json"
PAGE: Final = ROOT / "docs" / "benchmarks.md"
README: Final = ROOT / "README.md"
SHORT: Final = """\
Where something falls short, this is why (perf, py-spy, and the *hand loop* rows, which do the same reading, checking and decoding with
every place known before and nothing around them). What was found before there was a part in C, and what that changed, is in
[notes/0006](notes/0006-native-kernels.md).

- *Codec none against preadv.* Of the processor time some two thirds are the kernel's copy, which preadv has too, a tenth the checksums (40
  to 50 GB/s); the rest is Python, 0.4 ms a sample of 16,384 tokens: planning, finding each chunk's place, opening. Python runs on one
  thread at a time, and what waits for it does not read: hence the difference between wall and processor time. On 2 GB/s of storage
  nothing of it would be seen.
- *Default codec against decoding alone.* Decoding with fsref's kernels takes little more than twice as long as reading the same bytes, so a
  thread that must do both cannot come nearer to decoding alone than some 0.65; what is above that, the measurement's noise gives. Against
  decoding by numcodecs, of which the target was taken, it is reached.
- *Bytes of routing alone.* Ids of 128 experts carry 7 bits of 8, and popular experts hardly less: 0.875 is what there is to save.
- *The ledger's mean.* An object that is dropped alone makes three records, and each is one write(2), so that a killed process loses none:
  2.6 microseconds each, half of it the kernel's. The rest is small Python calls, none of which stands out, so it follows the interpreter:
  one built with PGO and LTO (Debian's) is 1.16 times as fast as pyenv's default build, which measured this."""
LEFT_OUT: Final = frozenset({"bench", "machine"})


def measure(size: Size) -> dict[str, dict[str, Any]]:
    """Every finding by its label."""
    out: dict[str, dict[str, Any]] = {}
    for label, run in plan("all", Options(), size=size, routing="demo").items():
        start = time.perf_counter()
        out[label] = in_process(run)
        print(f"{label}: {time.perf_counter() - start:.0f} s", flush=True)
    return out


def figures(findings: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The section of docs/benchmarks.md."""
    first = next(iter(findings.values()))
    yield f"`python -m tools.benchmarks` on {first['machine']}; raw values in [results/bench.json](results/bench.json)."
    yield ""
    yield "### What was to be reached"
    yield ""
    yield from markdown([row for f in findings.values() for row in reach_rows(f)])
    yield ""
    yield SHORT
    for label, found in findings.items():
        yield ""
        yield f"### {label}"
        yield ""
        yield "; ".join(f"{k} {v}" for k, v in facts(found).items() if k not in LEFT_OUT) + "."
        for title, rows in tables(found):
            yield ""
            if title:
                yield f"{title}:"
                yield ""
            yield from markdown(rows)


def reach_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The ratios of a finding that have a target, with what was measured on which workload."""
    where = f"{found.get('shape', '')}, {found['kept']:,} of {found['tokens']:,} tokens" if "kept" in found else str(found.get("shape", ""))
    rows = next((rows for title, rows in tables(found) if title == "ratios"), [])
    return [{"bench": found["bench"], "workload": where or "-", **row} for row in rows if row["to reach"] != "-"]


def paper() -> Iterator[str]:
    """The section of the cluster on paper."""
    cluster = Cluster()
    yield "What would be asked of the storage, by arithmetic (`fsref.bench.paper`); no figure here was measured. Assumed:"
    yield ""
    yield from markdown([{"assumption": k.replace("_", " "), "value": getattr(cluster, k)} for k in cluster.__struct_fields__])
    for name, object_storage in (("Lustre", False), ("S3", True)):
        yield ""
        yield f"{name}, each second:"
        yield ""
        yield from markdown(on_paper(cluster, object_storage=object_storage))
    alone = on_paper(Cluster(readers_per_data_rank=8), object_storage=True)
    read = next(r["each_second"] for r in alone if r["what"] == "bytes read")
    yield ""
    yield f"Without the node's cache, with 8 ranks that each read their samples by themselves: {read / 1e9:.1f} GB/s are read."


def headline(findings: dict[str, dict[str, Any]]) -> list[str]:
    """Three figures for README."""
    fetch, memory = findings["fetch"], findings["memory"]
    rate = {r["method"]: r for r in fetch["rows"]}
    ratios = {r["ratio"]: r for r in fetch["ratios"]}
    zarr, http = ratios["fsref / zarr-python"], ratios["fsref / whole blobs over HTTP"]
    slope = {r["way"]: r["slope_bytes"] for r in memory["rows"]}
    keep = {r["method"]: r for r in findings["keep"]["rows"]}["fsref, rename only"]
    more, inline = slope["by reference"] - slope["without arrays"], slope["inline"] / 1e6
    pause = findings["keep"]["pause"]["p99_ms"] - findings["keep"]["pause"]["idle_p99_ms"]
    share = ratios["bytes read / bytes over HTTP"]["median"]
    return [
        f"On {fetch['machine']}, files in the page cache ([how](docs/benchmarks.md)):",
        "",
        f"- **Fetch, check, unpack and pack: {rate[methods.FSREF]['gb_per_s']:.1f} GB/s** of rows on {fetch['threads']} threads,",
        f"  {zarr['median']:.1f} times zarr-python on the same objects, {http['median']:.1f} times whole blobs over HTTP with",
        f"  {share:.2f} of its bytes. `fsref bench fetch`",
        f"- **The orchestrator holds {more:,} bytes more per sample** in flight than without arrays; inline it holds {inline:.1f} MB",
        f"  ({memory['tokens']:,} tokens). `fsref bench memory`",
        f"- **Keeping {findings['keep']['raw_bytes'] / 1e6:.0f} MB of arrays takes {keep['ms']:.0f} ms** in a thread; the event loop's",
        f"  1 ms timer is {pause:.1f} ms later (p99) than when idle. `fsref bench keep`",
    ]


def write(findings: dict[str, dict[str, Any]]) -> None:
    """All sections."""
    replace_section("Figures", list(figures(findings)), path=PAGE)
    replace_section("On paper: 64 inference nodes, 512 trainer ranks", list(paper()), path=PAGE)
    replace_section("Measured", headline(findings), path=README)


def main(argv: list[str]) -> int:
    """The command line."""
    if argv not in ([], ["--write"], ["--full"]):
        print(__doc__)
        return 2
    if argv == ["--write"]:
        write(json.loads(JSON.read_text(encoding="utf-8")))
        return 0
    findings = measure("full" if argv else "quick")
    JSON.write_text(json.dumps(findings, indent=1) + "\n", encoding="utf-8")
    write(findings)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
