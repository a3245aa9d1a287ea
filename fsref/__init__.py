"""fsref: per-token arrays of RL post-training by reference.

Start with ``fsref.refs`` (the nouns), ``fsref.writer`` and ``fsref.reader``; docs/architecture.md maps the rest.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("fsref")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
