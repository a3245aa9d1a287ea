"""Which run a user means, and which step or object of it.

Owns the rules: an explicit name (folder, URL or id), else run.json in the working folder, else the newest run under ./runs. Refuses to
guess further: no match lists the runs there are.
"""

import contextlib
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fsref import config as settings
from fsref.errors import BadRef, ConfigError
from fsref.journal import Ledger
from fsref.journal.read import LedgerReader
from fsref.refs import INCARNATION_PATTERN, RUN_PATTERN, check_run, split_object_id
from fsref.store import Store, open_root, posix_root

RUNS: Final = "runs"
LISTED_MAX: Final = 20
_STEP: Final = re.compile(r"(?:steps/)?step_(\d{6,9})/?", re.ASCII)
_TEXT: Final = re.compile(rf"fsref:({RUN_PATTERN})/({INCARNATION_PATTERN}/\d{{1,10}})", re.ASCII)
_SHORT: Final = re.compile(r"([a-z0-9-]{1,40})/(0|[1-9][0-9]{0,9})", re.ASCII)
_NAME: Final = re.compile(rf"(?:.*/)?obj/({INCARNATION_PATTERN})/(\d{{10}})\.zip", re.ASCII)


@dataclass(frozen=True)
class Place:
    """Where a run is."""

    root: str
    run: str
    """The run's name below the root."""
    run_dir: Path | None
    """The POSIX folder with logs, metrics and live journals, if it is known here."""
    section: settings.StoreSection

    @property
    def ledger_dir(self) -> Path | None:
        """The folder of the journals; None where it is not known here. Then the root tells what was sealed of them."""
        return self.run_dir / "ledger" if self.run_dir is not None else None

    @contextlib.contextmanager
    def writable_ledger(self) -> Iterator[Path]:
        """A folder for the journal of a recovery: the run's, or where that is not known here one that is removed again."""
        if self.ledger_dir is not None:
            yield self.ledger_dir
            return
        with tempfile.TemporaryDirectory(prefix="fsref-ledger-") as folder:
            yield Path(folder) / "ledger"

    def open(self) -> Store:
        """The run's store; close it."""
        return open_root(self.root, run=self.run, settings=self.section)


def find_run(name: str, *, here: Path) -> Place:
    """The run that ``name`` means, seen from the folder ``here``; empty: the one at hand. Raises ``ConfigError`` that lists the runs."""
    if "://" in name:
        root, _, run = name.rstrip("/").rpartition("/")
        folder = posix_root(root)
        if folder is not None:
            return place_of(folder / _checked(run))
        return Place(root, _checked(run), None, settings.StoreSection())
    if name:
        for folder in (Path(name).expanduser(), here / name, here / RUNS / name):
            if is_run(folder):
                return place_of(folder)
        raise ConfigError(f"no run {name!r}: it is neither a run's folder nor an id under {RUNS}/; {_listing(here)}")
    if is_run(here):
        return place_of(here)
    found = runs(here / RUNS)
    if not found:
        raise ConfigError(f"which run? There is no run.json in {here} and no run under {here / RUNS}: name one with --run")
    return place_of(found[0])


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's: it has run.json (a POSIX root) or config.json beside the logs (a run folder of a remote root)."""
    return (folder / "run.json").is_file() or ((folder / "config.json").is_file() and (folder / "logs").is_dir())


def place_of(folder: Path) -> Place:
    """The place of a run's folder. With run.json there the folder is the run, wherever it was moved to; else its config.json says where
    it is.
    """
    folder = folder.absolute()
    config = _config(folder)
    if (folder / "run.json").is_file():
        return Place(str(folder.parent), _checked(folder.name), folder, config.store if config else settings.StoreSection())
    if config is None:
        raise ConfigError(f"{folder} has neither run.json nor a config.json that can be read: it is no run's folder")
    return Place(config.run.root, _checked(config.run.id), folder, config.store)


def runs(folder: Path) -> list[Path]:
    """The runs in a folder, the newest first."""
    if not folder.is_dir():
        return []
    return sorted(filter(is_run, folder.iterdir()), key=_age, reverse=True)


def _age(folder: Path) -> float:
    marker = folder / "run.json"
    return (marker if marker.is_file() else folder / "config.json").stat().st_mtime


def _config(folder: Path) -> settings.Config | None:
    """The run's config; None if there is none or this version cannot read it (looking must work all the same)."""
    try:
        return settings.load(folder / "config.json")
    except ConfigError:
        return None


def _checked(run: str) -> str:
    try:
        return check_run(run)
    except BadRef as e:
        raise ConfigError(str(e)) from e


def _listing(here: Path) -> str:
    names = [p.name for p in runs(here / RUNS)]
    if not names:
        return f"there are no runs under {here / RUNS}"
    more = f" and {len(names) - LISTED_MAX} older" if len(names) > LISTED_MAX else ""
    return f"runs there, the newest first: {', '.join(names[:LISTED_MAX])}{more}"


def parse_step(what: str) -> int | None:
    """``step_000012`` (or ``steps/step_000012``) to 12."""
    match = _STEP.fullmatch(what)
    return int(match.group(1)) if match else None


def parse_object(what: str) -> tuple[str, str] | None:
    """The run (empty if it is not said) and the object id of ``inc/seq``, ``obj/inc/0000000001.zip``, a path that ends so, or
    ``fsref:run/inc/seq``.
    """
    if match := _TEXT.fullmatch(what.partition(",")[0]):
        return match.group(1), match.group(2)
    if match := _NAME.fullmatch(what):
        return "", f"{match.group(1)}/{int(match.group(2))}"
    try:
        split_object_id(what)
    except BadRef:
        return None
    return "", what


def parse_short(what: str) -> bool:
    """Whether ``what`` is an object's short form for people: ``<label>/<seq>``, as the tables of a step show it."""
    return _SHORT.fullmatch(what) is not None


def expand(what: str, place: Place, store: Store) -> str:
    """The object id that a short form means in a run; raises ``ConfigError`` if no producer, or more than one, has that label."""
    match = _SHORT.fullmatch(what)
    assert match is not None
    label, seq = match.groups()
    known = {name.split("/")[1] for name in (e.name for e in store.list("obj"))}
    known |= LedgerReader(Ledger.of(store, place.ledger_dir)).names()
    found = sorted(inc for inc in known if inc.split(".")[:2] == ["env", label])
    if len(found) != 1:
        said = f"is not enough, several producers have it: {', '.join(found)}" if found else "is of no producer of this run"
        raise ConfigError(f"object {what!r}: the label {label!r} {said}")
    return f"{found[0]}/{seq}"


def shorten(object_ids: Iterable[str]) -> dict[str, str]:
    """Short forms of the ids, where a label stands for one producer only; else the id itself."""
    ids = list(object_ids)
    producers: dict[str, set[str]] = {}
    for object_id in ids:
        inc = object_id.split("/")[0]
        producers.setdefault(inc.split(".")[1], set()).add(inc)
    out = {}
    for object_id in ids:
        inc, seq = object_id.split("/")
        label = inc.split(".")[1]
        out[object_id] = f"{label}/{seq}" if len(producers[label]) == 1 else object_id
    return out
