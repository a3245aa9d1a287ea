"""One small run of the whole pipeline, watched from outside: every shipped object is copied while it is there."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fsref import steps
from fsref.errors import ObjectMissing, StoreError
from fsref.refs import Dense, Payload, Ragged, TokenRange, object_name
from fsref.steps import RankFile, StepInfo
from fsref.store import Store, open_root

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass
class Watched:
    """What a finished run left, and what was copied while it ran."""

    run_dir: Path
    copies: Path
    """A root with the run's step files and every shipped object, under the same run id."""
    inline: Path
    routes_log: Path
    output: str
    returncode: int
    infos: list[StepInfo] = field(default_factory=list)
    ranks: list[RankFile] = field(default_factory=list)


def watch(
    folder: Path, *, config: Path, step_count: int, options: list[str], env: dict[str, str], opened: Callable[[], Store] | None = None
) -> Watched:
    """Runs the pipeline with the inline side files on, copying each step's objects once it is published.

    ``opened`` opens the run's store where ``options`` name a root that is no folder; the run's id is ``proof``, its folder
    ``<folder>/runs/proof``.
    """
    inline, copies, routes_log = folder / "inline", folder / "copies", folder / "routes"
    inline.mkdir()
    run_dir = folder / "runs" / "proof"
    place = ["--run.root", str(folder / "runs")] if opened is None else ["--run.run_dir", str(run_dir)]
    command = [
        sys.executable, "-m", "fsref", "run", str(config), *place, "--run.id", "proof",
        f"--run.steps={step_count}", "--inference.routes_log", str(routes_log), "--trainer.record_routes", "true",
        f"--trainer.checkpoint_every={step_count}", *options,
    ]  # fmt: skip
    done = Watched(run_dir, copies, inline, routes_log, "", -1)
    stop = threading.Event()
    opener = opened if opened is not None else lambda: open_root(str(folder / "runs"), run="proof")
    copier = threading.Thread(target=_copy, args=(done, step_count, opener, stop), daemon=True)
    copier.start()
    whole = {**os.environ, **env, "FSREF_INLINE": str(inline), "PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=540, check=False, env=whole)
    stop.set()
    copier.join(60)
    done.output, done.returncode = process.stdout + process.stderr, process.returncode
    return done


def _copy(run: Watched, step_count: int, opened: Callable[[], Store], stop: threading.Event) -> None:
    """Objects stay until the checkpoint of the last step, so copying after STEP.json is always in time."""
    while not (run.run_dir / "config.json").exists():  # not before the run is there: opening it must not make its folder
        if stop.wait(0.02):
            return
    with opened() as store:
        for step in range(step_count):
            while (info := _published(store, step)) is None:
                if stop.wait(0.02 if store.posix_path else 0.5):
                    return
            try:
                ranks = [steps.read_rank(store, info, r) for r in range(info.data_ranks)]
                for object_id in [i for r in ranks for i in r.owned]:
                    target = run.copies / "proof" / object_name(object_id)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with store.open(object_name(object_id)) as file:
                        data = np.empty(file.byte_count, np.uint8)
                        file.read_into(0, data)
                    target.write_bytes(data)
            except StoreError:
                return
            run.infos.append(info)
            run.ranks += ranks


def _published(store: Store, step: int) -> StepInfo | None:
    try:
        return steps.read_info(store, step)
    except (ObjectMissing, StoreError):
        return None


def inline_payload(path: Path) -> Payload:
    """What the worker wrote down for one branch."""
    with np.load(path) as arrays:
        given: dict[str, Any] = {name: arrays[name] for name in arrays.files}
    fields: dict[str, Dense | Ragged] = {}
    for name in {n.split("/")[0] for n in given if "/" in n}:
        missing = tuple(TokenRange(int(a), int(b)) for a, b in given[f"{name}/missing"])
        if f"{name}/rows" in given:
            fields[name] = Dense(given[f"{name}/rows"], missing)
        else:
            columns = {n.rsplit("/", 1)[1]: v for n, v in given.items() if n.startswith(f"{name}/column/")}
            fields[name] = Ragged(given[f"{name}/counts"], columns, missing)
    return Payload(given["token_ids"], fields)
