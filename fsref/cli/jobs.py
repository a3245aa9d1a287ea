"""The bodies of the commands that a job runs on its nodes: its own launcher, a node's launcher, a trainer rank.

Apart from ``fsref.cli.roles`` because these start roles and are none themselves.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from fsref.cli.failures import set_up_logging
from fsref.cli.roles import read_config
from fsref.pipeline.slurm import job, node, rank


def job_main(config: Path, *, overrides: Sequence[str], verbose: bool) -> int:
    """The launcher of the whole job, in its batch script."""
    set_up_logging(verbose=verbose, level=logging.WARNING)
    return job.main(read_config(config, list(overrides)), verbose=verbose)


def node_main(config: Path, *, overrides: Sequence[str], verbose: bool) -> int:
    """The launcher of one inference node."""
    set_up_logging(verbose=verbose, level=logging.WARNING)
    return node.main(read_config(config, list(overrides)), verbose=verbose)


def rank_main(config: Path, *, overrides: Sequence[str], verbose: bool) -> int:
    """What becomes a trainer rank."""
    set_up_logging(verbose=verbose)
    return rank.main(read_config(config, list(overrides)), config_path=config, verbose=verbose)
