"""The driver's figures of arrays come from what references carry; no array is read for them."""

from pathlib import Path

import numpy as np
import pytest

from fsref.orchestrator.metrics import support_sizes
from fsref.orchestrator.samples import Sample
from fsref.refs import Payload, PayloadRef, Ragged, Schema, sampling_mask, top_logprobs
from fsref.store import open_root
from fsref.writer import Receipts, Writer

SCHEMA = Schema((sampling_mask(), top_logprobs()))


def sample(ref: PayloadRef | None, tokens: int) -> Sample:
    return Sample(
        name="t/0", group=0, agent="a", trace="t", token_ids=np.arange(tokens, dtype=np.int32), loss_mask=np.ones(tokens, np.bool_),
        logprobs=np.zeros(tokens, np.float32), ref=ref, reward=0.0, version=0, temperature=1.0,
    )  # fmt: skip


@pytest.mark.payload("G4")
def test_the_mean_size_of_kept_sets_and_heads_needs_references_only(tmp_path: Path) -> None:
    rng, kept, heads, samples = np.random.default_rng(0), [], [], [sample(None, 3)]
    with open_root(str(tmp_path), run="run", create=True) as store:
        writer = Writer(store, SCHEMA, Receipts("env"), durability="process")
        for tokens in (5, 64, 300):
            counts, k = rng.integers(0, 9, tokens).astype(np.int32), np.full(tokens, 4, np.int32)
            kept.append(counts)
            heads.append(k)
            mask = Ragged(counts, {"ids": rng.integers(0, 99, counts.sum())})
            head = Ragged(k, {"ids": rng.integers(0, 99, k.sum()), "logprobs": rng.random(k.sum(), np.float32)})
            ref = writer.put(Payload(np.arange(tokens), {"sampling_mask": mask, "top_logprobs": head}))
            samples.append(sample(ref, tokens))
        for path in (tmp_path / "run" / "obj").rglob("*.zip"):
            path.unlink()
    every = np.concatenate(kept)
    assert support_sizes(samples, SCHEMA) == {"sampling_support/size": pytest.approx(every[every > 0].mean()), "top_logprobs/size": 4.0}
