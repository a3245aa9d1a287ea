"""The launcher's side of the ledger where the root is no folder."""

import os
from pathlib import Path

from fsref.config import Config, RunSection
from fsref.journal import create_run
from fsref.journal.catalogue import MARKS, read_catalogue
from fsref.pipeline import settle
from fsref.pipeline.layout import Part, RoleCommand
from fsref.pipeline.processes import Command
from fsref.reaper import EnvHolder, Verdict
from fsref.refs import Schema, top_logprobs
from fsref.store import open_root


def test_a_reaped_replica_is_declared_dead_in_both_places_and_the_run_is_settled(tmp_path: Path) -> None:
    replica = RoleCommand(Part.ENV, Command("env/math_0", (), tmp_path / "log"), env="math", replica=0)
    config = Config(run=RunSection(id="r1", root=f"memory://{tmp_path.name}", run_dir=str(tmp_path)))
    with open_root(config.run.root, run="r1", settings=config.store) as store:
        run = create_run(store, "r1", Schema((top_logprobs(),)))
        env = EnvHolder(store, settle.ledger_dir(config), run=run, label="math-0-0")
        store.put(f"obj/{env.inc}/{env.next_seq():010d}.zip", [b"x"])
        env._deleter.close(deadline_s=0.0)
        env._journal.close()
        assert settle.declare_dead(config, replica, [os.getpid()]) == [env.inc]
        assert (settle.ledger_dir(config) / f"{env.inc}.dead").exists()
        assert read_catalogue(store, MARKS).dead == {env.inc}
        said: list[str] = []
        found = settle.settle(config, said.append, ended=True)
        assert found is not None
        assert found.verdict is Verdict.PROVED, said
        assert list(store.list("obj")) == []
