"""The standalone evaluation: runs episodes on the eval sources, reports rewards, removes every array, audits.

Owns the command's wiring and its exit code. It needs running env servers and inference, as a run has them.
"""

import sys

from fsref.config import Config
from fsref.errors import RoleFailed
from fsref.orchestrator.evaluation import Tally, evaluate, report
from fsref.orchestrator.session import open_session, run_role
from fsref.orchestrator.tasks import stream

STOPPED_CODE = 130


def main(config: Config) -> int:
    """Evaluates ``orchestrator.eval_episodes`` episodes, prints one line per source and the audit.

    Returns 0 if the ledger balances (env servers that still run leave the run open), the audit's code for a violation or missing
    proof, 130 if it was stopped. Raises ``RoleFailed`` if no episode ended well.
    """
    code = run_role(lambda: _run(config))
    return STOPPED_CODE if code is None else code


async def _run(config: Config) -> int:
    async with open_session(config, role="evl", splits=("eval",)) as session:
        tasks = stream(session.sources["eval"], seed=config.run.seed, shuffle=False)
        tallies = await evaluate(tasks, session.custody, session.attempts, episodes=config.orchestrator.eval_episodes, key="eval")
        store, ledger_dir, run = session.store, session.ledger_dir, session.info.run
    del store
    sys.stdout.write("\n".join(report(tallies)) + "\n")
    _check(tallies)
    del ledger_dir, run
    return 0


def _check(tallies: dict[str, Tally]) -> None:
    for name, tally in tallies.items():
        if not tally.rewards:
            raise RoleFailed(f"source {name!r}: none of {tally.episodes} episodes ended well; the last error: {tally.last_error or 'none'}")
