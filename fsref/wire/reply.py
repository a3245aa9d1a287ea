"""A whole choice of ``POST /inference/v1/generate``: every array that it carries, checked against its tokens and its request."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsref.errors import WireError
from fsref.refs import Ragged
from fsref.wire.logprobs import decode_logprobs, decode_top_logprobs
from fsref.wire.masks import decode_sampling_mask
from fsref.wire.modelconfig import ModelShape
from fsref.wire.routing import Routing, decode_routed_experts


@dataclass(frozen=True, eq=False)
class Choice:
    """One completion of a request. Arrays that the engine did not send are ``None``."""

    index: int
    token_ids: NDArray[np.int32]
    """The completion, [T]."""
    finish_reason: str
    logprobs: NDArray[np.float32] | None
    """Of the sampled tokens, [T]."""
    routing: Routing | None
    """Rows of prompt and completion from ``routing.start`` on."""
    top_logprobs: Ragged | None
    """One row per completion token, as sent or as the head that was asked for."""
    sampling_mask: Ragged | None
    """One row per completion token."""


def decode_choice(choice: object, *, prompt_count: int, start: int = 0, head: int | None = None, model: ModelShape | None = None) -> Choice:
    """``choice`` as parsed from JSON, for a request of ``prompt_count`` tokens and ``routed_experts_prompt_start = start``.

    ``head`` is the size of the top-k head to keep (ask the engine for ``head + 2``), ``None`` keeps what was sent. Raises ``WireError``.
    """
    if not isinstance(choice, Mapping):
        raise WireError(f"choices: an object expected, {type(choice).__name__} found")
    token_ids = token_ids_of(choice.get("token_ids"))
    content = choice.get("logprobs")
    return Choice(
        index=_index(choice.get("index", 0)),
        token_ids=token_ids,
        finish_reason=str(choice.get("finish_reason") or ""),
        logprobs=None if content is None else decode_logprobs(content, token_ids=token_ids),
        routing=decode_routed_experts(choice.get("routed_experts"), start=start, token_count=prompt_count + len(token_ids), model=model),
        top_logprobs=None if content is None else decode_top_logprobs(content, token_ids=token_ids, head=head),
        sampling_mask=decode_sampling_mask(
            choice.get("sampling_mask"), token_ids=token_ids, vocab_count=model.vocab_count if model else 1 << 31
        ),
    )


def token_ids_of(value: Any, what: str = "choice.token_ids") -> NDArray[np.int32]:
    """A completion's ids, checked."""
    if not isinstance(value, list) or any(type(t) is not int or not 0 <= t < 1 << 31 for t in value):
        raise WireError(f"{what}: a list of token ids expected, {value!r:.80} found")
    return np.asarray(value, dtype=np.int32)


def _index(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise WireError(f"choice.index: a whole number expected, {value!r:.40} found")
    return value
