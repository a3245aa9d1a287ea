"""The recorded replies by name."""

import json
from pathlib import Path
from typing import Any

from fsref.wire.modelconfig import ModelShape
from fsref.wire.reply import Choice, decode_choice

FOLDER = Path(__file__).parent / "cases"
NAMES = sorted(p.stem for p in FOLDER.glob("*.json"))
TINY = ModelShape(layer_ids=(0, 1, 2, 3), layer_count=4, top_k=4, expert_count=16, vocab_count=512)


def load(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def start_of(case: Any) -> int:
    return int(case["request"]["sampling_params"].get("routed_experts_prompt_start", 0))


def choices(name: str, *, head: int | None = None) -> list[Choice]:
    case = load(name)
    prompt_count = len(case["request"]["token_ids"])
    return [decode_choice(c, prompt_count=prompt_count, start=start_of(case), head=head, model=TINY) for c in case["response"]["choices"]]
