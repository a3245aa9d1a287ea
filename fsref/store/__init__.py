"""Bytes in and out of a root, behind one seam: ``Store``. Errors of every backend are mapped to ``fsref.errors`` here."""

from fsref.store.base import Buffer, Deletion, Entry, ObjectFile, Store
from fsref.store.capabilities import Capabilities, probe
from fsref.store.credentials import Credentials
from fsref.store.open import open_root, posix_root

__all__ = ["Buffer", "Capabilities", "Credentials", "Deletion", "Entry", "ObjectFile", "Store", "open_root", "posix_root", "probe"]
