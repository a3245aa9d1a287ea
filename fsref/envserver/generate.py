"""Between verifiers and the engine: takes per-token arrays out of every generate reply before verifiers sees it.

``renderers.client.generate`` posts a request and parses the whole reply on the event loop, masks and heads as Python lists. Here the
post goes through ``_Engine``: the reply is decoded in a thread (``fsref.wire``), its arrays go to the ``Capture`` of the trace, and
only what is left, tokens and sampled logprobs, goes on to renderers. So verifiers never holds an array, streams none, and the event loop
never decodes one. A reply that cannot be read fails its request and is remembered, so that the episode's error says why.

The trace is known by ``X-Session-ID``, which verifiers sends with every request and which is the trace id.
"""

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import renderers.client
from numpy.typing import NDArray
from verifiers.v1.clients.client import SESSION_ID_HEADER

from fsref.envserver.capture import Capture, Rows, turn_arrays
from fsref.errors import ConfigError, WireError
from fsref.refs import Alignment, Field, Lints, Ragged, Schema
from fsref.wire.logprobs import check_sampled, decode_logprobs, decode_top_logprobs
from fsref.wire.masks import check_mask, decode_sampling_mask
from fsref.wire.modelconfig import ModelShape
from fsref.wire.openfields import decode_open_field
from fsref.wire.pieces import Heads, Mask, take_heads, take_mask
from fsref.wire.routing import decode_routed_experts
from fsref.wire.splice import splice_routing
from fsref.wire.text import encode_base64

_EXTRA_CANDIDATES: Final = 2
"""An engine puts the sampled token first, so the true head needs one more candidate, and one to see a tie at the cut."""

KNOWN: Final = frozenset({"routed_experts", "top_logprobs", "sampling_mask"})
"""Fields that engines have forms of their own for."""


def open_fields(schema: Schema) -> tuple[Field, ...]:
    """The schema's other fields; raises ``ConfigError`` for one that turns cannot be merged for."""
    found = tuple(f for f in schema.fields if f.name not in KNOWN)
    for field in found:
        if field.ragged and field.alignment is Alignment.INPUT:
            raise ConfigError(f"[[field]] {field.name!r}: a ragged field from an engine is aligned to the target, not to the input")
    return found


_LINTS: Final = Lints()


