"""The line format: checksums, the tail rule, hostile input."""

import binascii
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsref.errors import JournalCorrupt
from fsref.ledger.fold import JournalFold
from fsref.ledger.lines import LineReader
from fsref.ledger.records import (
    LINE_BYTES_MAX,
    AnyRecord,
    Close,
    Drop,
    Keep,
    Open,
    StepRecord,
    Take,
    decode_line,
    encode_line,
    request_text,
)
from tests.support.journals import Book, broken

INC = "env.a.0000000000000001"
OPEN = Open(1, 1, "0" * 32, INC, "h", "b", 1, 1, "u", "l")
LINES = [encode_line(r) for r in (OPEN, Keep(2, 0, 100, 7, 10, 3), Drop(3, "never_sent", {INC: "0"}), Close(4, 1))]


def read(data: bytes, reader: LineReader | None = None) -> list[AnyRecord]:
    return [record for _, record in (reader or LineReader()).feed(data)]


def sealed(body: bytes) -> bytes:
    return b"%08x %b\n" % (binascii.crc32(body), body)


def test_a_line_is_a_checksum_and_compact_json() -> None:
    line = encode_line(Keep(1732900000000, 7, 5_500_000, 3735928559, 16384, 7))
    assert line == b'20a5460f {"t":"keep","ms":1732900000000,"s":7,"b":5500000,"x":3735928559,"n":16384,"f":7}\n'
    assert len(line) <= 90


@given(st.integers(1, 40))
def test_chunks_of_any_size_give_the_same_records(size: int) -> None:
    data, reader = b"".join(LINES), LineReader()
    found = [r for at in range(0, len(data), size) for r in read(data[at : at + size], reader)]
    assert found == read(data)
    assert (reader.end, reader.torn_bytes) == (len(data), 0)


@pytest.mark.parametrize("tail", [b"12345678 {", LINES[1][:-1], b"\0" * 5000, b"00000000 {}\n", b"\0\0\n\0\0\n", b"garbage\n"])
def test_a_bad_tail_is_the_end_of_the_journal(tail: bytes) -> None:
    reader = LineReader()
    assert len(read(b"".join(LINES[:2]) + tail, reader)) == 2
    assert (reader.end, reader.torn_bytes) == (len(LINES[0] + LINES[1]), len(tail))


@pytest.mark.parametrize("at", [3, 20, 60])
def test_a_bad_line_that_valid_ones_follow_is_corruption(at: int) -> None:
    data = bytearray(b"".join(LINES))
    data[len(LINES[0]) + at] ^= 1
    with pytest.raises(JournalCorrupt, match=f"line at {len(LINES[0])} is damaged"):
        read(bytes(data))


@pytest.mark.parametrize(
    "body",
    [
        b'{"t":"steal","ms":1}',
        b'{"ms":1}',
        b"[]",
        b'{"t":"keep","ms":1,"s":-1,"b":1,"x":1,"n":1,"f":1}',
        b'{"t":"keep","ms":1,"s":99999999999,"b":1,"x":1,"n":1,"f":1}',
        b'{"t":"keep","ms":1,"s":1,"b":1,"x":1,"n":1,"f":1,"more":1}',
        b'{"t":"drop","ms":1,"r":"because","i":{}}',
        b'{"t":"drop","ms":1,"r":"trained","steps":[3,2]}',
        b'{"t":"step","ms":1,"step":1,"st":"eaten","n":1,"sum":1}',
        b'{"t":"step","ms":1,"step":1,"st":"used","n":1,"sum":1,"miss":{"bored":{}}}',
        b'{"t":"adopt","ms":1,"h":"x","how":"guess","end":1}',
        b'{"t":"take","ms":1,"q":"' + b"q" * 300 + b'","i":{}}',
        b"\xff\xfe\xfd\xfc\xfb\xfa",
        b"[" * 2000,
    ],
)
@pytest.mark.fault(58)
def test_a_record_outside_the_grammar_is_refused_although_its_checksum_is_right(body: bytes) -> None:
    with pytest.raises(JournalCorrupt):
        read(LINES[0] + sealed(body))


@pytest.mark.fault(58)
def test_a_line_above_the_limit_is_never_buffered() -> None:
    reader, chunk = LineReader(), b"x" * (1 << 20)
    read(LINES[0], reader)
    tracemalloc.start()
    for _ in range(64):
        assert read(chunk, reader) == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    assert reader.end == len(LINES[0])
    with pytest.raises(JournalCorrupt):
        read(b"\n" + LINES[1], reader)


def test_a_record_that_does_not_fit_a_line_is_refused_by_the_writer() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        encode_line(Take(1, "q", {INC: ",".join(str(2 * n) for n in range(20_000))}))
    assert LINE_BYTES_MAX == 65_536


