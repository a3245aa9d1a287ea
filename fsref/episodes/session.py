"""What an orchestrator tells env servers about itself, and how it travels: one small map, the first entry of a request's payload.

A session is the incarnation of the orchestrator (or eval command) behind a connection. Runs carry it, because an env worker keeps
objects for one orchestrator at a time; health checks carry it too, so that every worker hears of a new one before its first run, and with
it the ids of requests whose replies were taken. verifiers' own servers read payloads by name and never look at it.

Owns the form, its version and its bounds. Refuses to know verifiers and the ledger.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

import msgpack
import msgspec

from fsref.errors import BadRef, ConfigError
from fsref.refs import check_incarnation

KEY: Final = "fsref"
VERSION: Final = 1
ACKS_MAX: Final = 1000
"""Of one message; the rest goes with the next."""


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What travels."""

    v: int = VERSION
    session: str
    """Incarnation of the consumer: ``orc.main.<boot>`` or ``evl.main.<boot>``."""
    acks: tuple[str, ...] = ()
    """Requests whose objects the consumer has taken since its last message."""

    @property
    def owns_workers(self) -> bool:
        """Whether env workers keep one incarnation for this session; an eval command shares theirs."""
        return self.session.startswith("orc.")


def with_hello(payload: Mapping[str, Any], hello: Hello) -> dict[str, Any]:
    """A request's payload with the map in front, where it is found without reading the rest."""
    return {KEY: msgspec.to_builtins(hello), **payload}


def control(session: str, acks: Collection[str] = ()) -> bytes:
    """A payload that holds nothing else, as a broker sends it to its workers."""
    return msgpack.packb(with_hello({}, Hello(session=session, acks=tuple(acks))), use_bin_type=True)  # type: ignore[no-any-return]


def read_hello(payload: bytes) -> Hello | None:
    """The map of a request; None if there is none (a client of plain verifiers).

    Raises ``ConfigError`` for another version or form: client and server are of different versions of fsref.
    """
    unpacker = msgpack.Unpacker(raw=False, max_buffer_size=max(1, len(payload)))
    unpacker.feed(payload)
    try:
        if unpacker.read_map_header() < 1 or unpacker.unpack() != KEY:
            return None
        found = unpacker.unpack()
    except (ValueError, msgpack.UnpackException):
        return None  # verifiers answers what is no request
    version = found.get("v") if isinstance(found, dict) else None
    if version != VERSION:
        raise ConfigError(
            f"a request of a client with session format {version!r}; this env server reads {VERSION}: use one version of fsref"
        )
    try:
        hello = msgspec.convert(found, Hello)
        check_incarnation(hello.session)
    except (msgspec.ValidationError, BadRef) as e:
        raise ConfigError(f"a request's session cannot be read: {e}") from e
    if len(hello.acks) > ACKS_MAX:
        raise ConfigError(f"a request acknowledges {len(hello.acks)} others, at most {ACKS_MAX} are read")
    return hello
