"""Every error that fsref raises, one tree. A new class exists only where a caller would act differently.

::

    FsrefError
    |-- ConfigError (ValueError)             the user changes the config or the command line
    |-- MissingExtra (ImportError)           the user installs an extra
    |-- BadRef (ValueError)                  a reference is refused before any I/O
    |-- PayloadError (ValueError)            arrays offered to fsref are wrong: names the branch and the field
    |   `-- WireError                        an engine's reply is not of a known form
    |-- MissingArrays (LookupError)          a sample lacks a field that the run needs
    |-- StoreError (OSError)                 bytes could not be moved
    |   |-- ObjectMissing (FileNotFoundError)    not there, after bounded retries
    |   |-- ObjectExists (FileExistsError)       an insert-only name is taken
    |   |-- ObjectCorrupt                        there, but not what was written: short, torn, flipped, forged
    |   |-- StoreUnavailable (TimeoutError)      may work later: retry
    |   |-- StoreDenied (PermissionError)        credentials, ownership, read-only
    |   `-- StoreFull                            no space, no inodes, quota
    |-- LedgerError
    |   |-- NotHolder (PermissionError)      the caller does not hold the right to remove this object
    |   |-- DoubleDrop                       strict mode: the same holder dropped the same object twice
    |   |-- JournalCorrupt                   a journal's middle cannot be read
    |   |-- JournalPoisoned                  an append failed: this process must stop keeping and removing
    |   |-- RunBusy                          another live process owns the run
    |   |-- RunMismatch                      the run directory belongs to another run
    |   |-- StepReleased                     the step's arrays were removed by a later checkpoint
    |   `-- Fenced                           this process was declared dead and adopted
    |-- StepError (ValueError)               a step file does not hold what the ledger shipped
    |-- StepLost (RuntimeError)              no micro batch of a step could be fetched anywhere: the run stops
    `-- RoleFailed (RuntimeError)            a process of the run died
        `-- ReplicaDown                      one env-server replica is gone: its runs fail over

Messages say what was asked, what was found and what to do. Errors survive pickling because their whole state is ``args``.
"""


class FsrefError(Exception):
    """Base of everything that fsref raises on purpose."""


class ConfigError(FsrefError, ValueError):
    """A setting is unknown, of the wrong type or out of bounds."""


class MissingExtra(FsrefError, ImportError):
    """A package of an optional extra is not installed. Build it with ``MissingExtra.of``."""

    @classmethod
    def of(cls, extra: str, package: str) -> "MissingExtra":
        return cls(f"this needs the package {package!r}, which is not installed: pip install 'fsref[{extra}]'")


class BadRef(FsrefError, ValueError):
    """A reference is malformed, out of bounds or of another run; nothing was opened."""


class PayloadError(FsrefError, ValueError):
    """Arrays do not fit their schema, or hold values that no engine may produce."""


class WireError(PayloadError):
    """An engine's reply has a form that this version does not read."""


class MissingArrays(FsrefError, LookupError):
    """A sample came without a field that the run's config names under ``fields``."""


class StoreError(FsrefError, OSError):
    """A store operation failed. Its subclasses say what a caller can do."""


class ObjectMissing(StoreError, FileNotFoundError):
    """The object is not in the store."""


class ObjectExists(StoreError, FileExistsError):
    """The object is already in the store; names are never reused."""


class ObjectCorrupt(StoreError):
    """The object is in the store but short, torn, flipped or forged. Never read as zeros."""


class StoreUnavailable(StoreError, TimeoutError):
    """The store did not answer, or answered that it is overloaded."""


class StoreDenied(StoreError, PermissionError):
    """The store refused: credentials, ownership or a read-only mount."""


class StoreFull(StoreError):
    """No space, no inodes or a quota."""


class LedgerError(FsrefError):
    """A rule of the ledger would be broken."""


class NotHolder(LedgerError, PermissionError):
    """The caller does not hold the right to remove this object; nothing was removed."""


class DoubleDrop(LedgerError):
    """The same holder dropped the same object twice (raised in strict mode, else counted)."""


class JournalCorrupt(LedgerError):
    """A journal has a bad line that valid lines follow, or a line outside the grammar."""


class JournalPoisoned(LedgerError):
    """An append or sync of the own journal failed; the process must not keep or remove any more."""


class RunBusy(LedgerError):
    """Another process that is not provably dead owns the run."""


class RunMismatch(LedgerError):
    """The folder holds another run: the run_uuid differs."""


class StepReleased(LedgerError):
    """The step's arrays were removed; the message names the checkpoint that released them."""


class Fenced(LedgerError):
    """This process was declared dead and its rights were adopted; it must stop."""


class StepError(FsrefError, ValueError):
    """A step or rank file is incomplete, or its counts differ from what was shipped."""


class StepLost(FsrefError, RuntimeError):
    """No micro batch of the step could be fetched on any rank."""


class RoleFailed(FsrefError, RuntimeError):
    """A process of the run ended with an error; the message names its role and its log."""


class ReplicaDown(RoleFailed):
    """One env-server replica is gone; its runs are retried on another."""
