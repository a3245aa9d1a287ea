"""Carrying out removals: the holders of rights, the background deleter, adoption and recovery, and the audit over files and store."""

from fsref.reaper.consumer import ConsumerHolder
from fsref.reaper.delete import Outcome, delete_objects
from fsref.reaper.env import EnvHolder
from fsref.reaper.step import StepHolder

__all__ = ["ConsumerHolder", "EnvHolder", "Outcome", "StepHolder", "delete_objects"]
