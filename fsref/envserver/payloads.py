"""A branch's payload from what its turns carried, and the contract of the needed fields.

Owns the rule which missing rows matter. Pure: no verifiers, no store.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from fsref.envserver.capture import Capture
from fsref.episodes.branches import Branch
from fsref.errors import MissingArrays
from fsref.refs import Alignment, Field, Payload, Schema, flags_of, ranges_where

MissingPolicy = Literal["strict", "fallback"]

_FIXES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "routed_experts": "start inference so that it returns routed experts (vLLM: --enable-return-routed-experts)",
        "top_logprobs": "set sampling.top_logprobs above 0 (vLLM: --max-logprobs at least 2 more)",
        "sampling_mask": "start inference so that it returns sampling masks (vLLM: --return-sampling-mask) and set sampling.top_k above 0",
    }
)


def branch_payload(capture: Capture, branch: Branch, *, schema: Schema, needed: tuple[str, ...], missing: MissingPolicy) -> Payload:
    """The payload of ``branch``; fields that the schema does not name are left out. Values are checked when it is put.

    A needed field that inference sent nothing of is among the payload's ``absent`` ones. With ``strict`` that, or a lack of rows that
    training uses, raises ``MissingArrays``, which names the branch, the field and what to do.
    """
    found = capture.fields(branch.trace_id, token_ids=branch.token_ids, sampled=branch.sampled)
    names = {f.name for f in schema.fields}
    payload = Payload(branch.token_ids, {n: d for n, d in found.items() if n in names}, tuple(n for n in needed if n not in found))
    for name in needed:
        _check_needed(payload, branch, schema.field(name), missing)
    return payload


def _check_needed(payload: Payload, branch: Branch, field: Field, missing: MissingPolicy) -> None:
    fix = _FIXES.get(field.name, f"make inference return it, or take {field.name!r} out of run.fields")
    data = payload.fields.get(field.name)
    lacking = flags_of(data.missing, payload.token_count) if data is not None else np.ones(payload.token_count, np.bool_)
    if missing == "strict" and lacking.all():
        raise MissingArrays(
            f"branch {branch.name}: field {field.name!r} is in run.fields, and inference sent none of it; {fix}, "
            'or set run.missing = "fallback" to train without it'
        )
    lacking &= _used(field.alignment, branch.sampled)
    if missing == "strict" and lacking.any():
        first = ranges_where(lacking)[0]
        raise MissingArrays(
            f"branch {branch.name}: field {field.name!r} lacks {int(lacking.sum())} of {lacking.size} rows that training uses, "
            f'first [{first.start}, {first.stop}); {fix}, or set run.missing = "fallback" to train without them'
        )


def _used(alignment: Alignment, sampled: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which rows training reads: for the input, every token that is fed to predict a sampled one; for the target, the sampled ones."""
    if alignment is Alignment.TARGET:
        return sampled
    last = int(np.flatnonzero(sampled)[-1]) if sampled.any() else 0
    return np.arange(len(sampled)) < last
