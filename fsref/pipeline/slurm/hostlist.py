"""Slurm's way to write lists of nodes and of array tasks, expanded. Pure.

Inside a job ``scontrol show hostnames`` expands (``commands``); this is for checks before there is a job, and for machines without Slurm.
"""

import re
from collections.abc import Iterator
from typing import Final

from fsref.errors import ConfigError

NAMES_MAX: Final = 65_536
_RANGE: Final = re.compile(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?", re.ASCII)


def expand(text: str) -> list[str]:
    """``gpu[01-03,7],login`` is gpu01, gpu02, gpu03, gpu7, login; in order, without repetition. Several brackets multiply.

    Raises ``ConfigError`` for what Slurm would not take, and for more than ``NAMES_MAX`` names.
    """
    found: dict[str, None] = {}
    for item in _items(text):
        for name in _names(item, text):
            found[name] = None
            if len(found) > NAMES_MAX:
                raise ConfigError(f"the node list {text!r} has more than {NAMES_MAX} nodes")
    return list(found)


def tasks(text: str) -> list[int]:
    """The task numbers of ``sbatch --array``: ``0-3``, ``1,4-10:2``, ``0-99%4`` (the limit says how many run at once)."""
    numbers, _, limit = text.partition("%")
    found = dict.fromkeys(int(n) for part in numbers.split(",") for n in _range(part.strip(), text, what="array"))
    if limit and not limit.isdigit():
        raise ConfigError(f"slurm.array {text!r}: {limit!r} is no number of tasks")
    return list(found)


def _items(text: str) -> Iterator[str]:
    """Splits at commas outside of brackets."""
    depth, start = 0, 0
    for at, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in {0, 1}:
            raise ConfigError(f"the node list {text!r}: brackets do not match")
        if char == "," and not depth:
            yield text[start:at].strip()
            start = at + 1
    if depth:
        raise ConfigError(f"the node list {text!r}: brackets do not match")
    if text.strip():
        yield text[start:].strip()


def _names(item: str, text: str) -> Iterator[str]:
    head, bracket, rest = item.partition("[")
    if not item or any(c.isspace() for c in item):
        raise ConfigError(f"the node list {text!r} names an empty node, or one with a space")
    if not bracket:
        yield item
        return
    inner, _, tail = rest.partition("]")
    for part in inner.split(","):
        for number in _range(part.strip(), text, what="node list"):
            for end in _names(tail, text) if tail else ("",):
                yield f"{head}{number}{end}"


def _range(part: str, text: str, *, what: str) -> Iterator[str]:
    """Leading zeros stay, as Slurm keeps them."""
    match = _RANGE.fullmatch(part)
    if match is None:
        raise ConfigError(f"the {what} {text!r}: {part!r} is not a number or a range such as 01-04")
    first, last = match[1], match[2] or match[1]
    if int(last) < int(first) or int(last) - int(first) >= NAMES_MAX:
        raise ConfigError(f"the {what} {text!r}: the range {part!r} ends before it begins, or is too long")
    for number in range(int(first), int(last) + 1, int(match[3] or 1)):
        yield f"{number:0{len(first)}d}"
