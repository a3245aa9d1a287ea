"""The body of ``fsref doctor``: prints the report."""

import os
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from fsref.config import Config, load
from fsref.doctor import Check, examine, failed
from fsref.errors import ConfigError
from fsref.pipeline.slurm.commands import Slurm
from fsref.pipeline.slurm.views import VIEW_S, View, exchange, look
from fsref.store.open import posix_root

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


def nodes_main(root: str, *, nodes: str, json: bool, config: str = "") -> int:
    """Has the nodes look at the folder that they share, each from its own side; prints one line for each. Returns 1 if one cannot be used.

    ``nodes``: a node list as Slurm writes it, or ``all`` for those of the job around. Raises ``ConfigError`` for a root without a shared
    folder, ``RoleFailed`` for what Slurm says.
    """
    loaded = load(config) if config else Config()
    folder = shared_folder(root or loaded.run.root, loaded.run.run_dir)
    views, missing = look(folder, nodes, Slurm(), os.environ)
    bad = bool(missing) or any(v.failure for v in views)
    if json:
        answer = {"ok": not bad, "folder": str(folder), "nodes": views, "missing": missing}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(answer), indent=1).decode() + "\n")
        return int(bad)
    console = Console(soft_wrap=True)
    for view in views:
        console.print(line(Check(view.node, "failed" if view.failure else "ok", view.failure or seen(view))))
    if missing:
        console.print(line(Check("nodes", "failed", f"{missing} nodes did not take part: they do not see {folder}, or their task failed")))
    return int(bad)


def shared_folder(root: str, run_dir: str) -> Path:
    """The folder that all nodes must see: a root that is one, else where the runs' folders are. Raises ``ConfigError``."""
    folder = posix_root(root)
    if folder is not None:
        return folder.absolute()
    if not run_dir:
        raise ConfigError(
            f"the root {root} is no folder: name the one for addresses, logs and weights in run.run_dir, which all nodes share"
        )
    return Path(run_dir).absolute().parent


def view_main(folder: Path, *, token: str) -> int:
    """One node's part, started by srun; the first prints what all of them saw."""
    number, count = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    name = os.environ.get("SLURMD_NODENAME", "")
    found = exchange(folder, token=token, node=name, number=number, count=count, deadline_s=VIEW_S)
    if not number:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    return 0


def seen(view: View) -> str:
    """``wrote in 1.20 ms, sees the others within 3.1 ms, clock +0.0002 s (at most 0.0031 s off)``."""
    wrote = f"wrote in {view.write_s * 1000:.2f} ms, sees the others"
    if view.lag_s is None or view.clock_s is None:
        return wrote
    return f"{wrote} within {view.lag_s * 1000:.1f} ms, clock {view.clock_s:+.4f} s (at most {view.clock_error_s:.4f} s off)"


def line(check: Check) -> Text:
    """``ok      publish     1 MiB written and published, durably  1.2 ms``."""
    took = "" if check.seconds is None else f"  {check.seconds * 1000:.2f} ms"
    return Text.assemble((f"{check.status:<8}", STYLES[check.status]), f"{check.name:<17}", check.detail, (took, "dim"))
