"""The body of ``fsref bench``: measures, each bench in a process of its own, and prints tables or JSON."""

import json as json_module
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from fsref.bench.report import cell, columns_of, facts, plot, tables
from fsref.bench.suite import Size, in_process, plan
from fsref.bench.workload import Options
from fsref.cli.show import make_console, make_table, show_head


def main(what: str, options: Options, *, size: Size, routing: str, json: bool, plot_to: Path | None) -> None:
    """Runs one bench, or all of them, and shows what was found."""
    runs = plan(what, options, size=size, routing=routing)
    console = make_console()
    findings: dict[str, dict[str, Any]] = {}
    for label, run in runs.items():
        findings[label] = in_process(run)
        if not json:
            _show(console, label, findings[label])
    if json:
        sys.stdout.write(json_module.dumps(findings if len(findings) > 1 else next(iter(findings.values())), indent=1) + "\n")
    if plot_to is not None:
        plot(list(findings.values()), plot_to)


def _show(console: Console, label: str, found: Mapping[str, Any]) -> None:
    show_head(console, label, {k: v for k, v in facts(found).items() if k != "bench"})
    for title, rows in tables(found):
        names = columns_of(rows)
        table = make_table(title, *(f"{n.replace('_', ' ')}{'>' if isinstance(rows[0].get(n), int | float) else ''}" for n in names))
        for row in rows:
            table.add_row(*(cell(n, row.get(n)) for n in names))
        console.print(table)
