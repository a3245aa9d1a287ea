"""Purging a proved run: everything of it and nothing else, from whatever point the last purge was cut off."""

import importlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from fsref.cli.ledger import purge_main
from fsref.config import LedgerSection
from fsref.errors import RunBusy, RunMismatch
from fsref.journal import create_run, read_for_purge, read_run
from fsref.ledger import Verdict
from fsref.reaper import EnvHolder, close_run, purge
from fsref.refs import Schema, object_name, top_logprobs
from fsref.store import Store, open_root
from tests.reaper.stage import RUN, Stage
from tests.support.s3servers import BUCKET, S3Server

SCHEMA = Schema((top_logprobs(),))


@pytest.fixture
def proved(stage: Stage) -> Stage:
    """A run that trained a step and is closed, with everything that a run's folder has, beside a neighbour that must not be touched."""
    env, orc, trn = stage.env(), stage.orc(), stage.trn()
    info = stage.ship(orc, 0, stage.reply(env, orc, 3))
    for name in ("steps/step_000000/data_rank_00000.msgpack", "steps/step_000000/STEP.json"):
        stage.store.put(name, [b"{}"])
    trn.taken(info)
    trn.used(0)
    stage.commit(trn, 0, 0)
    for holder in (env, orc, trn):
        holder.close()
    folder = stage.root / RUN
    for part in ("logs/envs/train", "weights/step_1", "checkpoints/step_1", "envs", "model", "metrics", "wandb/offline-run-1"):
        (folder / part).mkdir(parents=True)
        (folder / part / "file").write_text("x")
    for part in ("config.json", "metrics.jsonl", "launcher.lock"):
        (folder / part).write_text("{}")
    (stage.root / "r2" / "obj").mkdir(parents=True)
    (stage.root / "r2" / "run.json").write_text("neighbour")
    (stage.root / "canary").write_text("canary")
    assert stage.audit().verdict is Verdict.PROVED
    return stage


