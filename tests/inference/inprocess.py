"""Drives vLLM in this process, stores what it returns, reads it back. usage: inprocess.py MODEL ROOT OUTCOME.json

This is the whole of a use without HTTP: an engine, ``payload_from_output``, a writer, a reader.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from vllm import LLM, SamplingParams

from fsref.reader import Reader
from fsref.refs import Dense, Ragged, Schema, routed_experts, top_logprobs
from fsref.store import open_root
from fsref.wire.modelconfig import read_model_shape
from fsref.wire.outputs import payload_from_output
from fsref.writer import Receipts, Writer

HEAD = 8


def main(folder: Path, root: str, outcome: Path) -> None:
    model = read_model_shape(folder)
    schema = Schema((routed_experts(layer_ids=model.layer_ids, top_k=model.top_k, expert_count=model.expert_count), top_logprobs()))
    llm = LLM(
        model=str(folder),
        enable_return_routed_experts=True,
        logprobs_mode="processed_logprobs",
        max_logprobs=HEAD + 2,
        max_model_len=256,
        dtype="float32",
        enforce_eager=True,
        generation_config="vllm",
    )
    prompts: list[Any] = [{"prompt_token_ids": [(11 * n + 5) % 300 for n in range(20)]}] * 2
    sampling = [
        SamplingParams(n=2, max_tokens=10, ignore_eos=True, logprobs=HEAD + 2, seed=1),
        SamplingParams(max_tokens=20, ignore_eos=True, logprobs=HEAD + 2, seed=2),
    ]
    outputs = llm.generate(prompts, sampling)
    payloads = [payload_from_output(o, n, schema=schema, model=model, head=HEAD) for o in outputs for n in range(len(o.outputs))]
    equal = missing = heads = 0
    with open_root(root, run="inprocess", create=True) as store, Reader(store, schema) as reader:
        writer = Writer(store, schema, Receipts("engine-0"))
        for payload in payloads:
            fields = reader.read(writer.put(payload))
            routing, head = fields["routed_experts"], fields["top_logprobs"]
            assert isinstance(routing, Dense)
            assert isinstance(head, Ragged)
            (fresh,) = llm.generate([{"prompt_token_ids": payload.token_ids.tolist()}], SamplingParams(max_tokens=1))
            whole = np.sort(fresh.outputs[0].routed_experts, axis=-1)
            stored = len(payload.token_ids) - 1
            equal += int((np.sort(routing.rows[:stored], axis=-1) == whole[:stored]).all(axis=(1, 2)).sum())
            missing += sum(r.stop - r.start for r in routing.missing)
            heads += int(head.counts.sum())
    tokens = [len(p.token_ids) for p in payloads]
    found = {"completions": len(payloads), "tokens": tokens, "rows_equal": equal, "rows_missing": missing, "heads": heads}
    outcome.write_text(json.dumps(found))  # vLLM writes to stdout, also after the end


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
