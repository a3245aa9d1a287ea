"""From TOML, JSON and the command line to a frozen ``Config``, and the messages for what does not fit."""

import datetime as dt
import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from fsref.config.sections import Config
from fsref.errors import ConfigError


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a TOML file, or the JSON form of ``dump`` if so suffixed, and applies ``section.key=value`` overrides.

    An override's value is TOML; a bare word is a string.

    Raises ``ConfigError`` with the file, the key and, for a typo, the nearest name.
    """
    data = _read(Path(path))
    for item in overrides:
        key, sep, value = item.partition("=")
        if not sep or not key:
            raise ConfigError(f"override {item!r} is not of the form section.key=value")
        _assign(data, key, _toml_value(value))
    return build(data, source=str(path))


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"cannot read the config {str(path)!r}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: not UTF-8 text: {e.reason} at byte {e.start}") from e
    try:
        data = msgspec.json.decode(text) if path.suffix == ".json" else tomllib.loads(text)
    except (tomllib.TOMLDecodeError, msgspec.DecodeError) as e:
        raise ConfigError(f"{path}: not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {e}") from e
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds no settings")
    return data


def build(data: Mapping[str, Any], *, source: str = "config") -> Config:
    """Checks plain data and returns the frozen ``Config``; raises ``ConfigError``."""
    _refuse_unknown(data, Config, "", source)
    try:
        return msgspec.convert(data, Config)
    except msgspec.ValidationError as e:
        if isinstance(e.__cause__, ConfigError):
            raise ConfigError(f"{source}: {e.__cause__}") from e
        raise ConfigError(f"{source}: {str(e).replace('`$.', '`').replace(' - at ', ' at ')}") from e


def dump(config: Config) -> bytes:
    """The JSON form that roles are started with; ``parse`` reads it back."""
    return msgspec.json.format(msgspec.json.encode(config), indent=1)


def parse(data: bytes) -> Config:
    """Inverse of ``dump``."""
    try:
        plain = msgspec.json.decode(data)
    except msgspec.DecodeError as e:
        raise ConfigError(f"not a config: {e}") from e
    return build(plain, source="resolved config")


def keys(section: type[msgspec.Struct] = Config, prefix: str = "") -> list[str]:
    """Every scalar setting as a dotted name, in order of declaration."""
    out: list[str] = []
    for name, hint in get_type_hints(section, include_extras=True).items():
        inner = struct_of(hint)
        if inner is not None and get_origin(hint) is not tuple:
            out += keys(inner, f"{prefix}{name}.")
        else:
            out.append(f"{prefix}{name}")
    return out


def struct_of(hint: Any) -> type[msgspec.Struct] | None:
    """The section that a key's type is, or a list of, or that may be absent; None for a scalar key."""
    if get_origin(hint) in {Union, UnionType}:
        return next(filter(None, map(struct_of, get_args(hint))), None)
    if get_origin(hint) is Annotated:
        return struct_of(get_args(hint)[0])
    if get_origin(hint) is tuple:
        return struct_of(get_args(hint)[0])
    return hint if isinstance(hint, type) and issubclass(hint, msgspec.Struct) else None


def _refuse_unknown(data: Any, section: type[msgspec.Struct], prefix: str, source: str) -> None:
    if isinstance(data, list):
        for n, item in enumerate(data):
            _refuse_unknown(item, section, f"{prefix[:-1]}[{n}].", source)
        return
    if not isinstance(data, Mapping):
        return
    hints = get_type_hints(section, include_extras=True)
    for key, value in data.items():
        if key not in hints:
            raise ConfigError(f"{source}: unknown key {prefix}{key!s}{_nearest(str(key), list(hints), prefix)}")
        inner = struct_of(hints[key])
        if inner is not None:
            _refuse_unknown(value, inner, f"{prefix}{key}.", source)


def _nearest(key: str, known: list[str], prefix: str) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    elsewhere = difflib.get_close_matches(key, [k.rsplit(".", 1)[-1] for k in keys()], n=1, cutoff=0.8)
    if elsewhere:
        full = next(k for k in keys() if k.rsplit(".", 1)[-1] == elsewhere[0])
        return f"; did you mean {full}?"
    return f"; known here: {', '.join(sorted(known))}"


def _assign(data: dict[str, Any], key: str, value: Any) -> None:
    at: Any = data
    parts = key.split(".")
    for n, part in enumerate(parts[:-1]):
        at = _element(at, part, key) if isinstance(at, list) else at.setdefault(part, {})
        if not isinstance(at, dict | list):
            raise ConfigError(f"override {key!r}: {'.'.join(parts[: n + 1])} is a value, not a section")
    if isinstance(at, list):
        raise ConfigError(f"override {key!r}: name an element by its number, as in env.0.replicas")
    at[parts[-1]] = value


def _element(items: list[Any], part: str, key: str) -> Any:
    if part not in map(str, range(len(items))):
        raise ConfigError(f"override {key!r}: {part!r} is not an index below {len(items)}")
    return items[int(part)]


def _toml_value(text: str) -> Any:
    """``text`` as one TOML value, else as the string that it is; so are dates and times, which no setting is (``slurm.time`` is text)."""
    try:
        found = tomllib.loads(f"x = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return found["x"] if set(found) == {"x"} and not isinstance(found["x"], dt.date | dt.time) else text
