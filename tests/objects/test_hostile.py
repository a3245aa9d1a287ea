"""Objects made by an attacker: refused with an error, in bounded memory, by a process that lives on."""

import json
import subprocess
import sys

import pytest

from tests.objects import forge

ROOM_BYTES = 200 << 20
"""What a child may map beyond what its imports took: less than what any of the files claims."""
CHILD = """
import json, resource, sys
from pathlib import Path
from fsref.errors import ObjectCorrupt
from fsref.objects import view
from fsref.store.posix import PosixStore

root, count, room = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + room, mapped + room))
out = []
with PosixStore(root) as store:
    for name in ["honest", *map(str, range(count))]:
        try:
            with store.open(f"{name}.zip") as file:
                seen = view(file)
                for field in seen.fields:
                    seen.read(field)
            out.append("read")
        except ObjectCorrupt as e:
            out.append(str(e))
        except MemoryError:
            out.append("MemoryError")
print(json.dumps(out))
"""


Said = dict[str, str]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """Description to what one child said about each file, one after the other."""
    folder = tmp_path_factory.mktemp("hostile")
    names = forge.write(folder)
    argv = [sys.executable, "-c", CHILD, str(folder), str(len(names)), str(ROOM_BYTES)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(["honest", *names], json.loads(done.stdout), strict=True))


def accepted(said: Said, kind: str) -> Said:
    """What was not refused, or only because memory ran out."""
    found = {name: text for name, text in said.items() if name.startswith(kind)}
    assert len(found) > 20
    return {name: text for name, text in found.items() if text in ("read", "MemoryError")}


def test_the_honest_object_is_read_in_the_same_child(said: Said) -> None:
    assert said["honest"] == "read"


@pytest.mark.fault(56)
def test_a_container_that_lies_is_refused_in_bounded_memory(said: Said) -> None:
    assert accepted(said, "zip: ") == {}


@pytest.mark.fault(57)
def test_metadata_and_chunks_that_lie_are_refused_before_they_are_decoded(said: Said) -> None:
    assert accepted(said, "zarr: ") == {}


@pytest.mark.fault(57)
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("zarr: zstd that inflates to 256 MiB", "a chunk decodes to 2400"),
        ("zarr: 2 kB of zstd that inflate to 48 MiB", "does not decode"),
        ("zarr: a Blosc header of 4 GiB", "header names 4294967295 bytes"),
        ("zarr: shape 2^50", "routed_experts/zarr.json does not describe"),
        ("zarr: rows of 2^60 bytes", "are allowed"),
        ("zarr: 2^20 chunks", "are allowed"),
        ("zarr: v2 metadata with a pickle filter", "not a name that this format has"),
        ("zarr: unknown codec", "does not describe"),
        ("zip: local header of another name", "differs from the directory"),
        ("zip: overlapping entries", "overlap"),
        ("zip: zip64 markers", "the ZIP directory names 65535 entries"),
        ("zip: comment bomb", "plain ZIP end record"),
    ],
)
def test_the_refusal_says_why(said: Said, name: str, why: str) -> None:
    assert why in said[name]
