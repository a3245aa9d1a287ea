"""Where a run's journals and markers are: a folder, and for a root that is no folder the root too.

Owns that distinction, so that nobody else asks which kind of root there is. Refuses nothing.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fsref.errors import ConfigError
from fsref.store.base import Store


@dataclass(frozen=True)
class Ledger:
    """The ledger of one run."""

    folder: Path | None
    """Live journals of this node (of every node, where the folder is shared). None: this machine has none of them."""
    store: Store | None = None
    """The root where that is no folder: sealed segments and markers are objects there. None: the folder has everything."""

    @classmethod
    def of(cls, store: Store, folder: Path | None) -> Self:
        """The ledger of the run that ``store`` is the root of."""
        return cls(folder, None if store.posix_path is not None else store)

    @property
    def here(self) -> Path:
        """The folder, for whoever cannot do without one. Raises ``ConfigError``."""
        if self.folder is None:
            raise ConfigError("the run's folder is not known here: name the folder that holds its config.json and its ledger")
        return self.folder

    @property
    def text(self) -> str:
        """Where it is, for messages."""
        return f"{self.store.url}/ledger" if self.store is not None else str(self.folder)