@dataclass(frozen=True)
class Adapter:
    """What every patched call shares."""

    capture: Capture
    executor: Executor
    """Decodes replies."""
    model: ModelShape | None
    """Checks sizes and ids of routing; ``None`` takes them as they are."""
    open_fields: Sequence[Field] = ()
    """Declared fields that engines send under their own name."""
    lints: Lints = _LINTS
    """What is refused at once; what only warns is counted when the arrays are put."""

    def install(self) -> Callable[[], None]:
        """Replaces ``renderers.client.generate``, which verifiers imports at each call; returns the undo."""
        inner = renderers.client.generate

        @functools.wraps(inner)
        async def generate(**kwargs: Any) -> Any:
            return await self.generate(inner, **kwargs)

        renderers.client.generate = generate

        def undo() -> None:
            renderers.client.generate = inner

        return undo

    async def generate(self, inner: Callable[..., Awaitable[Any]], **kwargs: Any) -> Any:
        """``inner``, with a client that takes the arrays out."""
        trace_id = (kwargs.get("extra_headers") or {}).get(SESSION_ID_HEADER)
        sampling = dict(kwargs.get("sampling_params") or {})
        head = sampling.pop("logprobs", None)
        engine = _Engine(kwargs["client"], self, trace_id, head if type(head) is int and head > 0 else None)
        result = await inner(**{**kwargs, "client": engine, "sampling_params": sampling})
        if not engine.posted:
            raise WireError("renderers did not post the request through the client it was given: this version is not supported")
        return result

    def read(self, raw: bytes, body: Mapping[str, Any], *, trace_id: str | None, head: int | None) -> bytes:
        """Decodes a reply (in a thread), gives its arrays to the capture, and returns the rest as JSON. Raises ``WireError``."""
        rest, heads = take_heads(raw)
        rest, routing = splice_routing(rest)
        rest, mask = take_mask(rest)
        try:
            reply = json.loads(rest)
        except ValueError as e:
            raise WireError(f"the engine's reply is not JSON: {e}") from e
        choices = reply.get("choices") if isinstance(reply, dict) else None
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise WireError(f"the engine's reply has no choices: {raw[:80]!r}")
        if len(choices) != 1:
            raise WireError(f"the engine's reply has {len(choices)} choices, verifiers reads one: ask once per sample (n = 1)")
        choice = choices[0]
        if routing and choice.get("routed_experts") == "":
            choice["routed_experts"] = routing[0]
        self._take(choice, body, trace_id=trace_id, head=head, heads=heads, mask=mask)
        return json.dumps({**reply, "choices": [choice]}, separators=(",", ":")).encode()

    def _take(
        self,
        choice: dict[str, Any],
        body: Mapping[str, Any],
        *,
        trace_id: str | None,
        head: int | None,
        heads: Heads | None,
        mask: Mask | None,
    ) -> None:
        prompt_ids, token_ids = body["token_ids"], choice.get("token_ids")
        if not isinstance(token_ids, list):
            raise WireError(f"choice.token_ids: a list expected, {type(token_ids).__name__} found")
        start = int(body["sampling_params"].get("routed_experts_prompt_start") or 0)
        routing = decode_routed_experts(
            choice.pop("routed_experts", None),
            start=start,
            token_count=len(prompt_ids) + len(token_ids),
            model=self.model,
            refuse_zero_layer=self.lints.zero_layer == "refuse",
        )
        ragged: dict[str, Ragged] = {}
        content = choice.pop("logprobs", None)
        if heads is None:
            logprobs = decode_logprobs(content, token_ids=token_ids)
            if head is not None:
                ragged["top_logprobs"] = decode_top_logprobs(content, token_ids=token_ids, head=head)
        else:
            logprobs = check_sampled(heads.token_ids, heads.logprobs, token_ids=token_ids)
            if head is not None:
                ragged["top_logprobs"] = heads.top_logprobs(head)
        choice["completion_logprobs"] = _packed(logprobs)
        vocab_count = self.model.vocab_count if self.model else 1 << 31
        sent_mask = choice.pop("sampling_mask", None)
        outside = self.lints.sampled_outside == "refuse"
        if mask is not None:
            ragged["sampling_mask"] = check_mask(
                mask.counts, mask.ids, token_ids=token_ids, vocab_count=vocab_count, refuse_outside=outside
            )
        else:
            kept = decode_sampling_mask(sent_mask, token_ids=token_ids, vocab_count=vocab_count, refuse_outside=outside)
            if kept is not None:
                ragged["sampling_mask"] = kept
        dense: dict[str, Rows] = {} if routing is None else {"routed_experts": (routing.start, routing.rows)}
        for field in self.open_fields:
            sent = decode_open_field(
                choice.pop(field.name, None),
                field,
                start=start,
                prompt_count=len(prompt_ids),
                token_count=len(prompt_ids) + len(token_ids),
            )
            if isinstance(sent, Ragged):
                ragged[field.name] = sent
            elif sent is not None:
                dense[field.name] = sent
        if trace_id is not None:
            self.capture.add(trace_id, turn_arrays(prompt_ids=prompt_ids, completion_ids=token_ids, dense=dense, ragged=ragged))


def _packed(logprobs: NDArray[np.float32]) -> dict[str, Any]:
    """prime-rl's form of sampled logprobs, which renderers reads without a Python object per token."""
    return {"data": encode_base64(logprobs), "shape": list(logprobs.shape), "dtype": "float32"}


@dataclass(frozen=True)
class _Reply:
    """As much of an HTTP response as renderers reads."""

    content: bytes


class _Engine:
    """As much of an OpenAI client as ``renderers.client.generate`` uses."""

    def __init__(self, inner: Any, adapter: Adapter, trace_id: str | None, head: int | None) -> None:
        self._inner, self._adapter, self._trace_id, self._head = inner, adapter, trace_id, head
        self.posted = False

    @property
    def base_url(self) -> Any:
        return self._inner.base_url

    async def get(self, *args: Any, **kwargs: Any) -> Any:
        return await self._inner.get(*args, **kwargs)

    async def post(self, endpoint: str, *, body: dict[str, Any], **kwargs: Any) -> _Reply:
        self.posted = True
        body = {**body, "sampling_params": self._sampling(body)}
        response = await self._inner.post(endpoint, body=body, **kwargs)
        read = functools.partial(self._adapter.read, response.content, body, trace_id=self._trace_id, head=self._head)
        try:
            return _Reply(await asyncio.get_running_loop().run_in_executor(self._adapter.executor, read))
        except WireError as e:
            if self._trace_id is not None:
                self._adapter.capture.fail(self._trace_id, e)
            raise

    def _sampling(self, body: Mapping[str, Any]) -> dict[str, Any]:
        sampling = dict(body["sampling_params"])
        if self._head is not None:
            sampling["logprobs"] = self._head + _EXTRA_CANDIDATES
        start = sampling.get("routed_experts_prompt_start")
        if start is not None:
            # vLLM 0.27 dies of a start at or behind the prompt's end
            sampling["routed_experts_prompt_start"] = max(0, min(int(start), len(body["token_ids"]) - 1))
        return sampling
