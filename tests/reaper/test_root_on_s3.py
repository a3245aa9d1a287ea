"""The ledger on a real S3 server: what it costs in requests, how it rides out the server's faults, and the commands from elsewhere."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fsref import config as settings
from fsref.cli.ledger import audit_main, close_main, purge_main
from fsref.config import Config, RunSection
from fsref.errors import StoreError
from fsref.inspection.find import find_run
from fsref.inspection.run import run_report
from fsref.inspection.status import statuses
from fsref.reaper import Verdict, close_run
from fsref.store import open_root
from tests.reaper.rootstage import RootStage
from tests.reaper.stage import RUN
from tests.support.faultproxy import FaultProxy
from tests.support.s3servers import BUCKET, S3Server

STEPS = 5


def s3_stage(node: Path, server: S3Server, *, endpoint: str = "", **section: float) -> RootStage:
    options = {"endpoint": endpoint} if endpoint else {}
    store = open_root(f"s3://{BUCKET}/ledger-{os.urandom(4).hex()}", run=RUN, settings=server.settings(**options))
    return RootStage(node, store=store, **section)


@pytest.mark.usefixtures("s3_credentials")
def test_requests_per_object_and_per_step_are_what_the_specification_allows(
    tmp_path: Path, moto: S3Server, fault_proxy: Callable[[S3Server], FaultProxy]
) -> None:
    proxy = fault_proxy(moto)
    stage = s3_stage(tmp_path, moto, endpoint=proxy.endpoint, batch_wait_s=0.2)
    env, orc, trn = stage.env(), stage.orc(), stage.trn()
    proxy.clear()
    for step in range(STEPS):
        stale = stage.reply(env, orc, 3)
        orc.drop(stale[:2], "stale")
        orc.drop(stale[2:], "filtered")
        trn.taken(stage.ship(orc, step, stage.reply(env, orc, 5)))
        trn.used(step)
        assert orc.flush() == 0
        stage.commit(trn, step, step)
    total = proxy.counts()
    ledger = proxy.counts("/ledger/")
    assert ledger == {
        "PUT": 2 * STEPS,
        "HEAD": 2 * STEPS,
    }  # ship and commit; the fence before each batch: the orchestrator's, the trainer's
    assert proxy.counts("/obj/")["PUT"] == 8 * STEPS
    removals = total["DELETE"] + total["DELETE_MANY"]
    assert removals <= 8 * STEPS
    assert total == {"PUT": 8 * STEPS + 2 * STEPS, "HEAD": 2 * STEPS} | {k: total[k] for k in ("DELETE", "DELETE_MANY") if k in total}
    proxy.clear()
    for holder in (trn, orc, env):
        assert holder.close() == 0
    assert proxy.counts()["PUT"] == 3  # one for each that closes
    assert proxy.counts()["HEAD"] <= 2 * 3  # its fence, before the last drops and before close
    found = stage.audit()
    assert found.verdict is Verdict.PROVED, found.render()
    assert stage.audit_elsewhere().totals == found.totals
    stage.faulty.close()


@pytest.mark.usefixtures("s3_credentials")
def test_many_drops_cost_one_more_put_per_thousand(tmp_path: Path, moto: S3Server, fault_proxy: Callable[[S3Server], FaultProxy]) -> None:
    proxy = fault_proxy(moto)
    stage = s3_stage(tmp_path, moto, endpoint=proxy.endpoint, batch_wait_s=0.2, batch_ids_max=10)
    env, orc = stage.env(), stage.orc()
    replies = [stage.reply(env, orc, 5) for _ in range(7)]
    shipped = stage.reply(env, orc, 1)
    proxy.clear()
    for reply in replies:
        orc.drop(reply, "stale")
    stage.ship(orc, 0, shipped)
    assert orc.flush() == 0
    counts = proxy.counts("/ledger/")
    assert counts["PUT"] <= 1 + 4  # ceil(35 / 10)
    assert counts["HEAD"] <= 7
    assert set(counts) <= {"PUT", "HEAD"}
    for holder in (orc, env):
        holder.close()
    stage.faulty.close()


FAULTS = {
    46: ("status", "PUT", {"times": 3}),
    47: ("lost_reply", "PUT", {"times": 1}),
    48: ("lost_reply", "DELETE_MANY", {"times": 1}),
    49: ("key_errors", "DELETE_MANY", {"times": 1, "failing": "0000000001"}),
}


@pytest.mark.fault(46, 47, 48, 49)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("s3_credentials")
def test_a_fault_of_the_server_costs_retries_and_nothing_else(
    tmp_path: Path, moto: S3Server, fault_proxy: Callable[[S3Server], FaultProxy], fault: int
) -> None:
    proxy = fault_proxy(moto)
    stage = s3_stage(tmp_path, moto, endpoint=proxy.endpoint, seal_retry_s=60.0)
    env, orc, trn = stage.env(), stage.orc(), stage.trn()
    stale, kept = stage.reply(env, orc, 4), stage.reply(env, orc, 4)
    action, kind, options = FAULTS[fault]
    rule = proxy.add(action, kind, key="ledger/orc" if kind == "PUT" else "", **options)  # type: ignore[arg-type]
    orc.drop(stale, "stale")
    trn.taken(stage.ship(orc, 0, kept))
    assert orc.flush(deadline_s=120) == 0
    assert rule.used >= 1
    stage.commit(trn, 0, 0)
    for holder in (trn, orc, env):
        holder.close()
    found = stage.audit()
    assert found.verdict is Verdict.PROVED, found.render()
    assert found.totals.dropped_by == {"stale": 4, "trained": 4}
    assert (found.totals.suppressed, stage.objects()) == (0, [])
    stage.faulty.close()


def run_folder(folder: Path, stage: RootStage, server: S3Server) -> Path:
    """What another machine has of a run: its config, and nothing of its ledger."""
    (folder / "logs").mkdir(parents=True)
    root = stage.faulty.inner.url.removesuffix(f"/{RUN}")
    section = RunSection(id=RUN, root=root, run_dir=str(folder))
    (folder / "config.json").write_bytes(settings.dump(Config(run=section, store=server.settings())))
    return folder


@pytest.mark.usefixtures("s3_credentials")
def test_the_commands_work_on_a_machine_that_has_no_journal(tmp_path: Path, moto: S3Server, capsys: pytest.CaptureFixture[str]) -> None:
    stage = s3_stage(tmp_path / "node", moto)
    env, orc, trn = stage.env(), stage.orc(), stage.trn()
    trn.taken(stage.ship(orc, 0, stage.reply(env, orc, 2)))
    stage.commit(trn, 0, 0)
    left = stage.reply(env, orc, 1)
    folder = run_folder(tmp_path / "elsewhere", stage, moto)
    assert audit_main(str(folder), json=False) == 10
    assert "BALANCED" in capsys.readouterr().out
    place = find_run(str(folder), here=tmp_path)
    assert run_report(place).incarnations == {"env": 1, "orc": 1, "trn": 1}
    with place.open() as store:
        found = statuses(place, store, [stage.batches[0][0], left[0]])
    assert found[stage.batches[0][0]].state == "removed"
    assert found[left[0]].state == "present"
    for holder in (env, orc, trn):
        stage.kill(holder)
    assert close_main(str(folder), force_dead=(), json=False) == 0
    assert "PROVED" in capsys.readouterr().out
    assert stage.objects() == []
    assert audit_main(str(folder), json=True) == 0
    assert purge_main(str(folder), run_dir=False, json=False) == 0
    assert list(stage.faulty.inner.list("ledger")) == []
    stage.faulty.close()


@pytest.mark.slow
@pytest.mark.fault(13)
@pytest.mark.usefixtures("s3_credentials")
def test_a_run_on_another_s3_server_ends_proved_after_the_loss_of_its_node(tmp_path: Path, weed: S3Server) -> None:
    stage = s3_stage(tmp_path, weed)
    env, orc, trn = stage.env(), stage.orc(), stage.trn()
    trn.taken(stage.ship(orc, 0, stage.reply(env, orc, 3)))
    stage.commit(trn, 0, 0)
    orc.drop(stage.reply(env, orc, 2), "stale")
    stage.ship(orc, 1, stage.reply(env, orc, 2))
    orc.flush()
    stage.put(env, 2)
    for holder in (env, orc, trn):
        stage.kill(holder)
    stage.lose_node()
    found = close_run(stage.store, stage.ledger, run=stage.run)
    assert (found.verdict, stage.objects()) == (Verdict.PROVED, []), found.render()
    assert found.totals.dropped_by == {"unjournaled": 4, "trained": 3, "stale": 2}
    stage.faulty.close()


@pytest.mark.fault(53)
@pytest.mark.usefixtures("s3_credentials")
def test_a_ledger_that_may_not_write_says_so_when_it_opens(
    tmp_path: Path, moto: S3Server, fault_proxy: Callable[[S3Server], FaultProxy]
) -> None:
    proxy = fault_proxy(moto)
    stage = s3_stage(tmp_path, moto, endpoint=proxy.endpoint, seal_retry_s=0.1)
    proxy.add("status", "PUT", key="ledger/", times=10**6, status=403, code="AccessDenied")
    with pytest.raises(StoreError, match="credentials"):
        stage.orc()
    stage.faulty.close()
