"""The demo's reward."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("verifiers")

from fsref.envserver.demo_tasks import DemoData, DemoTask, share_of


@pytest.mark.parametrize(
    ("text", "kind", "share"), [("aeb1", "vowels", 0.5), ("", "vowels", 0.0), ("abc", "letters", 1.0), ("a1?", "digits", 1 / 3)]
)
def test_the_share_of_characters_of_a_kind(text: str, kind: str, share: float) -> None:
    assert share_of(text, kind) == pytest.approx(share)


def test_every_reply_counts_alike_and_reasoning_is_a_part_of_it() -> None:
    replies = [SimpleNamespace(content="ab", reasoning_content=None), SimpleNamespace(content=None, reasoning_content="e")]
    trace = SimpleNamespace(assistant_messages=replies)
    assert asyncio.run(DemoTask(DemoData(prompt="x")).share(trace)) == 0.75


def test_a_trace_without_replies_scores_zero() -> None:
    assert asyncio.run(DemoTask(DemoData(prompt="x")).share(SimpleNamespace(assistant_messages=[]))) == 0.0
