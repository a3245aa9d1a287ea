# ruff: noqa: PLC0415, SLF001  (a plugin may import vLLM only when vLLM calls it, and has to replace private methods)
"""vLLM plugin: ``--enable-return-routed-experts`` for the CPU build, which refuses it.

vLLM 0.27's CPU path computes routing and experts in one ("monolithic") call and offers no place to read the ids, so binding the
capturer raises. This plugin reads them where they are made: ``cpu_fused_moe.select_experts``, during the call of a layer that
has a capturer. What is stored is what the kernel then uses; nothing is computed twice.

The capturer hangs on the layer's ``RoutedExperts`` module, not on the quant method's kernel object: ``reload_weights`` makes that one anew,
and a hook on it would be lost with the first new weights (all later rows zero, with no error).

For tests and small experiments on CPUs; a GPU build needs none of it. Written for vLLM 0.27.1; raises on another layout.
"""

from collections.abc import Callable
from typing import Any

_ATTRIBUTE = "_capture_routed_experts"


class _Open:
    """The capturer of the layer that runs now in this process; layers run one after another on one thread."""

    capture: Callable[[Any], None] | None = None


def register() -> None:
    """vLLM calls this in each of its processes, possibly more than once."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if getattr(GPUModelRunner, _ATTRIBUTE, False):
        return
    for owner, name in (
        (cpu_fused_moe, "select_experts"),
        (UnquantizedFusedMoEMethod, "apply_monolithic"),
        (GPUModelRunner, "_bind_routed_experts_capturer"),
    ):
        if not callable(getattr(owner, name, None)):
            raise RuntimeError(f"vllm_cpu_capture was written for vLLM 0.27.1: this one has no {owner.__name__}.{name}")
    cpu_fused_moe.select_experts = _reporting(cpu_fused_moe.select_experts)
    UnquantizedFusedMoEMethod.apply_monolithic = _opening(UnquantizedFusedMoEMethod.apply_monolithic)
    GPUModelRunner._bind_routed_experts_capturer = _bind
    setattr(GPUModelRunner, _ATTRIBUTE, True)


def _reporting(select: Callable[..., Any]) -> Callable[..., Any]:
    def select_experts(*args: Any, **kwargs: Any) -> Any:
        weights, ids = select(*args, **kwargs)
        if _Open.capture is not None:
            _Open.capture(ids)
        return weights, ids

    return select_experts


def _opening(apply: Callable[..., Any]) -> Callable[..., Any]:
    def apply_monolithic(self: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        _Open.capture = getattr(layer, _ATTRIBUTE, None)
        try:
            return apply(self, layer, *args, **kwargs)
        finally:
            _Open.capture = None

    return apply_monolithic


def _bind(self: Any, capturer: Any) -> None:
    """Replaces ``GPUModelRunner._bind_routed_experts_capturer``; the CPU runner derives from it."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    runners = [m for m in self.model.modules() if isinstance(m, MoERunner)]
    if not runners:
        raise RuntimeError("vllm_cpu_capture found no mixture-of-experts layer in the model")
    for runner in runners:

        def capture(ids: Any, layer_id: int = runner.layer_id) -> None:
            capturer.capture(layer_id, ids)

        setattr(runner.routed_experts, _ATTRIBUTE, capture)
