"""Findings of a bench for people: tables, Markdown, a picture. Refuses to judge: a ratio stands beside its target."""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsref.errors import ConfigError, MissingExtra

Rows = Sequence[Mapping[str, Any]]


def show_bytes(count: float) -> str:
    """``24.9 MB``; decimal, as rates are."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def cell(name: str, value: Any) -> str:
    """One value as a table shows it: names that mean bytes get a unit."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool) and (name.endswith("bytes") or name in ("bytes_read", "peak")):
        return "?" if value < 0 else show_bytes(value)
    return f"{value:,}" if type(value) is int else str(value)


def columns_of(rows: Rows) -> list[str]:
    """Every key that a row has, in order of appearance."""
    return list(dict.fromkeys(k for row in rows for k in row))


def markdown(rows: Rows) -> list[str]:
    """The lines of a table."""
    names = columns_of(rows)
    head = ["| " + " | ".join(n.replace("_", " ") for n in names) + " |", "|" + "---|" * len(names)]
    return head + ["| " + " | ".join(cell(n, row.get(n, "-")) for n in names) + " |" for row in rows]


def ratio_rows(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """The ratios of a finding beside what they should reach."""
    return [
        {
            "ratio": r["ratio"],
            "measured": _spread(r),
            "by processor time": f"{r['cpu']:.2f}" if "cpu" in r else "-",
            "to reach": "-" if not r["reach"] else f"{'at least' if r['at_least'] else 'at most'} {r['reach']:g}",
            "reached": "-" if not r["reach"] else ("yes" if _reached(r) else "no"),
        }
        for r in found.get("ratios", ())
    ]


def _spread(r: Mapping[str, Any]) -> str:
    return f"{r['median']:.3g}" if r["least"] == r["most"] else f"{r['median']:.2f} ({r['least']:.2f}-{r['most']:.2f})"


def _reached(r: Mapping[str, Any]) -> bool:
    return bool(r["median"] >= r["reach"] if r["at_least"] else r["median"] <= r["reach"])


def tables(found: Mapping[str, Any]) -> Iterator[tuple[str, Rows]]:
    """Every list of rows in a finding with its title."""
    for name, value in found.items():
        if name == "ratios":
            yield "ratios", ratio_rows(found)
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield ("" if name == "rows" else name.replace("_", " ")), value


def facts(found: Mapping[str, Any]) -> dict[str, str]:
    """What stands above the tables."""
    out = {k.replace("_", " "): cell(k, v) for k, v in found.items() if isinstance(v, str | int | float)}
    for k, v in found.items():
        if isinstance(v, Mapping):
            out[k.replace("_", " ")] = ", ".join(f"{n} {cell(k, x)}" for n, x in v.items())
    return out


def plot(findings: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Bars of every row that has a rate, one panel per finding. Raises ``ConfigError`` for none, ``MissingExtra`` without matplotlib."""
    shown = [f for f in findings if any("gb_per_s" in r for r in f.get("rows", ()))]
    if not shown:
        raise ConfigError("none of these findings has a rate to draw")
    try:
        figure_module = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as e:
        raise MissingExtra.of("plot", "matplotlib") from e
    figure = figure_module.Figure(figsize=(9, 3.5 * len(shown)), layout="constrained", dpi=120)
    for axes, found in zip(figure.subplots(len(shown), 1, squeeze=False)[:, 0], shown, strict=True):
        rows = [r for r in found["rows"] if "gb_per_s" in r][::-1]
        labels = [str(next(iter(r.values()))) for r in rows]
        spread = [[r["gb_per_s"] * (1 - r["ms"] / r["ms_max"]) for r in rows], [r["gb_per_s"] * (r["ms"] / r["ms_min"] - 1) for r in rows]]
        axes.barh(labels, [r["gb_per_s"] for r in rows], xerr=spread, color="tab:blue", ecolor="tab:gray")
        axes.set_xlabel("GB/s of raw rows")
        axes.set_title(f"{found['bench']}: {found.get('shape', '')}, {found.get('tokens', '')} tokens, {found.get('threads', '')} threads")
    try:
        figure.savefig(path, format="png")
    except OSError as e:
        raise ConfigError(f"the picture cannot be written to {path}: {e.strerror}") from e
