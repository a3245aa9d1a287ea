"""Where a run's journals and markers are: a folder, and for a root that is no folder the root too.

Owns that distinction, so that nobody else asks which kind of root there is. Refuses nothing.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fsref.store.base import Store


@dataclass(frozen=True)
class Ledger:
    """The ledger of one run."""

    folder: Path
    """Live journals of this node (of every node, where the folder is shared)."""
    store: Store | None = None
    """The root where that is no folder: sealed segments and markers are objects there. None: the folder has everything."""

    @classmethod
    def of(cls, store: Store, folder: Path) -> Self:
        """The ledger of the run that ``store`` is the root of."""
        return cls(folder, None if store.posix_path is not None else store)
