"""One optimiser step over a step's micro batches: forward with replay, loss, backward, averaged gradients, update.

Owns model, optimiser and the flat gradient buffer. Every rank holds the whole model; gradients are sums over tokens, added up over
ranks once per step and divided by the trained tokens of all ranks, so that a token weighs the same wherever it was packed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn

from fsref.config import TrainerSection
from fsref.errors import ConfigError
from fsref.loader.ranks import Ranks
from fsref.loader.standin import ROUTING
from fsref.refs import Schema
from fsref.tensors import DenseTensor, PackedMicroBatch
from fsref.trainer.loss import SUMS, micro_batch_loss, trained_rows
from fsref.trainer.model import logits_at
from fsref.trainer.replay import RouterReplay, RoutesUsed

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class StepSums:
    """What one rank's micro batches of a step add up to."""

    loss: Tensor = field(default_factory=lambda: torch.zeros(len(SUMS), dtype=torch.float64))
    routing_rows: int = 0
    routing_rows_different: int = 0
    other_loss: Tensor = field(default_factory=lambda: torch.zeros(len(SUMS), dtype=torch.float64))
    """The same micro batches with ``loss.replay`` the other way round, if that was asked for."""
    other_rows_different: int = 0

    def vector(self) -> Tensor:
        """float64: everything in one tensor, for one all-reduce."""
        rows = [self.routing_rows, self.routing_rows_different, self.other_rows_different]
        return torch.cat([self.loss, self.other_loss, torch.tensor(rows, dtype=torch.float64)])


@dataclass(frozen=True)
class Update:
    """What an optimiser step did."""

    grad_norm: float
    """Before clipping, of the averaged gradient."""
    skipped: bool
    """No token trained, or the gradient was not finite: parameters stay as they were."""
    sums: Mapping[str, float]
    """The names of ``loss.SUMS``, over all ranks."""
    routing_rows: float
    routing_rows_different: float
    other_sums: Mapping[str, float]
    """As ``sums``, with ``loss.replay`` the other way round; zeros unless ``loss.compare_replay``."""
    other_rows_different: float


class Learner:
    """The policy and its optimiser on one rank."""

    def __init__(self, model: nn.Module, ranks: Ranks, schema: Schema, config: TrainerSection) -> None:
        self.model, self._ranks, self._config = model, ranks, config
        self._dtype = _DTYPES[config.dtype]
        routing = next((f for f in schema.fields if f.name == ROUTING), None)
        if routing is not None and routing.id_space == "physical":
            raise ConfigError(
                f"field {routing.name!r} holds physical expert ids (of a load balancer's replicas), the model routes by logical ones: "
                "map them through the balancer's table where they are captured"
            )
        self._router = None if routing is None else RouterReplay(model, layer_ids=routing.layer_ids)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._gradient = _flat_gradient(self._parameters)
        self.optimizer = torch.optim.AdamW(self._parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
        self._sums = StepSums()

    def add(self, batch: PackedMicroBatch, *, fresh_T: Tensor | None = None) -> RoutesUsed | None:
        """Forward and backward of one micro batch; one without trained tokens changes nothing but the time.

        ``fresh_T``: see ``micro_batch_loss``. Returns what its experts were given, None where it has no routing.
        """
        rows = trained_rows(batch)
        routing = batch.fields.get(ROUTING)
        if self._router is None or not isinstance(routing, DenseTensor):
            self._train(batch, rows, fresh_T)
            return None
        compared, capture = routing.valid & ~batch.padding, self._config.record_routes
        with self._router.block(routing.rows, replay=self._config.loss.replay, valid_T=compared, capture=capture) as used:
            self._train(batch, rows, fresh_T)
        self._sums.routing_rows += used.rows
        self._sums.routing_rows_different += used.rows_different
        if self._config.loss.compare_replay:
            self._compare(batch, rows, fresh_T, routing.rows, compared)
        return used

    def update(self) -> Update:
        """Collective: averages the gradients, clips, steps. The next micro batch starts from zero gradients."""
        vector = self._sums.vector()
        self._ranks.sum_in_place(vector)
        self._ranks.sum_in_place(self._gradient)
        values = vector.tolist()
        sums = dict(zip(SUMS, values, strict=False))
        other = dict(zip(SUMS, values[len(SUMS) :], strict=False))
        self._gradient.div_(max(1.0, sums["tokens"]))
        norm = float(torch.linalg.vector_norm(self._gradient))
        skipped = not sums["tokens"] or not torch.isfinite(torch.tensor(norm)).item()
        if not skipped:
            self._gradient.mul_(min(1.0, self._config.grad_norm_max / (norm + 1e-6)))
            self.optimizer.step()
        self._gradient.zero_()
        self._sums = StepSums()
        return Update(norm, skipped, sums, values[-3], values[-2], other, values[-1])

    def _train(self, batch: PackedMicroBatch, rows: Tensor, fresh_T: Tensor | None) -> None:
        logits = logits_at(self.model, batch, rows, dtype=self._dtype)
        result = micro_batch_loss(logits, batch, rows, config=self._config.loss, fresh_T=fresh_T)
        result.loss.backward()
        self._sums.loss += result.sums.cpu()

    @torch.no_grad()
    def _compare(self, batch: PackedMicroBatch, rows: Tensor, fresh_T: Tensor | None, routes: Tensor, compared: Tensor) -> None:
        """The forward with replay the other way round; its sums go to the metrics and nowhere else."""
        assert self._router is not None
        with self._router.block(routes, replay=not self._config.loss.replay, valid_T=compared, capture=False) as used:
            logits = logits_at(self.model, batch, rows, dtype=self._dtype)
        self._sums.other_loss += micro_batch_loss(logits, batch, rows, config=self._config.loss, fresh_T=fresh_T).sums.cpu()
        self._sums.other_rows_different += used.rows_different


def _flat_gradient(parameters: list[nn.Parameter]) -> Tensor:
    """One zeroed buffer whose views are the parameters' gradients: one all-reduce, one norm, one scale."""
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float32, device=parameters[0].device)
    at = 0
    for parameter in parameters:
        parameter.grad = flat[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    return flat
