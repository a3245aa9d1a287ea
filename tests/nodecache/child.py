"""A rank of a node in its own process: reads objects through the cache when it is told to, one JSON line each way.

``python -m tests.nodecache.child FOLDER BYTES_MAX WAIT_S``. Commands: ``{"read": [object id, first, count, size], "step": n}``,
``{"hold": true}`` (fetches stop in the middle until the next line), ``{"release": step}``, ``{"close": true}``. An answer says what the
rank fetched itself and whether every byte was right.
"""

import json
import sys

import numpy as np

from fsref.nodecache import NodeCache, Span
from tests.nodecache.contents import content


def main() -> None:
    """Until its input ends."""
    folder, bytes_max, wait_s = sys.argv[1:]
    cache = NodeCache(folder, name="run", bytes_max=int(bytes_max), wait_s=float(wait_s))
    _say({"member": cache.member})
    hold = False
    for line in sys.stdin:
        command = json.loads(line)
        if "read" in command:
            object_id, first, count, size = command["read"]
            _say(_read(cache, object_id, (first, count, size), step=command.get("step", 0), hold=hold))
        elif "hold" in command:
            hold = command["hold"]
            _say({})
        elif "release" in command:
            cache.release(command["release"])
            _say({"held": cache.bytes_held})
        else:
            cache.close()
            _say({})


def _read(cache: NodeCache, object_id: str, chunks: tuple[int, int, int], *, step: int, hold: bool) -> dict[str, object]:
    first, count, size = chunks
    out = np.zeros(count * size, np.uint8)
    fetched: list[int] = []

    def fetch(start: int, stop: int) -> None:
        if hold:
            _say({"fetching": True})
            sys.stdin.readline()
        fetched.extend(range(first + start // size, first + stop // size))
        out[start:stop] = content(object_id, first * size + start, stop - start)

    spans = [Span(n, (first + n) * size, n * size, size) for n in range(count)]
    shared = cache.fill(object_id, spans, out, fetch, step=step)
    right = bool(np.array_equal(out, content(object_id, first * size, count * size)))
    return {**vars(cache.counters), "fetched": fetched, "shared": shared, "right": right}


def _say(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
