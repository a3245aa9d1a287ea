"""The sample: one trainable branch of a trace, as the orchestrator sees it.

Pure. Owns the noun and its checks: the token-id hash before truncation, truncation on the reference, and the fields that the run needs.
Refuses arrays; what it says about them comes from the reference alone.

Shape letter: T tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from fsref.errors import MissingArrays, PayloadError
from fsref.plan import missing_ranges, present_fields
from fsref.refs import Alignment, Field, PayloadRef, Schema, TokenRange, flags_of, ranges_where, token_hash

MissingPolicy = Literal["strict", "fallback"]

_FIXES: Final = {
    "routed_experts": "start inference with routed experts returned (vLLM: --enable-return-routed-experts)",
    "top_logprobs": "set sampling.top_logprobs above 0 (vLLM: --max-logprobs at least 2 more)",
    "sampling_mask": "start inference with sampling masks returned (vLLM: --return-sampling-mask) and set sampling.top_k above 0",
}


@dataclass(frozen=True, eq=False)
class Sample:
    """One branch. Token arrays are [T]; T may exceed the reference's tokens, the rows beyond it are missing."""

    name: str
    """``<trace>/<branch>``, for people, error messages and step files."""
    group: int
    """Which group of episodes it belongs to; rewards are compared within."""
    agent: str
    """Who sampled it; rewards of different agents are not compared."""
    trace: str
    """Its trace: several branches share one reward."""
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    """True where the token was sampled and trains; shared sampled tokens are True in one branch only."""
    logprobs: NDArray[np.float32]
    """The sampler's; 0 where the token was not sampled."""
    ref: PayloadRef | None
    reward: float
    version: int
    """The oldest weights that may have sampled it."""
    temperature: float
    advantage: float = 0.0

    def __post_init__(self) -> None:
        shapes = {self.token_ids.shape, self.loss_mask.shape, self.logprobs.shape}
        if len(shapes) != 1 or self.token_ids.ndim != 1:
            raise PayloadError(f"sample {self.name}: token ids, loss mask and logprobs must be [T] alike, found {sorted(shapes)}")

    @property
    def token_count(self) -> int:
        return len(self.token_ids)

    @property
    def trains(self) -> bool:
        """Whether any token trains."""
        return bool(self.loss_mask.any())

    @property
    def objects(self) -> dict[str, int]:
        """The objects that its reference names: id to bytes."""
        return {segment.object_id: segment.byte_count for segment in self.ref.segments} if self.ref else {}

    def truncated(self, token_count: int) -> "Sample":
        """The first ``token_count`` tokens (all, if there are no more); the object stays whole, the reference keeps fewer."""
        if token_count >= self.token_count:
            return self
        ref = self.ref
        return replace(
            self,
            token_ids=self.token_ids[:token_count],
            loss_mask=self.loss_mask[:token_count],
            logprobs=self.logprobs[:token_count],
            ref=ref and ref.truncated(min(ref.token_count, token_count)),
        )


def check_hash(sample: Sample) -> None:
    """Raises ``PayloadError`` unless the sample's first tokens are the ones that its arrays were stored for.

    Call it before any truncation. Tokens after the stored ones are no difference: their rows are missing.
    """
    ref = sample.ref
    if ref is None:
        return
    if sample.token_count < ref.hashed_count:
        raise PayloadError(
            f"sample {sample.name}: it has {sample.token_count} tokens, its arrays were stored for {ref.hashed_count}:"
            " truncate after the check, in the orchestrator, and nowhere before"
        )
    found = token_hash(sample.token_ids[: ref.hashed_count])
    if found != ref.token_hash:
        raise PayloadError(
            f"sample {sample.name}: the hash of its first {ref.hashed_count} token ids is {found.hex()}, its arrays were stored for"
            f" {ref.token_hash.hex()}: something re-tokenised the text after it was sampled; train on the sampled token ids"
        )


def is_routed(ref: PayloadRef | None, schema: Schema) -> bool:
    """Whether the reference holds expert ids to replay."""
    return ref is not None and any(schema.field(name).expert_count for name in present_fields(ref, schema))


def needed_rows(field: Field, loss_mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """[T]: the rows of a field that the loss of the trained tokens rests on.

    Target rows: the trained tokens' own. Input rows: those of the token before each, whose forward gives the trained token's
    distribution; so the last sampled token, which no engine feeds, needs none.
    """
    if field.alignment is Alignment.TARGET:
        return loss_mask
    rows = np.zeros_like(loss_mask)
    rows[:-1] = loss_mask[1:]
    return rows


def missing_rows(sample: Sample, field: Field, schema: Schema) -> tuple[TokenRange, ...]:
    """Needed rows of one field that the sample's reference does not hold."""
    ref = sample.ref
    needed = needed_rows(field, sample.loss_mask)
    if ref is None or field.name not in present_fields(ref, schema):
        return ranges_where(needed)
    holes = flags_of(missing_ranges(ref, schema).get(field.name, ()), sample.token_count)
    holes[ref.token_count :] = True
    return ranges_where(needed & holes)


def check_fields(sample: Sample, schema: Schema, *, fields: Iterable[str], missing: MissingPolicy) -> bool:
    """Whether every needed row of every field in ``fields`` is there.

    A field may be absent as a whole or lack rows. Under ``strict`` either raises ``MissingArrays``, which names the sample, the field
    and the fix; under ``fallback`` the answer is False and the sample trains with what it has.
    """
    complete = True
    present = present_fields(sample.ref, schema) if sample.ref else ()
    for name in fields:
        holes = missing_rows(sample, schema.field(name), schema)
        if not holes:
            continue
        if missing == "strict":
            raise MissingArrays(_lack(sample, name, present, holes))
        complete = False
    return complete


def _lack(sample: Sample, name: str, present: tuple[str, ...], holes: tuple[TokenRange, ...]) -> str:
    way_out = f"or take {name!r} out of run.fields"
    if name in present:
        shown = ", ".join(f"[{h.start}, {h.stop})" for h in holes[:4]) + (", ..." if len(holes) > 4 else "")
        return (
            f"sample {sample.name}: run.fields needs {name!r}, its rows of tokens {shown} are missing:"
            f" set run.missing = 'fallback' to train with holes, {way_out}"
        )
    found = f"its reference holds {', '.join(present) or 'no field'}" if sample.ref else "it came without a reference"
    fix = _FIXES.get(name, f"make inference return {name!r} and declare it under [[field]]")
    return f"sample {sample.name}: run.fields needs {name!r}, {found}: {fix}, {way_out}"
