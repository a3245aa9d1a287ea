"""Where the time of the hot paths goes: py-spy and perf look at a process that does nothing else.

Writes docs/results/profiles.json and the section *Profiles* of docs/benchmarks.md. Needs `pip install py-spy`, perf where there is one, and
the right to look at a child (root, or kernel.yama.ptrace_scope = 0 and kernel.perf_event_paranoid of at most 1).

py-spy looks without stopping the process: with native frames it has to stop it, which showed waiting threads as the busiest. Time in
native code is its Python caller's there; perf says which symbol it was.

    python -m tools.profiles               # all works, about a minute and a half
    python -m tools.profiles --write       # the section again from docs/results/profiles.json; looks at nothing
    python -m tools.profiles work fetch    # does that work for a while, for another profiler: perf record -g -p PID
"""

import contextlib
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from fsref.bench.ledger import path as ledger_path
from fsref.bench.measure import machine
from fsref.bench.methods import Fsref
from fsref.bench.report import markdown
from fsref.bench.shapes import shape_of
from fsref.bench.workload import Coded, Options, workload
from fsref.writer import Receipts, Writer
from tools.results import paragraph, replace_section

ROOT: Final = Path(__file__).resolve().parent.parent
JSON: Final = ROOT / "docs" / "results" / "profiles.json"
PAGE: Final = ROOT / "docs" / "benchmarks.md"
TITLE: Final = "Profiles"
LOOK_S: Final = 10
RATE_HZ: Final = 500
WORK_S: Final = 90.0
TOP: Final = 10
LEDGER_OBJECTS: Final = 5_000
COLUMNS: Final = ("fetch", "fetch-none", "keep", "ledger")


@contextlib.contextmanager
def fetch_work(coded: Coded) -> Iterator[Callable[[], Any]]:
    """Four samples of 16,384 tokens, all fields, fetched, checked and packed on two threads."""
    options = Options()
    with workload(options, shape_of(options.shape)) as work:
        method = Fsref(work, coded)
        try:
            yield method.run
        finally:
            method.close()


@contextlib.contextmanager
def keep_work() -> Iterator[Callable[[], Any]]:
    """One such sample encoded and published, without fsync, in one thread."""
    options = Options(samples=1)
    with workload(options, shape_of(options.shape)) as work:
        store = work.stores["default"]
        writer = Writer(store, work.schema("default"), Receipts("profile"), durability="process")

        def put() -> None:
            names = [f"obj/{writer.put(work.sample(0)).object_ids[0]}.zip" for _ in range(4)]
            store.delete(names)

        yield put


@contextlib.contextmanager
def ledger_work() -> Iterator[Callable[[], Any]]:
    """Objects from keep to done, each dropped by itself, without syncs and unlinks."""
    yield lambda: ledger_path(disk=False, trained=False, objects=LEDGER_OBJECTS)


WORKS: Final = {
    "fetch": lambda: fetch_work("default"),
    "fetch-none": lambda: fetch_work("none"),
    "keep": keep_work,
    "ledger": ledger_work,
}
_SYMBOL: Final = re.compile(r"\s*([0-9.]+)%\s+\[(.)\]\s+(\S+)")
READING: Final = (
    "How to read it: a fetch is one call into C per 8 MiB (`Kernels.fetch`): with the default codec LZ4, the transposition of bits and the "
    "reads, with codec none the kernel's copy out of the page cache and the checksums; Python around it plans, finds places and opens. "
    "Keeping is first the kernel's copy into the page cache, then packing, then the lints' passes over the arrays. Of the ledger a third "
    "is appending to a journal, one write per record; the rest is many small Python functions, of which none stands out."
)
TITLES: Final = {
    "fetch": "Fetch, default codec: four samples of 16,384 tokens with heads and masks (100 MB of rows), two threads, page cache",
    "fetch-none": "Fetch, codec none: the same",
    "keep": "Keep: one such sample encoded and published, without fsync, one thread",
    "ledger": "Ledger: objects from keep to done, each dropped by itself, without syncs and unlinks",
}


def work_for(name: str, seconds: float) -> None:
    """Does one work over and over; says ``ready`` once it is warm."""
    with WORKS[name]() as once:
        once()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            once()


def looked_at(name: str) -> dict[str, Any]:
    """The summary of a work, from outside."""
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
    if spy is None:
        raise SystemExit("py-spy is not installed: pip install py-spy")
    with tempfile.TemporaryDirectory(prefix="fsref-profiles-") as folder:
        stacks, events = Path(folder) / "stacks", Path(folder) / "events"
        command = [sys.executable, "-m", "tools.profiles", "work", name]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                if process.stdout.readline().strip() != "ready":
                    raise SystemExit(f"{' '.join(command)} ended before it was ready")
                asked = [spy, "record", "--nonblocking", "--format", "raw", "--rate", str(RATE_HZ), "--duration", str(LOOK_S)]
                subprocess.run([*asked, "--output", str(stacks), "--pid", str(process.pid)], check=True, capture_output=True)
                symbols = perf(process.pid, events)
            finally:
                process.kill()
        return summary(stacks.read_text(encoding="utf-8").splitlines()) | {"symbols": symbols}


