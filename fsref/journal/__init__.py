"""Journal files of a run: one append-only file per incarnation, its markers, the proof that a writer is dead, and ``run.json``."""

from fsref.journal.file import Journal
from fsref.journal.markers import write_dead
from fsref.journal.place import Ledger
from fsref.journal.run import RunInfo, create_run, read_for_purge, read_run

__all__ = ["Journal", "Ledger", "RunInfo", "create_run", "read_for_purge", "read_run", "write_dead"]
