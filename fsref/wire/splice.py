"""Routing inside a reply's JSON text, without parsing the text: a parser would copy megabytes of base64 under the GIL.

Owns where the texts are. Refuses to decode them. It works on compact JSON, as vLLM writes it; in other spelling nothing is found, and the
parser behind it sees the reply as it came.
"""

from collections.abc import Callable
from typing import Final

_ROUTING_TEXT: Final = b'"routed_experts":"'
"""Inside a JSON string its quotes would be escaped, so it cannot be met there; base64 has no quotes."""


def splice_routing(raw: bytes) -> tuple[bytes, list[memoryview]]:
    """``raw`` with every ``routed_experts`` text made empty, and those texts in order, as views into ``raw``."""
    rest: list[bytes] = []
    texts: list[memoryview] = []
    at = 0
    for start, stop in _spans(raw):
        rest.append(raw[at:start])
        texts.append(memoryview(raw)[start:stop])
        at = stop
    return b"".join([*rest, raw[at:]]), texts


def replace_routing(raw: bytes, convert: Callable[[memoryview], bytes]) -> bytes:
    """``raw`` with the value of every ``routed_experts``, quotes included, in the JSON form that ``convert`` makes of its text."""
    out: list[bytes] = []
    at = 0
    for start, stop in _spans(raw):
        out += (raw[at : start - 1], convert(memoryview(raw)[start:stop]))
        at = stop + 1
    return b"".join([*out, raw[at:]])


def _spans(raw: bytes) -> list[tuple[int, int]]:
    """Where the texts are, without their quotes. One that is cut short is left to the parser, which says so."""
    out: list[tuple[int, int]] = []
    at = 0
    while (found := raw.find(_ROUTING_TEXT, at)) >= 0:
        start = found + len(_ROUTING_TEXT)
        at = raw.find(b'"', start)
        if at < 0:
            break
        out.append((start, at))
    return out
