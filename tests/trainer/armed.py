"""Loaded first in the process that ranks are forked from: the product's failpoints are live there, and each rank arms its own.

Never import it into the process of the tests: failpoints are made live or not once, when they are first imported.
"""

import os

os.environ["FSREF_FAILPOINTS"] = "close.after_sync=sleep(0)"

from fsref import failpoints

del os.environ["FSREF_FAILPOINTS"]


def arm(rules: str) -> None:
    """Replaces the rules of this process."""
    failpoints._armed.clear()
    failpoints._armed.update(failpoints.parse(rules))


arm("")
