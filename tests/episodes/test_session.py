"""The session that travels in front of a request's payload."""

import msgpack
import pytest

from fsref.episodes.session import ACKS_MAX, Hello, control, read_hello, with_hello
from fsref.errors import ConfigError

ORC, EVL = "orc.main.0123456789abcdef", "evl.main.0123456789abcdef"


def test_a_payload_with_a_session_is_read_without_its_rest() -> None:
    packed = msgpack.packb(with_hello({"task_data": {"x": list(range(1000))}}, Hello(session=ORC, acks=("a", "b"))))
    assert read_hello(packed) == Hello(session=ORC, acks=("a", "b"))
    assert read_hello(control(EVL, ["q"])) == Hello(session=EVL, acks=("q",))
    assert (Hello(session=ORC).owns_workers, Hello(session=EVL).owns_workers) == (True, False)


@pytest.mark.parametrize(
    "payload", [b"", b"\xff\xff", msgpack.packb({}), msgpack.packb({"task_data": 1}), msgpack.packb([1]), msgpack.packb(1)]
)
def test_a_payload_without_one_has_none(payload: bytes) -> None:
    assert read_hello(payload) is None


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"v": 2, "session": ORC}, "session format 2; this env server reads 1"),
        ({"session": ORC}, "session format None"),
        ("orc", "session format None"),
        ({"v": 1}, "cannot be read"),
        ({"v": 1, "session": "../../etc"}, "cannot be read"),
        ({"v": 1, "session": ORC, "more": 1}, "cannot be read"),
        ({"v": 1, "session": ORC, "acks": ["q"] * (ACKS_MAX + 1)}, "at most 1000"),
    ],
)
def test_another_version_or_form_is_refused(found: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_hello(msgpack.packb({"fsref": found}))
