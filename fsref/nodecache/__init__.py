"""One fetch per node: chunks that a rank fetched, in memory that all ranks of the node share, with single flight.

``NodeCache`` is what readers use; ``table`` is what lies in the shared memory, ``shared`` how ranks find, lock and leave it.
"""

from fsref.nodecache.cache import NodeCache, NodeCacheCounters
from fsref.nodecache.spans import Span

__all__ = ["NodeCache", "NodeCacheCounters", "Span"]
