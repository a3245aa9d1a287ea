"""The records of a journal and the line that carries one: ``crc32(8 hex) SP compact-JSON LF`` (ledger.md section 3).

Owns the nine record types, encoding, decoding and the limits for hostile lines. Refuses files and clocks: ``ms`` is handed in, and
is for people only; nothing ever compares it.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta
from zlib_ng.zlib_ng import crc32

from fsref.errors import JournalCorrupt
from fsref.refs import BYTES_OBJECT_MAX, SEQ_MAX, TOKENS_MAX

VERSION: Final = 1
"""Format of the journal; a reader refuses a newer one."""
LINE_BYTES_MAX: Final = 64 << 10
PARTS_MAX: Final = 4096

Reason = str
ENV_REASONS: Final = frozenset({"never_sent", "abandoned", "encode_error"})
CONSUMER_REASONS: Final = frozenset({"filtered", "group_dropped", "untrained", "pruned", "stale", "late", "eval", "shutdown"})
STEP_REASONS: Final = frozenset({"trained", "fetch_failed"})
ADOPTER_REASONS: Final = frozenset({"orphan", "recovered", "unjournaled"})
REASONS: Final = ENV_REASONS | CONSUMER_REASONS | STEP_REASONS | ADOPTER_REASONS
MISS_CLASSES: Final = frozenset({"missing", "corrupt", "unavailable"})

Step = Annotated[int, Meta(ge=0, le=999_999_999)]
Seq = Annotated[int, Meta(ge=0, le=SEQ_MAX)]
Natural = Annotated[int, Meta(ge=0, le=(1 << 62))]
Unsigned = Annotated[int, Meta(ge=0)]
Part = tuple[Annotated[int, Meta(ge=1, le=PARTS_MAX)], Annotated[int, Meta(ge=1, le=PARTS_MAX)]]
"""(k, m): piece k of m, from 1; the record takes effect when all m are there."""
Text = Annotated[str, Meta(max_length=256)]
Ids = dict[str, str]


class Record(msgspec.Struct, frozen=True, tag_field="t", forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """Base of every record."""

    ms: Natural
    """Wall clock in milliseconds, for people only."""


class Open(Record, frozen=True, tag="open"):
    """First line of a journal: who writes it."""

    v: Natural
    run_uuid: Text
    inc: Text
    host: Text
    boot_id: Text
    pid: Natural
    pstart: Natural
    """Start time of the process in clock ticks since boot: with ``pid`` and ``boot_id`` it names one process."""
    user: Text
    lib: Text
    why: Text = ""
    """What an operator asked for: ``purge``, or the overriding options of a recovery. Durable before anything is done because of it."""


class Keep(Record, frozen=True, tag="keep"):
    """An object is published under its final name (a receipt, not an intent)."""

    s: Seq
    b: Annotated[int, Meta(ge=1, le=BYTES_OBJECT_MAX)]
    """Bytes."""
    x: Natural
    """Checksum of the whole object."""
    n: Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
    """Tokens."""
    f: Natural
    """Fields, a bit mask over the schema's order."""
    e: Text = ""
    """Entity tag on S3."""
    vid: Text = ""
    """Version id on S3."""

    def check(self) -> "Keep":
        """This record, if a reader accepts it; else ``ValueError``."""
        sizes_ok = 1 <= self.b <= BYTES_OBJECT_MAX and 0 <= self.n <= TOKENS_MAX
        if not sizes_ok or self.x < 0 or self.f < 0 or len(self.e) > 256 or len(self.vid) > 256:
            raise ValueError(f"not a legal keep: {self}")
        return self


class Take(Record, frozen=True, tag="take"):
    """The right passes from the producer to this consumer; idempotent by id."""

    q: Text
    """Request id."""
    i: Ids
    part: Part | None = None


class Ship(Record, frozen=True, tag="ship"):
    """The right passes from this orchestrator to the step. Durable before the batch is visible (W2)."""

    step: Step
    n: Natural
    b: Natural
    sum: Unsigned
    """Sum of hash64 over the ids modulo 2**64."""
    i: Ids
    part: Part | None = None


class StepRecord(Record, frozen=True, tag="step"):
    """The trainer has the step (``taken``), or all of its ranks have fetched it (``used``)."""

    step: Step
    st: Annotated[str, Meta(pattern="^(taken|used)$")]
    n: Natural
    sum: Unsigned
    miss: dict[str, Ids] = {}
    """Class of failure to the ids that could not be fetched."""
    part: Part | None = None


