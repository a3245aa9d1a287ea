"""What an object costs a filesystem whose metadata is one server for all: names made, moved and removed."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import collections, os, sys
from fsref.store import open_root

counts = collections.Counter()
def hook(event, args):
    if event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT:
        counts["create"] += 1
    elif event in ("os.rename", "os.link", "os.remove", "os.mkdir", "os.listdir", "os.scandir"):
        counts[event] += 1

with open_root(sys.argv[1], run="r1", create=True) as store:
    store.put("obj/inc/0.zip", [b"x"])  # makes the folders
    sys.addaudithook(hook)
    for n in range(1, 11):
        store.put(f"obj/inc/{n}.zip", [b"x" * 1000])
    published = dict(counts)
    counts.clear()
    for n in range(1, 11):
        store.read(f"obj/inc/{n}.zip", bytes_max=1000)
    read = dict(counts)
    counts.clear()
    store.delete([f"obj/inc/{n}.zip" for n in range(1, 11)])
    print(published, read, dict(counts), sep="\\n")
"""


def test_an_object_is_one_create_one_rename_and_later_one_unlink(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["{'create': 10, 'os.rename': 10}", "{}", "{'os.remove': 10}"]
