"""Which engine's form a whole reply has, told by its shape; a form that is not known is refused, never guessed."""

import enum
from collections.abc import Mapping
from typing import Any

from fsref.errors import WireError
from fsref.wire.modelconfig import ModelShape
from fsref.wire.reply import Choice, decode_choice
from fsref.wire.sglang import decode_sglang


class Form(enum.StrEnum):
    """The reply forms that are read."""

    VLLM_0_27 = "vLLM 0.27 generate (token 'token_id:N')"
    VLLM_0_32 = "vLLM 0.32 generate (integer token_id, sampling_mask)"
    PRIME_RL = "prime-rl generate (routed_experts as an object with data, shape, dtype, start)"
    SGLANG = "SGLang generate (output_ids and meta_info)"


def detect(reply: object) -> Form:
    """The form of a parsed reply. Raises ``WireError`` that says what was found, what is known and what to do."""
    if isinstance(reply, list) and reply:
        return detect(reply[0])
    if isinstance(reply, Mapping):
        if "output_ids" in reply and isinstance(reply.get("meta_info"), Mapping):
            return Form.SGLANG
        choices = reply.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) and "token_ids" in choices[0]:
            return _generate(choices[0])
    found = f"an object with {sorted(map(str, reply))[:12]}" if isinstance(reply, Mapping) else f"{type(reply).__name__} {reply!r:.60}"
    raise WireError(
        f"the engine's reply has no known form: {found} found; known are {'; '.join(Form)}. Ask the engine's token-level generate endpoint "
        "with its arrays switched on, or add the form to fsref.wire with a recorded reply"
    )


def _generate(choice: Mapping[str, Any]) -> Form:
    if isinstance(choice.get("routed_experts"), Mapping):
        return Form.PRIME_RL
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    first = content[0] if isinstance(content, list) and content and isinstance(content[0], Mapping) else {}
    named = isinstance(first.get("token"), str) and first["token"].startswith("token_id:") and "token_id" not in first
    return Form.VLLM_0_27 if named and choice.get("sampling_mask") is None else Form.VLLM_0_32


def decode_reply(reply: Any, *, prompt_count: int, start: int = 0, head: int | None = None, model: ModelShape) -> list[Choice]:
    """Every completion of a parsed reply, whatever its form, in the engine's order.

    Arguments are those of ``decode_choice``. Raises ``WireError``.
    """
    if detect(reply) is Form.SGLANG:
        replies = reply if isinstance(reply, list) else [reply]
        return [decode_sglang(r, prompt_count=prompt_count, start=start, head=head, model=model) for r in replies]
    return [decode_choice(c, prompt_count=prompt_count, start=start, head=head, model=model) for c in reply["choices"]]
