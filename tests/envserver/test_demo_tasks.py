"""The demo's reward."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("verifiers", reason="needs verifiers: install the extra of that name")

from fsref.envserver.demo_tasks import DemoData, DemoTask, share_of


@pytest.mark.parametrize(
    ("text", "kind", "share"),
    [
        ("", "vowels", 0.0),
        ("aeiou", "vowels", 1.0),
        ("aaaaa", "vowels", 0.2),
        ("ax", "vowels", 0.2),
        ("aexxxxxxxx", "vowels", 0.2),
        ("xyz", "digits", 0.0),
    ],
)
def test_each_character_of_a_kind_counts_up_to_its_even_part(text: str, kind: str, share: float) -> None:
    assert share_of(text, kind) == pytest.approx(share)


def test_every_reply_counts_alike_and_reasoning_is_a_part_of_it() -> None:
    replies = [SimpleNamespace(content="aeiou", reasoning_content=None), SimpleNamespace(content=None, reasoning_content="e")]
    trace = SimpleNamespace(assistant_messages=replies)
    assert asyncio.run(DemoTask(DemoData(prompt="x")).share(trace)) == pytest.approx(0.6)


def test_a_trace_without_replies_scores_zero() -> None:
    assert asyncio.run(DemoTask(DemoData(prompt="x")).share(SimpleNamespace(assistant_messages=[]))) == 0.0
