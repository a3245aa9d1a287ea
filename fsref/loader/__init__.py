"""From published steps to tensors on a trainer's ranks, and back to the removal of what was trained.

What a trainer of any kind uses, the pipeline's own among them. ``StepLoader`` is the whole of it; its parts can be read alone: ``feed``
(finding step files), ``fetch`` (a rank's arrays, ahead of time), ``agreement`` (which micro batches train), ``standin`` and ``batch``
(what goes through the model), ``commit`` (when arrays are removed), ``ranks`` (collectives). ``prime_rl``: tensors under that trainer's
names. Refuses models, losses and optimisers. Needs the extra ``torch``.
"""

from fsref.errors import MissingExtra

try:
    import torch as _torch  # noqa: F401 - proves the extra before a module below needs it
except ImportError as e:
    raise MissingExtra.of("torch", "torch") from e

from fsref.loader.agreement import Agreement
from fsref.loader.commit import Removed
from fsref.loader.loader import ReadyMicroBatch, Step, StepLoader
from fsref.loader.ranks import Place, Ranks
from fsref.loader.standin import ROUTING
from fsref.parallel import Coordinate, Parallel

__all__ = ["Agreement", "Coordinate", "Parallel", "Place", "ROUTING", "Ranks", "ReadyMicroBatch", "Removed", "Step", "StepLoader"]
