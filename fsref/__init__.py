"""fsref: per-token arrays of RL post-training by reference.

Start with ``fsref.refs`` (the nouns), ``fsref.writer`` and ``fsref.reader``; docs/architecture.md maps the rest.
"""

from importlib.metadata import PackageNotFoundError, version

from fsref.failpoints import failpoint

try:
    __version__ = version("fsref")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

_fp = failpoint
"""The name under which the list of faults knows it."""

__all__ = ["__version__"]
