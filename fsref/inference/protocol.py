"""The JSON of ``POST /inference/v1/generate``, parsed and checked, and the reply in vLLM 0.32's native form.

Owns what of vLLM's request is understood. A parameter that would change the distribution and is not implemented is refused by name;
one that only concerns text or transport is accepted and has no effect. Bounds and messages follow vLLM where it has them.
"""

import time
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from fsref.inference.engine import Completion, Request
from fsref.inference.sampling import Sampling
from fsref.wire.logprobs import encode_content
from fsref.wire.masks import encode_sampling_mask
from fsref.wire.openfields import encode_open_field
from fsref.wire.routing import encode_routed_experts

CHOICES_MAX: Final = 64
TOKENS_DEFAULT: Final = 16
"""vLLM's own default of ``max_tokens``."""

TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]


class BadRequest(ValueError):
    """The request is refused with status 400 (or ``status``). Stays within this role, which answers with it."""

    status = 400
    kind = "BadRequestError"


class NoSuchModel(BadRequest):
    """Another model was asked for than the one that is served."""

    status = 404
    kind = "NotFoundError"


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's ``sampling_params``, the part that is understood."""

    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] = 1
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    """0 and -1: off."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    max_tokens: Annotated[int, Meta(ge=1)] | None = TOKENS_DEFAULT
    seed: int | None = None
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    routed_experts_prompt_start: int = 0

    # Neutral values only: these would change the distribution.
    presence_penalty: float | None = 0
    frequency_penalty: float | None = 0
    repetition_penalty: float | None = 1
    min_tokens: int | None = 0
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, Any] | None = None

    # Of text and transport: no effect here.
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    include_stop_str_in_output: Any = None
    detokenize: Any = None
    output_kind: Any = None
    extra_args: Any = None
    reasoning_effort: Any = None

    def unsupported(self) -> str:
        """The name of a parameter that has another than its neutral value; empty if there is none."""
        neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_tokens": 0}
        for name, value in neutral.items():
            if getattr(self, name) not in (None, value):
                return name
        others = ("stop", "logit_bias", "bad_words", "allowed_token_ids", "prompt_logprobs", "structured_outputs")
        return next((name for name in others if getattr(self, name)), "")


class GenerateRequest(msgspec.Struct, frozen=True):
    """The request body; other keys have no effect."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    sampling_params: SamplingParams
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = False
    features: dict[str, Any] | None = None
    content_parts: list[Any] | None = None


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the served model allows."""

    model: str
    context_max: int
    vocab_count: int
    logprobs_max: int
    eos_token_id: int | None
    routing_weights: bool = False
    """Send the experts' weights beside their ids, in the form of an open field (``fsref.wire.openfields``)."""


def parse_generate(body: bytes, limits: Limits) -> GenerateRequest:
    """The request in ``body``; raises ``BadRequest`` with a message for the caller."""
    try:
        request = msgspec.json.decode(body, type=GenerateRequest)
    except (msgspec.ValidationError, msgspec.DecodeError) as e:
        raise BadRequest(str(e)) from e
    if request.model is not None and request.model != limits.model:
        raise NoSuchModel(f"The model `{request.model}` does not exist; this server has `{limits.model}`.")
    if request.stream or request.features or request.content_parts:
        raise BadRequest("stream, features and content_parts are not supported by the demo server")
    params, prompt_count = request.sampling_params, len(request.token_ids)
    if name := params.unsupported():
        raise BadRequest(f"sampling_params.{name} = {getattr(params, name)!r} is not supported by the demo server")
    if prompt_count >= limits.context_max:
        raise BadRequest(f"The prompt has {prompt_count} tokens; prompt and completion together have at most {limits.context_max}.")
    if max(request.token_ids) >= limits.vocab_count:
        raise BadRequest(f"Token id {max(request.token_ids)} is out of vocabulary ({limits.vocab_count} tokens).")
    if not 0 <= params.routed_experts_prompt_start <= prompt_count:
        raise BadRequest(
            f"routed_experts_prompt_start {params.routed_experts_prompt_start} is not in 0..{prompt_count}, the length of the prompt"
        )
    if params.logprobs is not None and params.logprobs > limits.logprobs_max:
        raise BadRequest(f"Requested sample logprobs of {params.logprobs}, which is greater than max allowed: {limits.logprobs_max}")
    return request


def engine_requests(request: GenerateRequest, limits: Limits, *, seed: int) -> list[Request]:
    """One engine request per choice; choice i draws by ``seed + i`` (the request's own seed if it has one)."""
    params = request.sampling_params
    room = limits.context_max - len(request.token_ids)
    stop_ids = set(params.stop_token_ids or ())
    if limits.eos_token_id is not None and not params.ignore_eos:
        stop_ids.add(limits.eos_token_id)
    sampling = Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        head=params.logprobs,
    )
    first = seed if params.seed is None else params.seed
    return [
        Request(
            prompt=tuple(request.token_ids),
            sampling=sampling,
            tokens_max=min(params.max_tokens or room, room),
            stop_ids=frozenset(stop_ids),
            seed=first + i,
            start=params.routed_experts_prompt_start,
        )
        for i in range(params.n)
    ]


def reply(request_id: str, limits: Limits, prompt_count: int, completions: list[Completion]) -> bytes:
    """The reply body for all choices."""
    tokens = sum(len(c.token_ids) for c in completions)
    body = {
        "request_id": request_id,
        "model": limits.model,
        "created": int(time.time()),
        "choices": [_choice(i, c, limits) for i, c in enumerate(completions)],
        "usage": {"prompt_tokens": prompt_count, "completion_tokens": tokens, "total_tokens": prompt_count + tokens},
        "prompt_logprobs": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }
    return msgspec.json.encode(body)


def _choice(index: int, completion: Completion, limits: Limits) -> dict[str, Any]:
    ids = completion.token_ids.tolist()
    content = None
    if completion.heads is not None:
        content = encode_content(token_ids=ids, logprobs=completion.logprobs, heads=completion.heads, ranks=completion.ranks.tolist())
    open_fields = {"routing_weights": encode_open_field(completion.route_weights)} if limits.routing_weights else {}
    return {
        **open_fields,
        "index": index,
        "token_ids": ids,
        "finish_reason": completion.finish_reason,
        "logprobs": None if content is None else {"content": content},
        "routed_experts": encode_routed_experts(completion.routes),
        "sampling_mask": None if completion.mask is None else encode_sampling_mask(completion.mask),
        "weight_versions": [{"version": v.version, "start": v.start, "end": v.stop} for v in completion.versions],
    }


def error_body(message: str, kind: str, status: int) -> bytes:
    """vLLM's JSON error body."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})
