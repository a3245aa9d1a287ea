"""The body of ``fsref inspect``: picks the report, prints it as tables or JSON, draws it."""

import datetime as dt
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from fsref.cli.objectserver import at_hand
from fsref.errors import ConfigError
from fsref.inspection.find import Place, expand, find_run, is_run, parse_object, parse_short, parse_step, shorten
from fsref.inspection.load import LayerLoad
from fsref.inspection.object import file_report, object_report
from fsref.inspection.plot import plot_load, plot_metrics
from fsref.inspection.records import FieldReport, ObjectReport, RunReport, StepReport
from fsref.inspection.run import run_report
from fsref.inspection.status import Status
from fsref.inspection.step import Progress as Told
from fsref.inspection.step import step_report
from fsref.pipeline.metrics import COLUMNS, TITLES, Follower, show_bytes

STATE_STYLES: Final = {"present": "green", "removed": "dim", "removing": "yellow", "lost": "bold red", "unknown": "red"}
WIDTH: Final = 180
PLOTTED: Final = ("reward", "mismatch KL", "orch RSS")


def main(what: str, *, run: str, json: bool, plot: Path | None) -> None:
    """Prints the report on stdout."""
    console = make_console()
    here = Path.cwd()
    step = parse_step(what)
    found = parse_object(what)
    if step is not None:
        with at_hand(find_run(run, here=here)) as place, _progress(enabled=console.is_terminal and not json) as told:
            step_found = step_report(place, step, progress=told)
        _out(step_found, console, json=json)
        if plot is not None:
            plot_load(step_found.load, plot, title=f"{step_found.run}, step {step}: expert load of {step_found.load_objects} objects")
    elif found is not None or _is_file(what) or (parse_short(what) and not is_run(Path(what))):
        thing = _object(what, found, run=run, here=here)
        _out(thing, console, json=json)
        if plot is not None:
            plot_load(thing.load, plot, title=thing.name)
    else:
        with at_hand(_run_place(what, run=run, here=here)) as place:
            _run(place, console, json=json, plot=plot)


def make_console() -> Console:
    """On a terminal as wide as that is; elsewhere wide enough for every table."""
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def _run_place(what: str, *, run: str, here: Path) -> Place:
    if what and run:
        raise ConfigError(f"{what!r} is neither a step (step_000012) nor an object (inc/seq, obj/inc/0000000001.zip, fsref:run/inc/seq)")
    return find_run(what or run, here=here)


def _is_file(what: str) -> bool:
    return what.endswith(".zip") and Path(what).is_file()


def _object(what: str, found: tuple[str, str] | None, *, run: str, here: Path) -> ObjectReport:
    """An object by its id or name in a run; a path into a run's folder names that run; another file is read by itself."""
    path = Path(what)
    folder = path.absolute().parents[2] if len(path.absolute().parents) > 2 else path
    if _is_file(what) and not is_run(folder):
        return file_report(path)
    if not _is_file(what) and found is None:
        with at_hand(find_run(run, here=here)) as place:
            with place.open() as store:
                object_id = expand(what, place, store)
            return object_report(place, object_id)
    if found is None:
        raise ConfigError(f"{what} lies in a run's folder, but its name is no object's: obj/<incarnation>/<number>.zip")
    named = run or found[0] or (str(folder) if _is_file(what) else "")
    with at_hand(find_run(named, here=here)) as place:
        return object_report(place, found[1])


def _run(place: Place, console: Console, *, json: bool, plot: Path | None) -> None:
    report = run_report(place)
    _out(report, console, json=json)
    if place.run_dir is None:
        return
    follower = Follower(place.run_dir / "metrics.jsonl")
    follower.read()
    if not json and follower.steps:
        console.print(_metrics(follower))
    if plot is not None:
        plot_metrics(follower.steps, plot, title=report.run, names=PLOTTED)


