"""Settings of the trainer: how its ranks share a step, the loss, the optimiser, what stays on disk."""

from typing import Annotated, Literal

from msgspec import Meta

from fsref.config.base import Count, Fraction, Natural, Positive, Section

ParallelAxis = Literal["data", "context", "tensor", "pipeline"]
"""An axis of a parallel layout."""
Targets = Literal["own", "next"]
"""Whose figures stand at a row of a batch: those of its own token, or of the next one, which it predicts."""


class ParallelSection(Section, frozen=True, kw_only=True):
    """``[trainer.parallel]``: how a step is laid over ranks. ``fsref trainer`` is data parallel; the other axes are
    for trainers of one's own (``fsref.loader``)."""

    data: Count = 2
    """Data ranks; each reads its own rank file."""
    context: Count = 1
    """Context parallel ranks, which share the rows of every sequence."""
    tensor: Count = 1
    """Tensor parallel ranks."""
    pipeline: Count = 1
    """Pipeline ranks."""
    layout: Literal["", "zigzag", "contiguous", "allgather"] = ""
    """How context ranks share rows; needed where there are several, and never guessed."""
    stages: str = ""
    """Layer ids of the pipeline ranks, ``0-2,7;3-6``, with ``|`` between a rank's virtual stages; needed where there are several ranks."""
    sequence: bool = False
    """Sequence parallelism: tensor ranks share the rows of a context rank. Off: all of them see the same rows."""
    sequence_multiple: Natural = 0
    """Every sequence is padded to a multiple of it before the split; 0: to the least that the layout divides."""
    multiple: Count = 1
    """A context rank's rows are padded to a multiple of it, behind the split (``allgather``: before it)."""
    expert_shards: Count = 1
    """Expert parallel ranks that a layer's experts are spread over; padding rows are balanced over them."""
    targets: Targets = "own"
    """Whose loss mask, logprobs, advantages, heads and masks stand at a row: its token's ``own``, or the ``next`` token's, which the row
    predicts, with ``labels`` beside them. Context ranks need ``next``: the split cuts a token apart from the row that predicts it."""
    loss_stage: Annotated[int, Meta(ge=-1)] = -1
    """Pipeline rank that has the logits, and so reads the fields without layers; -1: the last."""
    order: tuple[ParallelAxis, ...] = ()
    """The axes, slowest first, that ranks are numbered along; needed where several have more than one rank."""


class LossSection(Section, frozen=True, kw_only=True):
    """``[trainer.loss]``."""

    replay: bool = True
    """Route as the sampler did."""
    compare_replay: bool = False
    """Also runs every micro batch the other way round (without replay, or with), for the metrics only: one more forward, no gradient."""
    ratio_low: Fraction = 0.5
    ratio_high: Annotated[float, Meta(ge=1)] = 2.0
    """IcePop band: a token whose trainer-to-sampler ratio lies outside gives no policy gradient."""
    ratio_weight: bool = False
    """Also weigh by the ratio inside the band, as IcePop does; off: the band is a mask only, and score centering corrects the rest."""
    center_weight: Annotated[float, Meta(ge=0)] = 1.0
    """Weight of the score-centering term over the top-k head; 1 cancels the drift exactly, 0 turns it off."""


class TrainerSection(Section, frozen=True, kw_only=True):
    """``[trainer]``: ranks, optimiser, checkpoints."""

    parallel: ParallelSection = ParallelSection()
    loss: LossSection = LossSection()
    learning_rate: Positive = 3e-3
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    grad_norm_max: Positive = 1.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    checkpoint_every: Count = 4
    """Steps between checkpoints; the last step always gets one."""
    commit: Literal["fetched", "checkpoint", "keep_last"] = "checkpoint"
    """When a step's arrays are removed."""
    keep_last: Count = 2
    """Steps whose arrays stay, where ``commit = "keep_last"``."""
    record_routes: bool = False
    """Also write what the experts were given, to ``<run_dir>/routes``; to prove replay, not to train."""
    checkpoints_keep: Count = 2
    """Checkpoints that stay on disk."""
    weights_keep: Count = 3
    """Weight folders that stay on disk."""
    step_wait_s: Positive = 600.0
    """How long to wait for the next step file."""
    collective_s: Positive = 300.0
    """Deadline of a collective operation."""
    threads: Count = 1
    """Compute threads per rank."""
