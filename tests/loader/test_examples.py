"""The examples under docs/ run as they stand."""

import os
import runpy
from pathlib import Path
from typing import Any

from fsref.config import dump
from tests.support.forks import fork_context
from tests.support.ports import free_port
from tests.trainer.runs import DEADLINE_S, SmallRun

FSDP2 = Path(__file__).resolve().parents[2] / "docs" / "examples" / "fsdp2.py"
WORLD = 2


def run_example(path: Path, argument: str, rank: int, port: int, outcome: Any) -> None:
    """One rank of it, as torchrun starts it."""
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo")
    outcome.send(runpy.run_path(str(path))["main"](argument))
    dist.destroy_process_group()


def losses(config: Path) -> list[list[float]]:
    context, port = fork_context(), free_port()
    started = []
    for rank in range(WORLD):
        parent, child = context.Pipe(duplex=False)
        process = context.Process(target=run_example, args=(FSDP2, str(config), rank, port, child), daemon=True)
        process.start()
        child.close()
        started.append((process, parent))
    out = []
    for process, parent in started:
        assert parent.poll(DEADLINE_S), "the example neither ended nor failed"
        out.append(parent.recv())
        process.join(DEADLINE_S)
        assert process.exitcode == 0
    return out


def test_the_fsdp2_example_trains_goes_on_from_its_checkpoint_and_leaves_nothing_behind(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, data_ranks=WORLD)
    for step in range(3):
        run.publish_step(step)
    config = tmp_path / "config.json"
    config.write_bytes(dump(run.config(steps=2, commit="keep_last", keep_last=3)))
    first = losses(config)
    assert [len(part) for part in first] == [2] * WORLD
    config.write_bytes(dump(run.config(steps=3)))
    assert [len(part) for part in losses(config)] == [1] * WORLD
    assert run.present() == []
    assert run.verdict() == "PROVED"


def test_the_example_is_short() -> None:
    assert len(FSDP2.read_text(encoding="utf-8").splitlines()) < 100
