"""Journals, markers and step files written by an attacker: refused, in bounded memory and time, before anything else is opened."""

import binascii
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fsref import steps
from fsref.errors import BadRef, FsrefError, JournalCorrupt, StepError
from fsref.journal.markers import read_adopted
from fsref.journal.place import Ledger
from fsref.journal.read import LedgerReader
from fsref.ledger.fold import IDS_BYTE_MAX, IDS_FREE, JournalFold
from fsref.ledger.records import Close, Open, Take, encode_line
from fsref.reaper import delete_objects
from fsref.refs import Schema, top_logprobs
from tests.reaper.stage import FaultyStore

ORC = "orc.main.0000000000000002"
ENV = "env.a.0000000000000001"
OPENED = encode_line(Open(1, 1, "0" * 32, ORC, "h", "b", 1, 1, "u", "l"))
HOSTILE_INCS = [
    "../../etc",
    "env.a.0000000000000001/../x",
    "env.a.000000000000000g",
    "trn",
    "",
    "/",
    "env.a.0000000000000001\n",
    "e" * 99,
]
ROOM_BYTES = 500 << 20
"""Of address space for the child, beyond its imports: the ids that a ledger may name without explanation take up to half of it."""


def line(body: str) -> bytes:
    return b"%08x %b\n" % (binascii.crc32(body.encode()), body.encode())


@pytest.mark.fault(54)
@pytest.mark.parametrize("inc", HOSTILE_INCS)
@pytest.mark.parametrize("kind", ["take", "drop", "done", "ship", "adopt"])
def test_an_incarnation_outside_the_grammar_makes_the_journal_corrupt(tmp_path: Path, kind: str, inc: str) -> None:
    ids = json.dumps({inc: "0"})
    bodies = {
        "take": f'{{"t":"take","ms":1,"q":"q","i":{ids}}}',
        "drop": f'{{"t":"drop","ms":1,"r":"late","i":{ids}}}',
        "done": f'{{"t":"done","ms":1,"i":{ids}}}',
        "ship": f'{{"t":"ship","ms":1,"step":1,"n":1,"b":1,"sum":1,"i":{ids}}}',
        "adopt": f'{{"t":"adopt","ms":1,"h":{json.dumps(inc)},"how":"dead","end":1}}',
    }
    (tmp_path / f"{ORC}.jnl").write_bytes(OPENED + line(bodies[kind]))
    reader = LedgerReader(Ledger(tmp_path))
    reader.refresh()
    assert "is damaged" in reader.journals[ORC].problem
    assert not reader.merge().drops


@pytest.mark.fault(54)
@pytest.mark.parametrize("by", [*HOSTILE_INCS, 7, None])
def test_a_marker_that_names_no_incarnation_is_refused(tmp_path: Path, by: Any) -> None:
    (tmp_path / f"{ENV}.adopted").write_text(json.dumps({"by": by}))
    with pytest.raises(JournalCorrupt):
        read_adopted(Ledger(tmp_path), ENV)


def test_a_fifo_in_the_place_of_a_marker_does_not_stop_its_reader(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / f"{ENV}.adopted")
    with pytest.raises(FsrefError):
        read_adopted(Ledger(tmp_path), ENV)


@pytest.mark.fault(54)
@pytest.mark.parametrize("object_id", ["../../etc/passwd", "file:///etc/passwd", f"{ENV}/../0", f"{ENV}/0\x00", "A" * 10_000])
def test_a_step_file_with_a_hostile_id_is_refused_before_anything_is_opened(tmp_path: Path, object_id: str) -> None:
    schema = Schema((top_logprobs(),))
    segment = [object_id, 10, 0, 1, 0, b""]
    sequence = ["t/0", b"", b"", b"", b"", [b"s" * 8, 1, b"t" * 8, 1, [segment], b"", []], 0.0, 0, 1.0, False]
    head = {"v": 1, "run": "r1", "data_rank": 0, "schema": msgspec.to_builtins(schema)}
    rank = {**head, "step": 0, "micro_batches": [[[sequence]]], "owned": []}
    owned = {**head, "step": 1, "micro_batches": [], "owned": [object_id]}
    with FaultyStore(tmp_path / "r1") as store:
        for n, content in enumerate((rank, owned)):
            data = msgspec.msgpack.encode(content)
            info = steps.StepInfo(
                v=1, run="r1", run_uuid="0" * 32, step=n, data_ranks=1, micro_batches=1 - n, samples=1, tokens=1, n=1, bytes=1,
                sum=1, version=0, schema=schema, digests=(steps.digest(data),),
            )  # fmt: skip
            steps.publish(store, info, [data])
            if n == 0:
                with pytest.raises(StepError):
                    steps.read_rank(store, info, 0)
                continue
            with pytest.raises(BadRef):
                delete_objects(store, steps.read_rank(store, info, 0).owned)
        assert store.deletes == []