def tree(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def outside(stage: Stage) -> list[str]:
    return [n for n in tree(stage.root) if n.split("/")[0] != RUN]


def run_purge(stage: Stage) -> Any:
    return purge(stage.store, stage.ledger, run=read_for_purge(stage.store), run_dir=stage.root / RUN)


def test_a_proved_run_goes_with_its_folder_and_nothing_else_does(proved: Stage) -> None:
    before = outside(proved)
    done = run_purge(proved)
    assert (done.refused, done.left, (proved.root / RUN).exists()) == (None, (), False)
    assert outside(proved) == before
    assert (done.removed["steps"], done.removed["ledger"] >= 3, done.removed["checkpoints"]) == (2, True, 1)


def test_a_run_that_is_not_proved_is_refused_and_not_touched(stage: Stage) -> None:
    env, orc = stage.env(), stage.orc()
    stage.reply(env, orc, 2)
    before = tree(stage.root)
    found = run_purge(stage).refused
    assert (found.verdict, tree(stage.root)) == (Verdict.BALANCED, before)
    env.close()
    orc.close()
    close_run(stage.store, stage.ledger, run=stage.run, section=stage.section)
    shutil.copy(stage.ledger / f"{env.inc}.jnl", stage.root / "kept")
    (stage.ledger / f"{env.inc}.jnl").unlink()
    before = tree(stage.root)
    assert (run_purge(stage).refused.verdict, tree(stage.root)) == (Verdict.UNPROVABLE, before)
    shutil.copy(stage.root / "kept", stage.ledger / f"{env.inc}.jnl")
    assert run_purge(stage).refused is None


def test_a_process_that_opens_the_run_after_its_audit_stops_the_purge(proved: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = importlib.import_module("fsref.reaper.purging")

    real, opened = module.audit, []

    def audit_then_open(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        opened.append(proved.env())
        return found

    monkeypatch.setattr(module, "audit", audit_then_open)
    with pytest.raises(RunBusy, match=r"opened the run after its audit"):
        run_purge(proved)
    assert read_run(proved.store).run == RUN
    opened[0].close()
    monkeypatch.undo()
    close_run(proved.store, proved.ledger, run=proved.run)
    assert run_purge(proved).refused is None


class Cut(BaseException):
    """The purge dies here."""


def cut_at(patch: pytest.MonkeyPatch, count: int) -> list[int]:
    """Every removal of a purge counts; number ``count`` does not happen."""
    module: Any = importlib.import_module("fsref.reaper.purging")

    seen = [0]

    def counted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[0] += 1
            if seen[0] == count:
                raise Cut
            return real(*args, **kwargs)

        return call

    patch.setattr(os, "unlink", counted(os.unlink))
    patch.setattr(os, "rmdir", counted(os.rmdir))
    patch.setattr(Path, "rmdir", counted(Path.rmdir))
    patch.setattr(module, "mark_purge", counted(module.mark_purge))
    return seen


@pytest.mark.parametrize("count", [*range(1, 50, 3), 2, 5, 9, 200])
def test_a_purge_that_is_cut_off_is_finished_by_the_next_and_nobody_opens_the_run_meanwhile(
    proved: Stage, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    before = outside(proved)
    with monkeypatch.context() as patch:
        seen = cut_at(patch, count)
        try:
            run_purge(proved)
        except Cut:
            pass
        else:
            assert seen[0] < count
    if (proved.root / RUN / "run.json").exists():
        if read_for_purge(proved.store).purge:
            with pytest.raises(RunMismatch, match="is being purged"):
                read_run(proved.store)
            with pytest.raises(RunMismatch, match="is being purged"):
                create_run(proved.store, RUN, SCHEMA)
        else:
            close_run(proved.store, proved.ledger, run=proved.run)  # it died before it began
        assert run_purge(proved).refused is None
    else:
        assert tree(proved.root / RUN) == []
        shutil.rmtree(proved.root / RUN, ignore_errors=True)
    assert (outside(proved), (proved.root / RUN).exists()) == (before, False)


def test_what_is_not_of_the_run_stays_and_is_named(proved: Stage) -> None:
    notes = proved.root / RUN / "my notes.txt"
    notes.write_text("mine")
    done = run_purge(proved)
    assert (done.left, tree(proved.root / RUN)) == (("my notes.txt",), ["my notes.txt"])


def test_links_are_removed_and_never_followed(proved: Stage, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "precious").write_text("x")
    folder = proved.root / RUN
    shutil.rmtree(folder / "logs")
    (folder / "logs").symlink_to(elsewhere)
    (folder / "weights/link").symlink_to(elsewhere)
    (folder / "steps/link").symlink_to(elsewhere)
    assert run_purge(proved).left == ()
    assert (folder.exists(), tree(elsewhere)) == (False, ["precious"])


def test_a_part_that_is_a_link_in_the_store_is_refused(proved: Stage, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "precious").write_text("x")
    shutil.rmtree(proved.root / RUN / "steps")
    (proved.root / RUN / "steps").symlink_to(elsewhere)
    with pytest.raises(OSError, match="steps"):
        run_purge(proved)
    assert tree(elsewhere) == ["precious"]
    (proved.root / RUN / "steps").unlink()
    assert run_purge(proved).refused is None


def test_the_command_says_what_went_or_why_nothing_did(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stage.root)
    env = stage.env()
    assert purge_main(str(stage.root / RUN), run_dir=False, json=False) == 10
    said = capsys.readouterr().out
    assert "not purged, nothing was touched: stop the run and end it with `fsref close r1`" in said
    env.close()
    close_run(stage.store, stage.ledger, run=stage.run)
    assert purge_main(str(stage.root / RUN), run_dir=False, json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["purged"], answer["audit"], answer["left"], (stage.root / RUN).exists()) == (True, None, [], False)
    assert purge_main(str(stage.root / RUN), run_dir=False, json=False) == 2
    assert "no run" in capsys.readouterr().err


def objects_gone(store: Store, ledger: Path) -> None:
    """A small run on any store, to its proved end."""
    run = create_run(store, RUN, SCHEMA)
    with EnvHolder(store, ledger, run=run, section=LedgerSection(batch_wait_s=0.01)) as env:
        seq = env.next_seq()
        store.put(object_name(f"{env.inc}/{seq}"), [b"x" * 100])
        env.keep(seq, byte_count=100, checksum=7, token_count=10, fields=1)
        env.discard([f"{env.inc}/{seq}"])
    store.put("steps/step_000000/STEP.json", [b"{}"])
    assert close_run(store, ledger, run=run).verdict is Verdict.PROVED


@pytest.mark.usefixtures("s3_credentials")
def test_a_run_in_a_bucket_goes_and_its_neighbours_stay(moto: S3Server, tmp_path: Path) -> None:
    root = f"s3://{BUCKET}/{tmp_path.name}"
    with open_root(root, run=RUN, settings=moto.settings()) as store, open_root(root, run="r10", settings=moto.settings()) as other:
        other.put("run.json", [b"neighbour"])
        ledger = tmp_path / "local" / "ledger"
        objects_gone(store, ledger)
        (tmp_path / "local" / "config.json").write_text("{}")
        done = purge(store, ledger, run=read_for_purge(store))
        assert (done.refused, done.removed["steps"]) == (None, 1)
        assert moto.keys(f"{tmp_path.name}/") == [f"{tmp_path.name}/r10/run.json"]
        assert tree(tmp_path / "local") == ["config.json"]
