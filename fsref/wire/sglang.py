"""SGLang's ``/generate`` reply: ``{"output_ids": [...], "meta_info": {...}}``, one object per completion.

``meta_info.routed_experts`` is base64 of little-endian int32 in C order, rows [R, L, K] without a shape: layers and experts come from the
model. Rows are of tokens ``[routed_experts_start_len, prompt + completion - 1)``, where the start is the request's (absolute) setting.
``output_token_logprobs`` is a list of [logprob, token id, text], ``output_top_logprobs`` one such list per token, and
``output_token_sampling_mask`` one list of ids per token, with ``output_token_sampling_mask_truncated`` true where ids were left out.

Shape letters: R rows, L layers, K experts per token, T completion tokens.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fsref.errors import WireError
from fsref.wire.logprobs import decode_logprobs, decode_top_logprobs
from fsref.wire.masks import decode_sampling_mask
from fsref.wire.modelconfig import ModelShape
from fsref.wire.reply import Choice, token_ids_of
from fsref.wire.routing import Routing, fit_model
from fsref.wire.text import BYTES_MAX, decode_base64, encode_base64

_WHAT: Final = "meta_info.routed_experts"


def decode_flat_routed_experts(
    value: object, *, start: int, token_count: int, model: ModelShape, bytes_max: int = BYTES_MAX, refuse_zero_layer: bool = True
) -> Routing | None:
    """Rows [R, L, K] from base64 int32 without a shape; ``None`` if the engine sent none. Rows are of tokens from ``start`` on.

    An engine sends all layers or only those that route, and all rows or all but the last token's; exactly one of these must account for
    the bytes. Raises ``WireError`` otherwise, and for what ``decode_routed_experts`` refuses.
    """
    if value is None:
        return None
    data = decode_base64(value, what=_WHAT, bytes_max=bytes_max)
    if not 0 <= start <= token_count:
        raise WireError(f"{_WHAT}: start {start} is not in 0..{token_count}, the tokens of prompt and completion")
    counts = dict.fromkeys((max(token_count - start - 1, 0), token_count - start))
    layers = dict.fromkeys((model.layer_count, len(model.layer_ids)))
    fits = [(r, n) for n in layers for r in counts if r * n * model.top_k * 4 == len(data)]
    fits = [(r, n) for r, n in fits if r] or fits[:1]
    if len(fits) != 1:
        forms = " or ".join(f"{r} rows of {n} layers" for n in layers for r in counts)
        raise WireError(
            f"{_WHAT}: {len(data)} bytes of int32 found, {'several' if fits else 'none'} of: {forms}, each of {model.top_k} experts; "
            "was the request's routed_experts_start_len passed on, and is this the model that sampled?"
        )
    rows = np.frombuffer(data, "<i4").reshape(*fits[0], model.top_k)
    if rows.size and int(rows.min()) < 0:
        raise WireError(f"{_WHAT}: expert id {int(rows.min())} found; validity travels beside the ids, never as a negative one")
    return Routing(fit_model(rows, model, refuse_zero_layer=refuse_zero_layer), start)


def encode_flat_routed_experts(rows_RLK: NDArray[Any]) -> str:
    """The form that ``decode_flat_routed_experts`` reads."""
    return encode_base64(np.asarray(rows_RLK, dtype="<i4", order="C"))


def decode_sglang(reply: object, *, prompt_count: int, start: int = 0, head: int | None = None, model: ModelShape) -> Choice:
    """One completion as parsed from JSON, for a request of ``prompt_count`` tokens and ``routed_experts_start_len = start``.

    Where the reply says its start itself (``meta_info.routed_experts_start_len``) it must agree. ``head`` as in ``decode_choice``.
    Raises ``WireError``.
    """
    if not isinstance(reply, Mapping) or not isinstance(reply.get("meta_info"), Mapping):
        raise WireError("an SGLang reply is an object with output_ids and meta_info")
    meta = reply["meta_info"]
    token_ids = token_ids_of(reply.get("output_ids"), "output_ids")
    _check_counts(meta, prompt_count=prompt_count, start=start, completion=len(token_ids))
    content = _content(meta, len(token_ids))
    routing = decode_flat_routed_experts(meta.get("routed_experts"), start=start, token_count=prompt_count + len(token_ids), model=model)
    heads = content is not None and meta.get("output_top_logprobs") is not None
    reason = meta.get("finish_reason")
    return Choice(
        index=0,
        token_ids=token_ids,
        finish_reason=str(reason.get("type") if isinstance(reason, Mapping) else reason or ""),
        logprobs=None if content is None else decode_logprobs(content, token_ids=token_ids),
        routing=routing,
        top_logprobs=decode_top_logprobs(content, token_ids=token_ids, head=head) if heads else None,
        sampling_mask=decode_sampling_mask(
            meta.get("output_token_sampling_mask"),
            token_ids=token_ids,
            vocab_count=model.vocab_count,
            truncated=meta.get("output_token_sampling_mask_truncated"),
        ),
    )


def _check_counts(meta: Mapping[str, Any], *, prompt_count: int, start: int, completion: int) -> None:
    for key, wanted in (("prompt_tokens", prompt_count), ("completion_tokens", completion), ("routed_experts_start_len", start)):
        if meta.get(key) not in (None, wanted):
            raise WireError(f"meta_info.{key} is {meta[key]!r}, {wanted} by the request and output_ids: a reply to another request")


def _content(meta: Mapping[str, Any], token_count: int) -> list[dict[str, Any]] | None:
    """Sampled logprobs and heads in the entries that ``decode_logprobs`` reads."""
    sampled, heads = meta.get("output_token_logprobs"), meta.get("output_top_logprobs")
    if sampled is None:
        return None
    if not isinstance(sampled, list) or len(sampled) != token_count:
        raise WireError(f"meta_info.output_token_logprobs: a list of {token_count} entries expected, {sampled!r:.80} found")
    if heads is None:
        heads = [()] * token_count
    if not isinstance(heads, list) or len(heads) != token_count:
        raise WireError(f"meta_info.output_top_logprobs: a list of {token_count} lists expected, {heads!r:.80} found")
    return [{**_entry(s), "top_logprobs": [_entry(c) for c in h]} for s, h in zip(sampled, heads, strict=True)]


def _entry(value: Any) -> dict[str, Any]:
    if not isinstance(value, list | tuple) or len(value) < 2:
        raise WireError(f"meta_info: a logprob is [logprob, token id, text], {value!r:.80} found")
    return {"logprob": value[0], "token_id": value[1]}
