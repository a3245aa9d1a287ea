"""The full grids of `fsref bench scaling`: samples 1 to 10,000, tokens 1k to 128k, threads 1 to 16, ranks 1 to 8.

Writes docs/results/scaling.json and the section *Where each curve bends* of docs/benchmarks.md.

    python -m tools.scaling            # about two minutes and 1 GB on two cores
    python -m tools.scaling --write    # the section again from docs/results/scaling.json; measures nothing
"""

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from fsref.bench.report import markdown, ratio_rows, tables
from fsref.bench.scaling import scaling
from fsref.bench.suite import in_process
from fsref.bench.workload import Options
from tools.results import paragraph, replace_section

ROOT: Final = Path(__file__).resolve().parent.parent
JSON: Final = ROOT / "docs" / "results" / "scaling.json"
PAGE: Final = ROOT / "docs" / "benchmarks.md"
TITLE: Final = "Where each curve bends"
READING: Final = {
    "samples of a step": (
        "Samples of 64 tokens, 512 bytes each, so that only what is paid per sample is seen; median, least and most of the rounds. A "
        "step of one sample is dearest: it is handed to a thread and back while nobody works meanwhile. From 10 on the cost is that "
        "of planning, opening, reading and decoding one object. It does not grow with the step: at most 64 plans are under way, and "
        "nothing is kept per sample. Rounds of one size differ by twice, since two threads of Python share one interpreter and the cores "
        "with whatever else runs, so sizes are compared by their least rounds. "
        "An earlier form of this bench said 21 %: it compared the best of seven warm rounds over 100 "
        "objects with one first round over 10,000. Rounds over 10,000 objects took 9 to 29 % more processor time than rounds over the "
        "same 2,000: that is the caches (of the processor, for inodes, names and pages), not the step. Now every size reads "
        "all objects in each round, after one pass over all, with the collector off as in every bench here; with it on the "
        "processor time was within 9 % of that."
    ),
    "tokens of a sample": (
        "By processor time a token costs nearly the same from 16,384 tokens on: reading and unpacking are the cost. Below, a sample is one "
        "to four token ranges and the Python per sample, field and request shows (`fetch-none` under [Profiles](#profiles))."
    ),
    "threads": (
        "The processor time hardly changes, since reads from the page cache do not wait: so throughput grows with the threads that find a "
        "core free, and with no others. Two threads do 1.5 times what one does: plans are made by one thread, memory is shared, and at "
        "9 GB/s both show. Storage with latency is another matter: there more threads than cores wait side by side."
    ),
    "ranks": (
        "Processes of one thread each that read the same samples for a second at once; *slowest* and *fastest* are of single ranks. "
        "The sum bends where the cores are taken, as with threads, and ranks beyond them share what there is, about evenly: nothing "
        "is locked between ranks."
    ),
}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The section of docs/benchmarks.md."""
    yield f"`python -m tools.scaling` on {found['machine']}: {found['shape']}, {found['repeats']} rounds, interleaved;"
    yield f"load average {found['load']:g} at the start. [results/scaling.json](results/scaling.json). Wall time unless it says cpu."
    for title, rows in tables(found):
        if title not in READING:
            continue
        yield ""
        yield f"{title}:"
        yield ""
        yield from markdown(rows)
        yield ""
        yield from paragraph(READING[title])
    yield ""
    yield from markdown(ratio_rows(found))


def main(argv: list[str]) -> int:
    """The command line."""
    if argv not in ([], ["--write"]):
        print(__doc__)
        return 2
    found = json.loads(JSON.read_text(encoding="utf-8")) if argv else in_process(partial(scaling, Options()))
    JSON.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    replace_section(TITLE, list(lines(found)), path=PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
