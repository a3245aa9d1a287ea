"""The roles of a run as real processes, without torch and verifiers: what the product's holders, writer, reader and recovery do.

A *zygote* imports everything once and forks a process per role in milliseconds; each carries out the commands of the test, which is the
scheduler and the network between them: it decides which message arrives, arrives twice, late or never, and who dies where.
"""

from tests.support.roles.play import Child, Died, Play, Refused
from tests.support.roles.zygote_client import Zygote

__all__ = ["Child", "Died", "Play", "Refused", "Zygote"]
