"""Frozen settings of a run, read from TOML.

Owns the names, types, bounds and defaults of every setting, overrides from the command line, and the messages for bad ones.
Nothing below this package reads the environment or a config file; each part gets the section that it needs.
"""

from fsref.config.loading import build, dump, keys, load, parse, struct_of
from fsref.config.run import LauncherSection, MetricsSection, PayloadSection, RunSection
from fsref.config.sampling import EnvSection, InferenceSection, ModelSection, OrchestratorSection, SamplingSection
from fsref.config.sections import Config, quota_share
from fsref.config.slurm import SlurmOrchestratorSection, SlurmSamplingSection, SlurmSection, SlurmTrainingSection
from fsref.config.storage import LedgerSection, StoreSection
from fsref.config.training import LossSection, ParallelAxis, ParallelSection, Targets, TrainerSection

__all__ = [
    "Config",
    "EnvSection",
    "InferenceSection",
    "LauncherSection",
    "LedgerSection",
    "LossSection",
    "MetricsSection",
    "ModelSection",
    "OrchestratorSection",
    "ParallelAxis",
    "Targets",
    "ParallelSection",
    "PayloadSection",
    "RunSection",
    "SamplingSection",
    "SlurmOrchestratorSection",
    "SlurmSamplingSection",
    "SlurmSection",
    "SlurmTrainingSection",
    "StoreSection",
    "TrainerSection",
    "build",
    "dump",
    "keys",
    "load",
    "parse",
    "quota_share",
    "struct_of",
]
