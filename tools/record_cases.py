"""Records what a real vLLM answers: the golden files under tests/wire/cases, each ``{"request", "response"}``.

    FSREF_VLLM_PYTHON=/path/to/python python -m tools.record_cases [FOLDER]     # default: tests/wire/cases

Makes the tiny model, starts vLLM as the inference role does, asks, stops it: about a minute. Look at the differences before committing:
values follow from the model and the machine's rounding, forms must not change unnoticed.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from fsref.inference.model import make_model
from tests.inference.vllm import PYTHON, serve_vllm

CASES = Path(__file__).resolve().parent.parent / "tests" / "wire" / "cases"
PROMPT = [(37 * n + 11) % 512 for n in range(24)]
LONG = [(37 * n + 11) % 300 for n in range(140)]
"""Longer than a block of vLLM's cache, which is 128 tokens on a CPU."""
SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 7, "ignore_eos": True, "logprobs": 1}
FINAL_ONLY = 2
"""vLLM's RequestOutputKind: without it a request with n > 1 loses choices that end at another time than the last."""


class Recorder:
    """Asks and writes."""

    def __init__(self, client: httpx.Client, folder: Path) -> None:
        self.client, self.folder = client, folder
        folder.mkdir(parents=True, exist_ok=True)

    def record(self, name: str, token_ids: list[int], **params: Any) -> list[int]:
        """Writes one case and returns the first choice's completion."""
        request = {"model": "policy", "token_ids": token_ids, "sampling_params": {**SAMPLING, **params}}
        reply = self.client.post("/inference/v1/generate", json=request)
        reply.raise_for_status()
        response = reply.json()
        response.update(request_id=name, created=0)
        (self.folder / f"{name}.json").write_text(json.dumps({"request": request, "response": response}, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {[len(c['token_ids']) for c in response['choices']]} tokens")
        completion: list[int] = response["choices"][0]["token_ids"]
        return completion

    def record_all(self) -> None:
        """Every case; later ones build on earlier completions."""
        first = self.record("single_turn", PROMPT, max_tokens=8)
        self.record("one_token", PROMPT, max_tokens=1)
        self.record("two_choices", PROMPT, max_tokens=4, n=2, output_kind=FINAL_ONLY)
        self.record("top_logprobs_8", PROMPT, max_tokens=6, logprobs=8)
        self.record("greedy", PROMPT, max_tokens=4, temperature=0.0)
        self.record("stopped_by_a_token", PROMPT, max_tokens=64, ignore_eos=False, stop_token_ids=list(range(60)))
        self.record("without_logprobs", PROMPT, max_tokens=3, logprobs=None)
        second = [*PROMPT, *first, 31, 32, 33, 34]
        self.record("second_turn_bridged_start", second, max_tokens=6, routed_experts_prompt_start=len(PROMPT) + len(first) - 1)
        self.record("second_turn_full_rows", second, max_tokens=6)
        self.record("start_at_the_last_prompt_token", PROMPT, max_tokens=3, routed_experts_prompt_start=len(PROMPT) - 1)
        self.record("cold_prefix", LONG, max_tokens=2)
        self.record("cached_prefix", LONG, max_tokens=2)


def main(folder: Path) -> int:
    if not PYTHON:
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory() as text:
        root = Path(text)
        make_model(root / "model", seed=0)
        with serve_vllm(root, root / "model") as running:
            Recorder(running.client, folder).record_all()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else CASES))
