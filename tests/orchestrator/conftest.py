"""Samples and references with values that a test can write down."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from fsref.orchestrator.samples import Sample
from fsref.plan import Layout, encode_index, encode_missing
from fsref.refs import PayloadRef, Schema, Segment, TokenRange, routed_experts, sampling_mask, token_hash, top_logprobs

INC = "env.math-0-0.0123456789abcdef"


@dataclass
class Maker:
    """Makes references (a new object each, unless told) and samples around them."""

    schema: Schema
    seq: "itertools.count[int]" = field(default_factory=itertools.count)

    def ref(
        self,
        token_ids: Sequence[int],
        *,
        fields: Sequence[str] = ("routed_experts", "top_logprobs", "sampling_mask"),
        missing: dict[str, tuple[TokenRange, ...]] | None = None,
        object_id: str = "",
        byte_count: int = 100_000,
        stats: tuple[tuple[int, int], ...] = (),
    ) -> PayloadRef:
        present = tuple(f.name for f in self.schema.fields if f.name in fields)
        count = len(token_ids)
        ragged = {f.name: [0] for f in self.schema.fields if f.ragged and f.name in present}
        layout = Layout(self.schema, present, count, ragged)
        segment = Segment(
            object_id=object_id or f"{INC}/{next(self.seq)}",
            byte_count=byte_count,
            row_start=0,
            row_stop=count,
            token_start=0,
            index=encode_index(layout, [16] * len(layout.chunks)),
        )
        return PayloadRef(
            schema_hash=self.schema.hash,
            token_count=count,
            token_hash=token_hash(token_ids),
            hashed_count=count,
            segments=(segment,),
            missing=encode_missing(missing or {}, self.schema),
            stats=stats,
        )

    def sample(
        self,
        name: str = "t0/0",
        *,
        token_ids: Sequence[int] = (5, 6, 7, 8),
        trained: Sequence[int] = (2, 3),
        ref: PayloadRef | str | None = "own",
        group: int = 0,
        reward: float = 0.0,
        version: int = 0,
        agent: str = "solver",
    ) -> Sample:
        mask = np.zeros(len(token_ids), np.bool_)
        mask[list(trained)] = True
        return Sample(
            name=name,
            group=group,
            agent=agent,
            trace=name.split("/", maxsplit=1)[0],
            token_ids=np.array(token_ids, np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, np.float32(-0.5), np.float32(0)),
            ref=self.ref(token_ids) if isinstance(ref, str) else ref,
            reward=reward,
            version=version,
            temperature=1.0,
        )


@pytest.fixture(scope="session")
def schema() -> Schema:
    return Schema((routed_experts(layer_ids=[0, 1], top_k=2, expert_count=8), top_logprobs(), sampling_mask()))


@pytest.fixture(scope="session")
def make(schema: Schema) -> Maker:
    return Maker(schema)
