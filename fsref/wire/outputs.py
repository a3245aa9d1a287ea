"""Arrays straight from vLLM's ``RequestOutput``, for those who drive the engine in their own process, without HTTP.

    output = llm.generate([{"prompt_token_ids": ids}], SamplingParams(logprobs=10, ...))[0]
    ref = writer.put(payload_from_output(output, schema=schema, model=read_model_shape(folder), head=8))

Attributes are read by name; vLLM is never imported. 0.27.1 is run by the tests; 0.32 adds ``sampling_mask`` to a completion. Routing comes
with the finished output only, with one row for each token but the last sampled one.

Owns that reading. Refuses outputs that are not finished, and arrays that do not fit their tokens or the model: ``WireError``.

Shape letters: T tokens of prompt and completion, C completion tokens, R rows, L layers, K experts per token, N entries.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from fsref.errors import WireError
from fsref.refs import Alignment, Dense, FieldData, Payload, Ragged, Schema, TokenRange
from fsref.wire.logprobs import top_logprobs_of
from fsref.wire.masks import decode_sampling_mask
from fsref.wire.modelconfig import ModelShape
from fsref.wire.routing import Routing, decode_routed_experts

_KNOWN: Final = ("routed_experts", "top_logprobs", "sampling_mask")


class Completion(Protocol):
    """As much of vLLM's ``CompletionOutput`` as is read; ``routed_experts`` and ``sampling_mask`` may be absent."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Any: ...
    @property
    def finish_reason(self) -> str | None: ...


class Output(Protocol):
    """As much of vLLM's ``RequestOutput`` as is read."""

    @property
    def prompt_token_ids(self) -> Sequence[int] | None: ...
    @property
    def outputs(self) -> Sequence[Completion]: ...


def payload_from_output(
    output: Output, choice: int = 0, *, schema: Schema, model: ModelShape | None = None, start: int = 0, head: int | None = None
) -> Payload:
    """The payload [T] of one completion of a finished request, with those of the schema's fields that vLLM returned.

    ``start`` is the request's ``routed_experts_prompt_start``: earlier rows are missing, as is the last token's. ``model`` checks routing
    and cuts it to the layers that route. ``head`` is the size of the top-k head to keep (ask vLLM for ``head + 2``), ``None`` keeps what
    was sent. A field that vLLM did not return is absent; whether that is an error is for the caller's policy. Raises ``WireError``.
    """
    completion = _completion(output, choice)
    prompt_ids = output.prompt_token_ids
    if prompt_ids is None:
        raise WireError("the output has no prompt_token_ids: positions of its rows cannot be told; prompt with token ids")
    token_ids = np.asarray([*prompt_ids, *completion.token_ids], dtype=np.int32)
    at = len(prompt_ids)
    found: dict[str, FieldData] = {}
    for name in [f.name for f in schema.fields]:
        data = _field(name, completion, token_count=len(token_ids), model=model, start=start, head=head)
        if data is not None:
            if schema.field(name).alignment is Alignment.TARGET and isinstance(data, Ragged):
                data = _behind(data, at)
            found[name] = data
    return Payload(token_ids, found, tuple(f.name for f in schema.fields if f.name not in found))


def _completion(output: Output, choice: int) -> Completion:
    if not 0 <= choice < len(output.outputs):
        raise WireError(f"completion {choice} was asked for, the output has {len(output.outputs)}")
    completion = output.outputs[choice]
    if completion.finish_reason is None:
        raise WireError(f"completion {choice} is not finished: vLLM returns routing with the finished output only")
    return completion


def _field(
    name: str, completion: Completion, *, token_count: int, model: ModelShape | None, start: int, head: int | None
) -> FieldData | None:
    """One field in rows of tokens (dense) or completion tokens (ragged); None if the engine did not return it."""
    if name == "routed_experts":
        rows = getattr(completion, "routed_experts", None)
        routing = decode_routed_experts(rows, start=start, token_count=token_count, model=model)
        return None if routing is None else _dense(routing, token_count)
    if name == "top_logprobs":
        return None if completion.logprobs is None else _heads(completion, head)
    if name == "sampling_mask":
        mask = getattr(completion, "sampling_mask", None)
        return decode_sampling_mask(mask, token_ids=completion.token_ids, vocab_count=model.vocab_count if model else 1 << 31)
    raise WireError(f"field {name!r}: a RequestOutput holds {', '.join(_KNOWN)} only; put other fields into the payload yourself")


def _dense(routing: Routing, token_count: int) -> Dense:
    """Rows [T, L, K] from rows [R, L, K]; what the engine did not send is missing."""
    rows = np.zeros((token_count, *routing.rows.shape[1:]), routing.rows.dtype)
    stop = min(routing.start + len(routing.rows), token_count)
    rows[routing.start : stop] = routing.rows[: stop - routing.start]
    gaps = ((0, routing.start), (stop, token_count))
    return Dense(rows, tuple(TokenRange(a, b) for a, b in gaps if a < b))


def _heads(completion: Completion, head: int | None) -> Ragged:
    """Counts [C] and entries [N] from one mapping of token id to an object with ``logprob`` per completion token."""
    if len(completion.logprobs) != len(completion.token_ids):
        raise WireError(f"logprobs: {len(completion.logprobs)} entries found for {len(completion.token_ids)} completion tokens")
    counts: list[int] = []
    ids: list[int] = []
    values: list[float] = []
    for n, entry in enumerate(completion.logprobs):
        if not isinstance(entry, Mapping) or int(completion.token_ids[n]) not in entry:
            raise WireError(f"logprobs[{n}]: a mapping that holds the sampled token {int(completion.token_ids[n])} expected")
        counts.append(len(entry))
        ids += entry.keys()
        values += [float(e.logprob) for e in entry.values()]
    return top_logprobs_of(np.asarray(counts, np.int64), np.asarray(ids, np.int64), np.asarray(values, np.float32), head=head)


def _behind(rows: Ragged, prompt_count: int) -> Ragged:
    """Rows [C] of completion tokens as rows [T] of all tokens: the prompt was not sampled here, so its rows are empty."""
    counts: NDArray[np.int32] = np.concatenate([np.zeros(prompt_count, np.int32), rows.counts])
    missing = tuple(TokenRange(r.start + prompt_count, r.stop + prompt_count) for r in rows.missing)
    front = {n: np.concatenate([np.zeros(prompt_count, c.dtype), c]) for n, c in rows.row_columns.items()}
    return Ragged(counts, rows.columns, missing, front)
