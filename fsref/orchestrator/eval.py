"""The standalone evaluation: runs episodes on the eval sources, reports rewards, removes every array, audits.

Owns the command's wiring and its exit code. It needs running env servers and inference, as a run has them.
"""

import sys
from pathlib import Path
from typing import Final

from fsref.config import Config
from fsref.errors import RoleFailed
from fsref.orchestrator.evaluation import Tally, evaluate, report
from fsref.orchestrator.session import open_session, run_role
from fsref.orchestrator.tasks import stream
from fsref.reaper import Verdict, audit
from fsref.store import open_root

STOPPED_CODE: Final = 130


def main(config: Config) -> int:
    """Evaluates ``orchestrator.eval_episodes`` episodes, prints one line per source and the audit.

    Returns 0 if the ledger proves or balances (env servers that still run keep the run open), else the audit's code; 130 if it was
    stopped by a signal. Raises ``RoleFailed`` if no episode of a source ended well, and what ``open_session`` raises.
    """
    tallies = run_role(lambda: _run(config))
    if tallies is not None:
        _say(report(tallies))
    code = _audited(config)
    if tallies is None:
        return STOPPED_CODE
    for name, tally in tallies.items():
        if not tally.rewards:
            raise RoleFailed(f"source {name!r}: none of {tally.episodes} episodes ended well; the last error: {tally.last_error or 'none'}")
    return code


async def _run(config: Config) -> dict[str, Tally]:
    async with open_session(config, role="evl", splits=("eval",)) as session:
        tasks = stream(session.sources["eval"], seed=config.run.seed, shuffle=False)
        return await evaluate(tasks, session.custody, session.attempts, episodes=config.orchestrator.eval_episodes, key="eval")


def _audited(config: Config) -> int:
    with open_root(config.run.root, run=config.run.id, settings=config.store) as store:
        found = audit(store, Path(config.run.run_dir) / "ledger", run=config.run.id)
    _say(found.render())
    return 0 if found.verdict in {Verdict.PROVED, Verdict.BALANCED} else found.exit_code


def _say(lines: list[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
