"""From published steps to tensors on a trainer's ranks, and back to the removal of what was trained.

What a trainer of any kind uses, the pipeline's own among them: ``feed`` (finding step files), ``fetch`` (arrays, ahead of time),
``agreement`` (which micro batches train), ``standin`` and ``batch`` (what goes through the model), ``commit`` (when arrays are removed),
``ranks`` (collectives). Refuses models, losses and optimisers. Needs the extra ``torch``.
"""

from fsref.errors import MissingExtra

try:
    import torch as _torch  # noqa: F401 - proves the extra before a module below needs it
except ImportError as e:
    raise MissingExtra.of("torch", "torch") from e
