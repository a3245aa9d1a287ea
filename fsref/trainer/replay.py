"""Router replay: a forward that uses the experts that the sampler used, and a reader of the experts that it really used.

Owns the hooks on a model's routers and experts, for the length of one ``with`` block; nothing stays on the model after it. Refuses
models whose router does not have the form below, routes that do not cover every MoE layer of the model, and a block in which a MoE
layer did not run.

Source: Rollout Routing Replay, arXiv 2510.11370. The expert ids are replayed, the weights are not: they are the trainer's own router
probabilities, gathered at the replayed ids and normalised as the model's config says, so that gradients reach the router.

A router is a module that returns ``(logits [T, E], weights [T, K], ids [T, K])`` with ``weights`` from a softmax over all experts, and
has ``top_k``, ``num_experts`` and ``norm_topk_prob`` (transformers' Qwen3-MoE and its kin).

Shape letters: T tokens, L layers, K experts per token, E experts.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from fsref.errors import ConfigError, PayloadError


@dataclass(frozen=True)
class MoeLayer:
    """One layer that routes."""

    layer_id: int
    """Global layer id."""
    router: nn.Module
    experts: nn.Module
    top_k: int
    expert_count: int


def moe_layers(model: nn.Module) -> tuple[MoeLayer, ...]:
    """The MoE layers of a transformers decoder, ascending by layer id; dense layers between them are left out.

    Raises ``ConfigError`` for a model without a list of layers, or with a router of an unknown form.
    """
    blocks = getattr(getattr(model, "model", model), "layers", None)
    if not isinstance(blocks, nn.ModuleList):
        raise ConfigError(f"{type(model).__name__} has no list of decoder layers: router replay supports transformers' Qwen3-MoE form")
    found = []
    for layer_id, block in enumerate(blocks):
        mlp = getattr(block, "mlp", None)
        router, experts = getattr(mlp, "gate", None), getattr(mlp, "experts", None)
        if not (isinstance(router, nn.Module) and isinstance(experts, nn.Module)):
            continue
        if not all(hasattr(router, name) for name in ("top_k", "num_experts", "norm_topk_prob")):
            raise ConfigError(f"layer {layer_id}: a router of type {type(router).__name__} is not known to router replay")
        found.append(MoeLayer(layer_id, router, experts, int(router.top_k), int(router.num_experts)))  # type: ignore[arg-type]
    return tuple(found)


class RoutesUsed:
    """What the experts of one block were really given, read at their input."""

    def __init__(self, layer_count: int, *, capture: bool) -> None:
        self.rows: int = 0
        """Compared rows: valid tokens times MoE layers."""
        self._capture = capture
        self._different: list[Tensor] = []
        self._dispatched: dict[int, Tensor] = {}
        self._layer_count: Final = layer_count

    @property
    def rows_different(self) -> int:
        """Compared rows whose set of experts differs from the given one; the order of slots does not count."""
        return int(torch.stack(self._different).sum()) if self._different else 0

    @property
    def dispatched(self) -> Tensor:
        """int64 [T, L, K]: expert ids in slot order; kept only with ``capture=True``."""
        assert len(self._dispatched) == self._layer_count, "read it after a forward, with capture=True"
        return torch.stack([self._dispatched[n] for n in range(self._layer_count)], dim=1)

    def _saw(self, index: int, ids_TK: Tensor, given_TK: Tensor | None, valid_T: Tensor | None) -> None:
        if self._capture:
            self._dispatched[index] = ids_TK.detach().clone()
        if given_TK is None:
            return
        differs = (ids_TK.sort(dim=-1).values != given_TK.sort(dim=-1).values).any(dim=-1)
        self._different.append((differs if valid_T is None else differs & valid_T).sum())
        self.rows += int(len(differs) if valid_T is None else valid_T.sum())


class RouterReplay:
    """Installs routing on one model, block by block. Holds no hooks between blocks."""

    def __init__(self, model: nn.Module, *, layer_ids: Sequence[int] = ()) -> None:
        """``layer_ids``: the global ids of the routes' layer axis (the field's ``layer_ids``); dense layers among them are ignored.

        Without them the axis must hold exactly the MoE layers. Raises ``ConfigError`` if a MoE layer of the model has no routes.
        """
        self.layers = moe_layers(model)
        if not self.layers:
            raise ConfigError(
                f"{type(model).__name__} has no MoE layer, so there is nothing to replay: take routed_experts out of run.fields"
            )
        mine = [layer.layer_id for layer in self.layers]
        ids = list(layer_ids) or mine
        missing = sorted(set(mine) - set(ids))
        if missing:
            raise ConfigError(f"routed_experts covers the layers {ids}, but the model also routes in {missing}: other model or schema")
        self._axis = [ids.index(layer_id) for layer_id in mine]
        self._axis_length = len(ids)

    @contextmanager
    def block(
        self, routes_TLK: Tensor | None, *, replay: bool, valid_T: Tensor | None = None, capture: bool = False
    ) -> Iterator[RoutesUsed]:
        """Routes the forwards (and recomputing backwards) inside the block.

        ``routes_TLK``: expert ids of any integer dtype, shape [T, L, K] or [1, T, L, K]; ``None`` lets the model choose.
        ``replay``: use them; else the model chooses and is only compared with them.
        ``valid_T``: bool [T], the rows that are compared (default all); every row is replayed.
        ``capture``: keep the experts' inputs in ``dispatched``.

        Raises ``PayloadError`` for ids that the model does not have or a row count that does not fit, ``RuntimeError`` if a layer
        never ran.
        """
        given = self._checked(routes_TLK)
        used = RoutesUsed(len(self.layers), capture=capture)
        seen: set[int] = set()
        with ExitStack() as hooks:
            for index, layer in enumerate(self.layers):
                ids_TK = None if given is None else given[:, index]
                if replay and ids_TK is not None:
                    hooks.callback(layer.router.register_forward_hook(_replaying(layer, ids_TK)).remove)
                reading = _reading(index, seen, used, ids_TK, valid_T)
                hooks.callback(layer.experts.register_forward_pre_hook(reading, with_kwargs=True).remove)
            yield used
        if len(seen) != len(self.layers):
            raise RuntimeError(f"{len(seen)} of {len(self.layers)} MoE layers ran inside the block")

    def _checked(self, routes: Tensor | None) -> Tensor | None:
        if routes is None:
            return None
        if routes.dim() == 4 and routes.shape[0] == 1:
            routes = routes[0]
        top_k, expert_count = self.layers[0].top_k, self.layers[0].expert_count
        if routes.dim() != 3 or tuple(routes.shape[1:]) != (self._axis_length, top_k):
            raise PayloadError(f"routes have shape {tuple(routes.shape)}, the model needs [tokens, {self._axis_length}, {top_k}]")
        mine = routes[:, self._axis].long()
        if mine.numel() and not (int(mine.min()) >= 0 and int(mine.max()) < expert_count):
            raise PayloadError(f"routes hold expert ids {int(mine.min())} to {int(mine.max())}, the model has {expert_count} experts")
        return mine


def _replaying(layer: MoeLayer, ids_TK: Tensor) -> Any:
    """A forward hook that replaces a router's choice by the given ids, with the router's own probabilities."""

    def hook(router: nn.Module, _args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE, weights_TK, _ = output
        if len(logits_TE) != len(ids_TK):
            raise PayloadError(f"layer {layer.layer_id}: {len(ids_TK)} rows of routes for {len(logits_TE)} tokens")
        probs = torch.softmax(logits_TE, dim=-1, dtype=torch.float32).gather(1, ids_TK)
        if router.norm_topk_prob:
            probs = probs / probs.sum(dim=-1, keepdim=True)
        return logits_TE, probs.to(weights_TK.dtype), ids_TK

    return hook


def _reading(index: int, seen: set[int], used: RoutesUsed, given_TK: Tensor | None, valid_T: Tensor | None) -> Any:
    """A pre-hook on the experts: what arrives here is what is computed, whoever chose it."""

    def hook(_experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if index in seen:  # a recomputing backward runs the same layer again
            return
        seen.add(index)
        used._saw(index, kwargs["top_k_index"] if "top_k_index" in kwargs else args[1], given_TK, valid_T)  # noqa: SLF001 - same module

    return hook
