"""What fsref uses of verifiers on both sides of the wire: the check of its seams, tasks, the episode client, branches as plain data.

Nothing above this package but the env server imports verifiers. Needs the extra ``verifiers``.
"""

from fsref.episodes.branches import BranchSample, TraceResult
from fsref.episodes.client import Episode, EpisodeClient, ReplicaCounts
from fsref.episodes.seams import check_seams
from fsref.episodes.source import Target, Task, load_tasks, sampling_values

__all__ = [
    "BranchSample",
    "Episode",
    "EpisodeClient",
    "ReplicaCounts",
    "Target",
    "Task",
    "TraceResult",
    "check_seams",
    "load_tasks",
    "sampling_values",
]