class Drop(Record, frozen=True, tag="drop"):
    """The one and only decision to remove. Durable before the first DELETE that it covers (W1)."""

    r: Text
    i: Ids = {}
    steps: tuple[Step, Step] | None = None
    """Both ends included; the trainer's form."""
    part: Part | None = None


class Done(Record, frozen=True, tag="done"):
    """Physically gone."""

    i: Ids = {}
    steps: tuple[Step, Step] | None = None
    a: Ids = {}
    """Those of them that were absent when the deletion came."""
    k: Annotated[int, Meta(ge=1, le=1 << 31)] = 1
    """Attempt; an adopter's redo starts at 2."""
    part: Part | None = None


class Adopt(Record, frozen=True, tag="adopt"):
    """All remaining rights of ``h`` are mine."""

    h: Text
    how: Annotated[str, Meta(pattern="^(closed|dead|flock|forced)$")]
    end: Natural
    """Bytes of h's journal that were read; whatever h writes beyond is void."""
    n: Natural | None = None
    """Final seq count of a producer."""
    extra: str = ""
    """Seqs that are present without a keep."""
    void: str = ""
    """Seqs that never held an object."""
    lost: str = ""
    """Seqs that were kept, are absent and were never dropped."""
    part: Part | None = None


class Close(Record, frozen=True, tag="close"):
    """Clean end."""

    n: Natural | None = None
    """Final seq count of a producer; left out where ``void`` does not fit the line."""
    counters: dict[str, int] = {}
    void: str = ""
    """A producer's seqs that never held an object."""


AnyRecord = Open | Keep | Take | Ship | StepRecord | Drop | Done | Adopt | Close

_FREQUENT: Final = frozenset({Keep, Take, Drop, Done})
_FREE: Final = frozenset({Keep, Take})
"""Their types say all that there is to check."""
_encode: Final = msgspec.json.Encoder().encode
_decoder: Final = msgspec.json.Decoder(AnyRecord)
_decode: Final = _decoder.decode
_SPACE: Final = 0x20


def encode_line(record: AnyRecord) -> bytes:
    """One line with its checksum. Raises ``ValueError`` for what a reader would refuse: a line above the limit, a value out of bounds.

    The frequent records are checked by their holders instead, see ``Keep.check`` and ``request_text``.
    """
    body = _encode(record)
    if type(record) not in _FREQUENT:
        try:
            _decoder.decode(body)
        except msgspec.ValidationError as e:
            raise ValueError(f"a {type(record).__name__} record would not be readable: {e}") from e
    if len(body) + 10 > LINE_BYTES_MAX:
        raise ValueError(f"a {type(record).__name__} record of {len(body)} bytes does not fit a line of {LINE_BYTES_MAX}")
    return b"%08x %b\n" % (crc32(body), body)


def request_text(request_id: str) -> str:
    """A request id as a record may carry it: cut to 256 characters; it is for people, ids decide."""
    return request_id if len(request_id) <= 256 and request_id.isascii() else ascii(request_id)[:256]


def line_ok(line: bytes) -> bool:
    """Whether a line (without its LF) has the right length and checksum."""
    if not 11 <= len(line) < LINE_BYTES_MAX or line[8] != _SPACE:
        return False
    return b"%08x" % crc32(line[9:]) == line[:8]


def decode_line(line: bytes) -> AnyRecord:
    """The record of a line (without its LF) whose checksum is right. Raises ``JournalCorrupt`` if it is outside the grammar."""
    try:
        record = _decode(line[9:])
    except (msgspec.DecodeError, RecursionError) as e:
        raise JournalCorrupt(f"not a ledger record: {e} in {line[9:80]!r}") from e
    return record if type(record) in _FREE else _checked(record)


def _checked(record: AnyRecord) -> AnyRecord:
    """What the types do not say."""
    if isinstance(record, Drop) and record.r not in REASONS:
        raise JournalCorrupt(f"drop reason {record.r!r} is not one of {sorted(REASONS)}")
    if isinstance(record, Drop | Done) and record.steps is not None and (record.i or record.steps[0] > record.steps[1]):
        raise JournalCorrupt(f"a record names steps {record.steps} that are not ascending, or ids as well")
    if isinstance(record, Ship | StepRecord) and record.sum >> 64:
        raise JournalCorrupt(f"a sum of {record.sum.bit_length()} bits, 64 are read")
    if isinstance(record, StepRecord) and not MISS_CLASSES.issuperset(record.miss):
        raise JournalCorrupt(f"failure classes {sorted(record.miss)} are not of {sorted(MISS_CLASSES)}")
    return record
