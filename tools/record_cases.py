"""Records the replies of a running vLLM that the tests under ``tests/wire/cases`` are checked against.

usage: record_cases.py URL FOLDER

URL is a server of the tiny model (``inference.kind = "vllm"``); FOLDER gets one JSON file per case, ``{"request", "response"}``.
Look at the differences before committing: values follow from the model, forms must not change unnoticed.
"""

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

PROMPT = [(37 * n + 11) % 512 for n in range(24)]
SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 7, "ignore_eos": True, "logprobs": 1}


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(f"{url}/inference/v1/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=120) as reply:
        return json.load(reply)


def record(url: str, folder: Path, name: str, token_ids: list[int], **params: Any) -> list[int]:
    """Writes one case and returns the first choice's completion."""
    request = {"model": "policy", "token_ids": token_ids, "sampling_params": {**SAMPLING, **params}}
    response = post(url, request)
    (folder / f"{name}.json").write_text(json.dumps({"request": request, "response": response}, indent=1) + "\n", encoding="utf-8")
    completion: list[int] = response["choices"][0]["token_ids"]
    print(f"{name}: {len(completion)} tokens")
    return completion


def main(url: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    first = record(url, folder, "single_turn", PROMPT, max_tokens=8)
    record(url, folder, "one_token", PROMPT, max_tokens=1)
    record(url, folder, "two_choices", PROMPT, max_tokens=4, n=2)
    record(url, folder, "top_logprobs_8", PROMPT, max_tokens=6, logprobs=8)
    second = [*PROMPT, *first, 31, 32, 33, 34]
    record(url, folder, "second_turn_bridged_start", second, max_tokens=6, routed_experts_prompt_start=len(PROMPT) + len(first) - 1)
    record(url, folder, "second_turn_full_rows", second, max_tokens=6)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1].rstrip("/"), Path(sys.argv[2]))
