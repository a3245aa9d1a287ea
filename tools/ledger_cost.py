"""What the ledger costs: per object on the hot path, an audit of a million objects, a recovery of a hundred thousand.

    python -m tools.ledger_cost            # all three; writes docs/results/ledger.json and its section of docs/results.md
    python -m tools.ledger_cost path       # one of path, audit, recovery; prints only
    python -m tools.ledger_cost profile    # where the time of the path goes

Everything happens in a temporary folder (``TMPDIR`` says where). Figures depend on the machine; tests assert counts, never these.
"""

import cProfile
import json
import os
import platform
import pstats
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from fsref.bench.ledger import PATH_OBJECTS, STEP_OBJECTS, audit_cost, path, paths, recovery_cost
from tools.results import replace_section

ROOT: Final = Path(__file__).resolve().parent.parent


def profile() -> None:
    """The hot path without a disk."""
    for trained in (False, True):
        profiler = cProfile.Profile()
        profiler.runcall(path, disk=False, trained=trained)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


TARGETS: Final = """\
To reach were 15 µs mean and 100 µs p99 a call without the disk's part, and 200,000 records/s: the p99 is met, the mean by objects that
are trained, by objects that are dropped one at a time not, and the audit falls short by a sixteenth. A record is one `write(2)`, so that a
killed process loses none: 2.6 µs, half of it the kernel's. The rest are small Python calls, of which none stands out in a profile
(`python -m tools.ledger_cost profile`), and so it follows the interpreter: one built with PGO and LTO (Debian's) is 1.16 times as fast as
pyenv's default build, which measured this. The audit's memory is one dict entry per id and process that named it.

On S3 a step takes 2 PUTs; a removal 1 POST per 1,000 objects and 1 HEAD per batch; an object its PUT and its ranged GETs, nothing
for the ledger (`tests/reaper/test_cost_guards.py` and `tests/reaper/test_root_on_s3.py` count them).""".splitlines()


def write_results(found: dict[str, Any]) -> None:
    """docs/results/ledger.json and its section."""
    (ROOT / "docs" / "results" / "ledger.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    a, r = found["audit"], found["recovery"]
    replace_section(
        "What the ledger costs",
        [
            f"`python -m tools.ledger_cost` on {found['machine']}. Microseconds per object from keep to done, every reply with one object,",
            f"steps of {STEP_OBJECTS}, {PATH_OBJECTS:,} objects; *mean* is all time, the deleter's included, *call* what callers waited.",
            "",
            "| way of an object | mean | processor | call, mean | call, p99 |",
            "|---|---|---|---|---|",
            *(
                f"| {name} | {p['mean_us']:.1f} | {p['cpu_us']:.1f} | {p['call_mean_us']:.1f} | {p['call_p99_us']:.1f} |"
                for name, p in found["path"].items()
            ),
            "",
            f"Audit of {a['objects']:,} objects, {a['records']:,} records in {a['journal_mib']:.0f} MiB of journals: {a['seconds']:.1f} s,",
            f"{a['records_per_s']:,.0f} records/s, {a['peak_mib']:,.0f} MiB at the peak ({a['start_mib']:,.0f} MiB at the start).",
            f"Recovery of {r['objects']:,} objects on a local filesystem: {r['seconds']:.1f} s, {r['objects_per_s']:,.0f} objects/s.",
            "",
            *TARGETS,
        ],
    )


def main(argv: list[str]) -> int:
    """The command line."""
    parts: dict[str, Callable[[], Any]] = {"path": paths, "audit": audit_cost, "recovery": recovery_cost}
    if argv == ["profile"]:
        profile()
        return 0
    if any(name not in parts for name in argv):
        print(__doc__)
        return 2
    found = {name: parts[name]() for name in argv or parts}
    found["machine"] = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    print(json.dumps(found, indent=1))
    if not argv:
        write_results(found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