@pytest.mark.parametrize("request_id", ["q", "q" * 5000, "\u00e4\n", "\ud800", ""])
def test_any_request_id_makes_a_readable_record(request_id: str) -> None:
    record = Take(1, request_text(request_id), {INC: "0"})
    assert decode_line(encode_line(record)[:-1]) == record


def test_a_value_that_a_reader_would_refuse_is_not_written() -> None:
    with pytest.raises(ValueError, match="would not be readable"):
        encode_line(StepRecord(5, -1, "used", 2, 3))
    with pytest.raises(ValueError, match="not a legal keep"):
        Keep(1, 0, 0, 7, 10, 1).check()


@pytest.mark.fault(58)
def test_a_range_bomb_is_refused_before_it_is_expanded() -> None:
    fold = JournalFold(INC)
    fold.feed(0, OPEN)
    with pytest.raises(JournalCorrupt):
        fold.feed(100, Drop(1, "never_sent", {INC: "0-9999999999"}))


def test_a_journal_that_names_too_many_ids_is_refused() -> None:
    fold = JournalFold(INC, ids_max=100)
    fold.feed(0, OPEN)
    fold.feed(100, Drop(1, "never_sent", {INC: "0-99"}))
    with pytest.raises(JournalCorrupt, match="more ids than the limit"):
        fold.feed(200, Drop(1, "never_sent", {INC: "100"}))


def test_numbers_that_no_honest_worker_counts_are_refused_and_cost_nothing() -> None:
    for record in (Keep(1, 9_999_999_999, 1, 1, 1, 1), Close(1, 1 << 62), Close(1, 1, void="0-9999999999")):
        with pytest.raises(JournalCorrupt):
            feed(OPEN, record)


def test_ranges_over_a_billion_steps_cost_nothing() -> None:
    trn, r = Book("trn.main.0000000000000001"), Book("rec.main.0000000000000002")
    trn.drop_steps(0, 999_999_999)
    trn.done_steps(0, 999_999_999)
    r.adopt(trn, n=1 << 62)
    assert broken(trn, r) == {"I3"}


def feed(*records: AnyRecord, inc: str = INC) -> JournalFold:
    fold = JournalFold(inc)
    for at, record in enumerate(records):
        fold.feed(at, record)
    return fold


def test_a_journal_starts_with_open_and_ends_with_close() -> None:
    with pytest.raises(JournalCorrupt, match="not open"):
        feed(Keep(2, 0, 100, 7, 10, 3))
    with pytest.raises(JournalCorrupt, match="second open"):
        feed(OPEN, OPEN)
    with pytest.raises(JournalCorrupt, match="follows the close"):
        feed(OPEN, Close(1), Keep(2, 0, 100, 7, 10, 3))


@pytest.mark.fault(66)
def test_a_journal_of_a_newer_format_is_refused_with_both_versions() -> None:
    with pytest.raises(JournalCorrupt, match="format 2, this version reads up to 1"):
        feed(Open(1, 2, "0" * 32, INC, "h", "b", 1, 1, "u", "l"))


def test_a_renamed_journal_is_refused() -> None:
    with pytest.raises(JournalCorrupt, match="renamed or copied"):
        feed(OPEN, inc="env.a.0000000000000002")


def test_parts_take_effect_when_the_last_one_is_there() -> None:
    first, second = Drop(1, "never_sent", {INC: "0"}, part=(1, 2)), Drop(1, "never_sent", {INC: "1"}, part=(2, 2))
    assert feed(OPEN, first).drops == {}
    assert set(feed(OPEN, first, second).drops[INC]) == {0, 1}


def test_a_group_of_parts_that_breaks_off_in_the_middle_is_corruption() -> None:
    first = Drop(1, "never_sent", {INC: "0"}, part=(1, 2))
    for other in (Keep(2, 0, 100, 7, 10, 3), first, Drop(1, "never_sent", {INC: "1"}, part=(2, 3)), Take(1, "q", {INC: "1"}, part=(2, 2))):
        with pytest.raises(JournalCorrupt, match="does not continue"):
            feed(OPEN, first, other)


def test_only_workers_keep() -> None:
    orc = "orc.main.0000000000000001"
    with pytest.raises(JournalCorrupt, match="only env"):
        feed(Open(1, 1, "0" * 32, orc, "h", "b", 1, 1, "u", "l"), Keep(2, 0, 100, 7, 10, 3), inc=orc)


def test_every_record_survives_its_line() -> None:
    record = StepRecord(5, 3, "used", 2, (1 << 64) - 1, {"missing": {INC: "0-1"}})
    assert decode_line(encode_line(record)[:-1]) == record