@contextmanager
def _progress(*, enabled: bool) -> Iterator[Told]:
    with Progress(console=Console(stderr=True), transient=True, disable=not enabled) as bar:
        task = bar.add_task("reading objects", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _out(report: StepReport | ObjectReport | RunReport, console: Console, *, json: bool) -> None:
    if json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")
        return
    shown = {StepReport: _show_step, ObjectReport: _show_object, RunReport: _show_run}[type(report)]
    shown(report, console)  # type: ignore[operator]  # the table pairs each record with its own function


def when(ms: int) -> str:
    """A wall clock in milliseconds for people: local time."""
    return dt.datetime.fromtimestamp(ms / 1000, dt.UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S") if ms else "-"


def show_head(console: Console, title: str, pairs: dict[str, str]) -> None:
    """A bold title and named values below it."""
    console.print(Text(title, style="bold"))
    width = max(map(len, pairs))
    for name, value in pairs.items():
        console.print(Text(f"  {name:<{width}}  {value}"), soft_wrap=True)


def make_table(title: str, *columns: str) -> Table:
    """Columns named with a trailing ``>`` are numbers."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name.removesuffix(">"), justify="right" if name.endswith(">") else "left", overflow="fold")
    return table


def _show_step(r: StepReport, console: Console) -> None:
    show_head(
        console,
        f"step {r.step} of run {r.run}",
        {
            "published": f"{when(r.ms)}, weights version {r.version}",
            "holds": f"{r.samples} samples, {r.tokens} tokens, {r.objects} objects, {show_bytes(r.bytes)}",
            "counts": "the rank files own exactly what was shipped" if r.complete else "NOT what was shipped, see the notes",
            "objects": ", ".join(f"{n} {s}" for s, n in sorted(r.states.items())) or "none",
            **({"removed by": "; ".join(f"{who} ({n})" for who, n in sorted(r.removed.items()))} if r.removed else {}),
        },
    )
    ranks = make_table("data ranks", "rank>", "micro batches>", "samples>", "padding>", "tokens>", "references>", "owned objects>")
    for rank in r.ranks:
        ranks.add_row(*(str(getattr(rank, f)) for f in rank.__struct_fields__))
    console.print(ranks)
    console.print(_fields(r.fields))
    samples = make_table(
        "samples", "mb", "sample", "tokens>", "trained>", "reward>", "adv>", "ver>", "object", "bytes>", "missing", "status"
    )
    short = shorten(r.status)
    for s in r.rows:
        trace, _, branch = s.sample.partition("/")
        samples.add_row(
            f"{s.data_rank}.{s.micro_batch}",
            f"{trace[:8]}/{branch}" + (" (padding)" if s.padding else ""),
            str(s.tokens),
            str(s.trained),
            f"{s.reward:.3f}",
            f"{s.advantage:+.3f}",
            str(s.version),
            "\n".join(short.get(o, o) for o in s.objects) or "-",
            show_bytes(s.bytes),
            ", ".join(f"{n} {c}" for n, c in s.missing.items()) or "-",
            Text("\n").join([_state(r.status.get(o)) for o in s.objects]),
        )
    console.print(samples)
    _show_load(r.load, console, f"expert load of {r.load_objects} objects", gone=r.objects > 0)
    for note in r.notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)


def _fields(fields: tuple[FieldReport, ...]) -> Table:
    table = make_table("fields", "field", "declared as", "samples>", "rows>", "missing>", "coverage>", "values>")
    for f in fields:
        covered = f"{(f.rows - f.rows_missing) / f.rows:.2%}" if f.rows else "-"
        table.add_row(f.name, f.kind, str(f.samples), str(f.rows), str(f.rows_missing), covered, str(f.values or "-"))
    return table


def _state(status: Status | None) -> Text:
    if status is None:
        return Text("owned by another step", style="dim")
    text: str = status.state
    if status.state in {"removed", "removing"}:
        text += f" ({status.reason}) by {status.by.rpartition('.')[0]} {when(status.done_ms or status.dropped_ms)}"
    return Text(text, style=STATE_STYLES[status.state])


def _show_load(load: tuple[LayerLoad, ...], console: Console, title: str, *, gone: bool) -> None:
    if not load:
        if gone:
            console.print(Text("expert load: removed with the objects", style="dim"))
        return
    table = make_table(title, "layer>", "rows>", "busiest>", "idle experts>", "experts, the busiest first")
    for layer in load:
        first = sorted(range(len(layer.counts)), key=lambda e: (-layer.counts[e], e))[:8]
        named = " ".join(f"{e}:{layer.counts[e]}" for e in first)
        table.add_row(str(layer.layer), str(sum(layer.counts)), f"{layer.busiest:.2f}x", f"{layer.idle} of {len(layer.counts)}", named)
    console.print(table)


def _show_object(r: ObjectReport, console: Console) -> None:
    pairs = {"status": "a file outside any run" if r.status is None else _state(r.status).plain}
    if r.status is not None and r.status.kept_ms:
        pairs["kept"] = when(r.status.kept_ms)
    if r.arrays:
        pairs |= {"holds": f"{r.tokens} tokens, {show_bytes(r.bytes)}, codec {r.codec}", "token hash": r.token_hash}
    show_head(console, r.name, pairs)
    if not r.arrays:
        return
    console.print(_fields(r.fields))
    table = make_table("arrays", "array", "dtype", "shape", "chunk", "chunks>", "stored>", "raw>", "ratio>")
    for a in r.arrays:
        ratio = f"{a.bytes_raw / a.bytes_stored:.2f}x" if a.bytes_stored else "-"
        shape, chunk = ("x".join(map(str, s)) for s in (a.shape, a.chunk_shape))
        table.add_row(a.path, a.dtype, shape, chunk, str(a.chunks), show_bytes(a.bytes_stored), show_bytes(a.bytes_raw), ratio)
    console.print(table)
    _show_load(r.load, console, "expert load", gone=False)


def _show_run(r: RunReport, console: Console) -> None:
    roles = ", ".join(f"{n} {role}" for role, n in sorted(r.incarnations.items()))
    pairs = {"made": when(r.ms), "at": r.url, "uuid": r.run_uuid, "codec": r.codec}
    show_head(console, f"run {r.run}", pairs | {"store": f"{r.objects} objects, {show_bytes(r.bytes)}", "journals": roles or "none"})
    fields = make_table("fields", "field", "declared as")
    for name, kind in r.fields.items():
        fields.add_row(name, kind)
    console.print(fields)
    if not r.steps:
        return
    steps = make_table("steps", "step>", "published", "samples>", "tokens>", "objects>", "bytes>", "version>")
    for s in r.steps:
        steps.add_row(str(s.step), when(s.ms), str(s.samples), str(s.tokens), str(s.objects), show_bytes(s.bytes), str(s.version))
    console.print(steps)


def _metrics(follower: Follower) -> Table:
    assert len(TITLES) == len(COLUMNS) + 1
    table = make_table("metrics", *(f"{t}>" for t in TITLES))
    for step in sorted(follower.steps):
        table.add_row(*follower.cells(step))
    return table
