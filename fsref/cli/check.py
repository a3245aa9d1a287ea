"""The body of ``fsref doctor``: prints the report."""

import sys

import msgspec
from rich.console import Console
from rich.text import Text

from fsref.config import Config, load
from fsref.doctor import Check, examine, failed

STYLES = {"ok": "green", "absent": "yellow", "failed": "bold red"}


def main(root: str, *, json: bool, config: str = "") -> int:
    """Tries ``root``, else the root of the config file, else ``runs``, with the config's ``[store]``. Returns 1 if a check failed."""
    loaded = load(config) if config else Config()
    checks = examine(root or loaded.run.root, settings=loaded.store)
    if json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode({"ok": not failed(checks), "checks": checks}), indent=1).decode() + "\n")
    else:
        console = Console(soft_wrap=True)
        for check in checks:
            console.print(line(check))
    return int(failed(checks))


def line(check: Check) -> Text:
    """``ok      publish     1 MiB written and published, durably  1.2 ms``."""
    took = "" if check.seconds is None else f"  {check.seconds * 1000:.2f} ms"
    return Text.assemble((f"{check.status:<8}", STYLES[check.status]), f"{check.name:<17}", check.detail, (took, "dim"))