def test_a_step_that_names_fewer_digests_than_ranks_is_refused(tmp_path: Path) -> None:
    info = steps.StepInfo(
        v=1, run="r1", run_uuid="0" * 32, step=0, data_ranks=2, micro_batches=0, samples=0, tokens=0, n=0, bytes=0, sum=0, version=0,
        schema=Schema((top_logprobs(),)), digests=(),
    )  # fmt: skip
    with FaultyStore(tmp_path / "r1") as store, pytest.raises(StepError):
        steps.read_rank(store, info, 1)


@pytest.mark.fault(58)
def test_short_ranges_that_name_millions_of_ids_are_refused() -> None:
    fold = JournalFold(ORC)
    fold.feed(0, Open(1, 1, "0" * 32, ORC, "h", "b", 1, 1, "u", "l"))

    def feed() -> None:
        for n in range(IDS_FREE // 65_536 + 200):
            fold.feed(100 * n, Take(1, "q", {ENV: f"{n * 65_536}-{n * 65_536 + 65_535}"}))

    with pytest.raises(JournalCorrupt, match="more ids than the limit"):
        feed()
    assert fold.ids_named <= IDS_FREE + 10 * IDS_BYTE_MAX * 1000 + 65_536


CHILD = """
import json, resource, sys
from pathlib import Path
from fsref.journal.place import Ledger
from fsref.journal.read import LedgerReader

mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + int(sys.argv[2]),) * 2)
out = {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    reader = LedgerReader(Ledger(folder))
    reader.refresh()
    out[folder.name] = [j.problem for j in reader.journals.values()] + reader.problems
    del reader
print(json.dumps(out))
"""


@pytest.mark.fault(58)
def test_hostile_journals_are_refused_in_bounded_memory(tmp_path: Path) -> None:
    def folder(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    journal = folder("a line of 1 GB") / f"{ORC}.jnl"
    journal.write_bytes(OPENED)
    with journal.open("r+b") as file:
        file.truncate(1 << 30)
        file.seek(0, 2)
        file.write(b"\n" + encode_line(Close(1)))
    journal = folder("17 GB") / f"{ORC}.jnl"
    journal.write_bytes(OPENED)
    with journal.open("r+b") as file:
        file.truncate(17 << 30)
    for name, ranges in {"range 0 to 2^60": f"0-{1 << 60}", "range 0 to 9999999999": "0-9999999999"}.items():
        (folder(name) / f"{ORC}.jnl").write_bytes(OPENED + line(f'{{"t":"take","ms":1,"q":"q","i":{{"{ENV}":"{ranges}"}}}}'))
    takes = [f'{{"t":"take","ms":1,"q":"q","i":{{"{ENV}":"{n << 16}-{(n << 16) + 65535}"}}}}' for n in range(1024)]
    (folder("67 million ids in 100 kB") / f"{ORC}.jnl").write_bytes(OPENED + b"".join(map(line, takes)))
    many = folder("as many ids in 16 journals")
    for n in range(16):
        inc = f"orc.main.{n:016x}"
        opened = encode_line(Open(1, 1, "0" * 32, inc, "h", "b", 1, 1, "u", "l"))
        (many / f"{inc}.jnl").write_bytes(opened + b"".join(map(line, takes[:60])))
    (folder("a file name of control characters") / "\x1b]0;owned\x07.jnl").write_bytes(b"")
    (folder("a file name of no text") / "\udcff.jnl").write_bytes(b"")
    argv = [sys.executable, "-c", CHILD, str(tmp_path), str(ROOM_BYTES)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, list[str]] = json.loads(done.stdout)
    assert len(said) == 8
    assert all(any(problems) for problems in said.values()), said
    assert all("\x1b" not in p and p.isprintable() for problems in said.values() for p in problems)
    assert "more than their size explains" in "".join(said["as many ids in 16 journals"])