def perf(pid: int, events: Path) -> list[dict[str, Any]]:
    """Shares of symbols by perf; none where there is no perf."""
    program = shutil.which("perf")
    if program is None:
        return []
    record = [program, "record", "--freq", str(RATE_HZ), "--pid", str(pid), "--output", str(events), "--", "sleep", str(LOOK_S)]
    subprocess.run(record, check=True, capture_output=True)
    report = [program, "report", "--input", str(events), "--stdio", "--quiet", "--sort", "symbol"]
    done = subprocess.run(report, check=True, capture_output=True, text=True)
    return symbols_of(done.stdout.splitlines())


def symbols_of(report: Iterable[str]) -> list[dict[str, Any]]:
    """perf's ``36.93%  [.] symbol`` as shares, most first; ``[k]`` is the kernel."""
    found = [m for line in report if (m := _SYMBOL.match(line))]
    return [
        {"where": f"{m[3].strip()}{' (kernel)' if m[2] == 'k' else ''}", "share": round(float(m[1]) / 100, 4)} for m in found[: 3 * TOP]
    ]


def summary(stacks: Iterable[str]) -> dict[str, Any]:
    """Shares of the busy looks: by the function on top, and by every function of this package anywhere in a stack.

    Threads that wait in ``threading`` are left out, and what py-spy misread of a process that it does not stop.
    """
    top, within = Counter[str](), Counter[str]()
    total = 0
    for line in stacks:
        frames, _, count = line.rpartition(" ")
        names = [shown(f) for f in frames.split(";")]
        if not count.isdigit() or not names[-1]:
            continue
        if names[-1].endswith("(threading.py)"):
            continue
        total += int(count)
        top[names[-1]] += int(count)
        for name in {n for n in names if n.startswith("fsref/")}:
            within[name] += int(count)
    return {"looks": total, "top": _shares(top, total), "within": _shares(within, total)}


def _shares(counts: Counter[str], total: int) -> list[dict[str, Any]]:
    most = sorted(counts.items(), key=lambda found: (-found[1], found[0]))
    return [{"where": where, "share": round(count / total, 3)} for where, count in most[: 3 * TOP]]


def shown(frame: str) -> str:
    """``fsref/reader/run.py plan``, ``read (selectors.py)``: without line numbers, which differ from change to change."""
    name, _, place = frame.rpartition(" (")
    if not name:
        return frame
    place = place.rstrip(")").partition(":")[0]
    if "fsref/" in place:
        return f"fsref/{place.rpartition('fsref/')[2]} {name}"
    return f"{name} ({place.rpartition('/')[2]})"


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The section of docs/benchmarks.md."""
    yield f"`python -m tools.profiles` on {found['machine']} with {found['py_spy']} and perf: {RATE_HZ} looks a second for {LOOK_S} s each,"
    yield "after a warm round, waiting threads left out. Raw shares: [results/profiles.json](results/profiles.json). By hand:"
    yield ""
    yield "    python -m tools.profiles work fetch &      # or fetch-none, keep, ledger: for a minute and a half"
    yield f"    py-spy record --nonblocking --rate {RATE_HZ} --duration {LOOK_S} --output fetch.svg --pid $!"
    yield f"    perf record -F {RATE_HZ} -p $! -- sleep {LOOK_S} && perf report --stdio --sort symbol"
    yield ""
    yield "*Python, on top*: the function that ran, native code that it called included. *Within*: it or anything that it called; of this"
    yield "package only. *Symbol*: what the processor ran."
    for name in COLUMNS:
        one = found["works"][name]
        yield ""
        yield f"{TITLES[name]} ({one['looks']:,} looks):"
        yield ""
        yield from markdown(
            [
                {"Python, on top": a[0], "share": a[1], "within": b[0], "its share": b[1], "symbol": c[0], "of all": c[1]}
                for a, b, c in zip(*(_cells(one[key]) for key in ("top", "within", "symbols")), strict=True)
            ]
        )
    yield ""
    yield from paragraph(READING)


def _cells(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """``TOP`` cells, the last ones empty where there are fewer."""
    cells = [(f"`{r['where'].replace('|', '/')}`", f"{r['share']:.1%}") for r in rows[:TOP]]
    return cells + [("-", "-")] * (TOP - len(cells))


def main(argv: list[str]) -> int:
    """The command line."""
    if len(argv) == 2 and argv[0] == "work" and argv[1] in WORKS:
        work_for(argv[1], WORK_S)
        return 0
    if argv not in ([], ["--write"]):
        print(__doc__)
        return 2
    if argv:
        found = json.loads(JSON.read_text(encoding="utf-8"))
    else:
        works = {name: looked_at(name) for name in WORKS}
        found = {"machine": machine(), "py_spy": _version(), "works": works}
        JSON.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    replace_section(TITLE, list(lines(found)), path=PAGE)
    return 0


def _version() -> str:
    try:
        return f"py-spy {importlib.metadata.version('py-spy')}"
    except importlib.metadata.PackageNotFoundError:  # another environment's
        return "py-spy"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
