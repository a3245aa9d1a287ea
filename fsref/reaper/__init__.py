"""Carrying out removals: the holders of rights, the background deleter, adoption and recovery, and the audit over files and store."""

from fsref.ledger import Audit, Verdict
from fsref.reaper.adopt import Adopted
from fsref.reaper.auditing import audit
from fsref.reaper.consumer import ConsumerHolder
from fsref.reaper.delete import Outcome, delete_objects
from fsref.reaper.env import EnvHolder
from fsref.reaper.histories import History, history
from fsref.reaper.purging import Purge, purge
from fsref.reaper.recovery import Recovery, close_run, recover
from fsref.reaper.step import StepHolder

__all__ = [
    "Adopted",
    "Audit",
    "ConsumerHolder",
    "EnvHolder",
    "History",
    "Outcome",
    "Purge",
    "Recovery",
    "StepHolder",
    "Verdict",
    "audit",
    "close_run",
    "delete_objects",
    "history",
    "purge",
    "recover",
]
