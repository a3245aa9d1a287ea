"""``--section.key value``: any setting of the config as an option.

Owns the split of such options from a command's own ones. Refuses to judge keys and values: ``fsref.config`` does.
"""

from typing import Any, Final

import typer
from typer.core import TyperCommand

from fsref.errors import ConfigError

META: Final = "fsref.overrides"


def split(args: list[str], *, lenient: bool = False) -> tuple[list[str], list[str]]:
    """Parts ``args`` into the ones that are the command's and ``key=value`` overrides, both in order.

    An override is an option with a dot in its name: ``--a.b value`` or ``--a.b=value``. ``--`` ends options, as usual.
    Raises ``ConfigError`` for one without a value, unless ``lenient`` (completion of a half-typed line).
    """
    rest: list[str] = []
    found: list[str] = []
    at = 0
    while at < len(args):
        arg = args[at]
        at += 1
        name, sep, value = arg.removeprefix("--").partition("=")
        if arg == "--":
            rest += args[at - 1 :]
            break
        if not arg.startswith("--") or "." not in name:
            rest.append(arg)
        elif sep:
            found.append(f"{name}={value}")
        elif at < len(args) and not args[at].startswith("--"):
            found.append(f"{name}={args[at]}")
            at += 1
        elif not lenient:
            raise ConfigError(f"the setting --{name} needs a value, as in --{name} VALUE or --{name}=VALUE")
    return rest, found


class ConfigCommand(TyperCommand):
    """A command that takes any config key as an option; ``overrides_of(ctx)`` has them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Typed loosely because typer's releases differ in whose Context class they hand over; what is used here is in all of them.
        rest, ctx.meta[META] = split(args, lenient=ctx.resilient_parsing)
        return super().parse_args(ctx, rest)


def overrides_of(ctx: typer.Context) -> list[str]:
    """The ``key=value`` overrides that a ``ConfigCommand`` found on its command line."""
    found = ctx.meta.get(META, [])
    assert isinstance(found, list)
    return found
