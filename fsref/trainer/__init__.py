"""The trainer ranks: read a step, fetch its arrays, replay its routing, train, commit.

``main`` runs one rank. Below it, each module can be read alone: ``replay`` (experts of a forward), ``loss`` (the objective),
``model`` (packed forward), ``learner`` (one optimiser step), ``checkpoint``, ``weights``, ``loop`` (the order of a step). What a trainer
of one's own uses too lies in ``fsref.loader``: step files, fetches, agreement between ranks, removal.
"""

from fsref.errors import MissingExtra

try:
    import torch as _torch  # noqa: F401 - proves the extra before a module below needs it
except ImportError as e:
    raise MissingExtra.of("torch", "torch") from e
