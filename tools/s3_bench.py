"""Object storage, measured: fsref against what it is made of, on one SeaweedFS server in one run, interleaved.

    python -m tools.s3_bench                # fetch and publish; writes docs/results/s3.json and its section of docs/results.md
    python -m tools.s3_bench bulk           # some of fetch, publish, bulk: the others keep what they had

*fetch*: the reader through its obstore and its s3fs driver, against obstore's and s3fs's own ranged GETs of the same ranges with the same
decode, and obstore's GETs without. *publish*: ``Store.put`` of encoded objects against a bare PUT of the same bytes. *bulk*: a run of
10,000 objects listed, audited and removed, once for the time, once through a proxy that counts. Server and client share this machine;
the server's disk is memory where there is room, so that the client's work is what is measured.

A turn of a way lasts at least ``TURN_S``, after one that is not measured, so that where the scheduler puts woken threads does not decide.
"""

import json
import math
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import obstore
import s3fs
from msgspec.structs import replace
from obstore.store import S3Store

from fsref.config import Config, RunSection, StoreSection
from fsref.objects import EncodedObject, encode
from fsref.pipeline.layout import own_server
from fsref.pipeline.objectserver import Home, start
from fsref.pipeline.ports import free_ports
from fsref.pipeline.processes import Family
from fsref.reader import Reader, allocate
from fsref.reader.chunks import Destination, Placer, sort_chunks
from fsref.refs import Codec, Dense, Payload, PayloadRef, Schema, object_name, routed_experts
from fsref.store import Store, open_root
from fsref.writer import reference
from tools.results import replace_section
from tools.s3_bulk import COUNT, bulk

ROOT: Final = Path(__file__).resolve().parent.parent
LAYERS, TOP_K, EXPERTS = 48, 8, 128
MIB: Final = 1 << 20
SIZES: Final = {"64 KiB": (64 << 10, 128), "1 MiB": (MIB, 32), "25 MiB": (25 * MIB, 8)}
"""Stored bytes of an object, and different objects; a longer turn reads them again."""
ROUNDS: Final = 5
TURN_S: Final = 0.2
"""A turn of a way at least."""
OBJECTS_MAX: Final = 4096
"""Of one turn."""
SERVER_BYTES: Final = 10 << 30
"""What the server may come to hold."""
MEMORY: Final = Path("/dev/shm")
CONCURRENCY: Final = 8
AIM: Final = 0.9
NONE: Final = "codec none"
BUCKET: Final = "bench"
INC: Final = "env.bench-0-0.0123456789abcdef"
Speed = dict[str, list[float]]
"""Of each figure its median, lowest and highest over the rounds."""
Measured = dict[str, dict[str, Speed]]


@dataclass(frozen=True)
class Server:
    """The one server of this run and the ways to it."""

    section: StoreSection
    keys: tuple[str, str]

    @property
    def endpoint(self) -> str:
        return self.section.endpoint

    def store(self, driver: str = "obstore", *, run: str = "bench", endpoint: str = "") -> Store:
        section = replace(self.section, driver=driver, endpoint=endpoint or self.section.endpoint, connections_max=CONCURRENCY)
        return open_root(f"s3://{BUCKET}/runs", run=run, settings=section)

    def bare_obstore(self, prefix: str) -> S3Store:
        options = {"allow_http": True}
        config = {"endpoint": self.section.endpoint, "region": "us-east-1", "virtual_hosted_style_request": False}
        access, secret = self.keys
        return S3Store(
            BUCKET, prefix=prefix, config=config, client_options=options, access_key_id=access, secret_access_key=secret  # type: ignore[arg-type]
        )  # fmt: skip

    def bare_s3fs(self) -> Any:
        return s3fs.S3FileSystem(
            key=self.keys[0], secret=self.keys[1], endpoint_url=self.section.endpoint, skip_instance_cache=True, use_listings_cache=False
        )


@contextmanager
def server() -> Iterator[Server]:
    """SeaweedFS in a temporary folder."""
    roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > SERVER_BYTES
    with tempfile.TemporaryDirectory(dir=MEMORY if roomy else None) as folder, Family(grace_s=1.0) as family:
        home = Home(root=f"s3://{BUCKET}/runs", run="bench", run_dir=Path(folder) / "bench")
        config = Config(run=RunSection(root=home.root), store=StoreSection(server="seaweedfs"))
        section = own_server(config, home.run_dir, free_ports(1))
        with start(section, home, family=family, pause=lambda: None):
            lines = (home.folder / "credentials").read_text().splitlines()
            access, secret = (line.partition(" = ")[2] for line in lines if " = " in line)
            yield Server(section, (access, secret))


def payloads(codec: Codec, size: int) -> tuple[Schema, EncodedObject]:
    """An object of about ``size`` stored bytes: routing rows as a balanced router gives them."""
    schema = Schema((routed_experts(layer_ids=range(LAYERS), top_k=TOP_K, expert_count=EXPERTS),), codec=codec)
    rng = np.random.default_rng(0)

    def made(tokens: int) -> EncodedObject:
        rows = rng.integers(0, EXPERTS, (tokens, LAYERS, TOP_K), np.uint8)
        return encode(Payload(np.arange(tokens, dtype=np.int32), {"routed_experts": Dense(rows)}).checked(schema), schema)

    probe = made(256)
    return schema, made(max(1, round(size / (probe.byte_count / 256))))


def interleaved(contestants: dict[str, Callable[[int], None]], object_bytes: int, *, base: str) -> dict[str, Speed]:
    """Every contestant takes its turn in each round, in random order, with enough objects for ``TURN_S``, after one or two that warm up.

    ``ratio`` is its speed relative to that of ``base`` in the same round, ``cpu`` the CPU time of this process for an object relative
    to that of ``base``, the server's not counted: what else the machine does disturbs the first and hardly the second.
    """
    rng = random.Random(0)
    counts = {name: _count(work) for name, work in contestants.items()}
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for _ in range(ROUNDS):
        for name in rng.sample(list(contestants), len(contestants)):
            took[name].append(_turn(contestants[name], counts[name]))
    return {
        name: {
            "mb_s": _spread([object_bytes / wall / 1e6 for wall, _ in turns]),
            "ratio": _spread([b[0] / t[0] for b, t in zip(took[base], turns, strict=True)]),
            "cpu": _spread([t[1] / b[1] for b, t in zip(took[base], turns, strict=True)]),
        }
        for name, turns in took.items()
    }


def _turn(work: Callable[[int], None], count: int) -> tuple[float, float]:
    """Seconds and CPU seconds of an object."""
    began, spent = time.perf_counter(), time.process_time()
    work(count)
    return (time.perf_counter() - began) / count, (time.process_time() - spent) / count


def _count(work: Callable[[int], None]) -> int:
    """How many objects fill a turn, in whole rounds of all threads."""
    seconds, _ = _turn(work, CONCURRENCY)
    if seconds * CONCURRENCY < TURN_S:
        seconds, _ = _turn(work, CONCURRENCY * 2)
    return min(OBJECTS_MAX, CONCURRENCY * max(1, math.ceil(1.25 * TURN_S / seconds / CONCURRENCY)))


def _spread(values: Sequence[float]) -> list[float]:
    return [statistics.median(values), min(values), max(values)]


def fetch(at: Server) -> dict[str, Measured]:
    """By codec and size: stored MB/s of each way to read."""
    out: dict[str, Measured] = {}
    for label, codec in {"default codec": Codec(), NONE: Codec(name="none")}.items():
        out[label] = {}
        for title, (size, count) in SIZES.items():
            schema, encoded = payloads(codec, size)
            run = f"fetch-{label.split()[-1]}-{size}"
            with at.store(run=run) as store:
                refs = [reference(f"{INC}/{n}", encoded, schema) for n in range(count)]
                with ThreadPoolExecutor(CONCURRENCY) as pool:
                    list(pool.map(lambda r: store.put(object_name(r.object_ids[0]), encoded.buffers), refs))  # noqa: B023
                out[label][title] = _fetch(at, schema, refs, run)
                for outcome in store.delete([object_name(r.object_ids[0]) for r in refs]).values():
                    assert not isinstance(outcome, Exception), outcome
            _show(f"fetch {label} {title}", out[label][title])
    return out


def _fetch(at: Server, schema: Schema, refs: Sequence[PayloadRef], run: str) -> dict[str, Speed]:
    with ExitStack() as stack:
        readers = {d: stack.enter_context(Reader(stack.enter_context(at.store(d, run=run)), schema, threads=CONCURRENCY)) for d in DRIVERS}
        pool = stack.enter_context(ThreadPoolExecutor(CONCURRENCY))
        bare, files, placer = at.bare_obstore(f"runs/{run}"), at.bare_s3fs(), Placer(schema.codec)
        plans = [readers["obstore"].plan(ref) for ref in refs]
        fetched = sum(q.size for s in plans[0].segments for q in s.requests)
        outs = [{"routed_experts": allocate(p, schema, "routed_experts")} for p in plans]

        def read(driver: str, count: int) -> None:
            waiting = [f for n in range(count) for f in readers[driver].submit(plans[n % len(plans)], outs[n % len(plans)])]
            for future in waiting:
                future.result()

        def by(get: Callable[[str, int, int], Any], count: int, *, decode: bool) -> None:
            def one(number: int) -> None:
                number %= len(plans)
                plan = plans[number]
                for at_segment, segment in enumerate(plan.segments):
                    to = Destination.of(segment, at_segment, outs[number])
                    for request in segment.requests:
                        data = get(object_name(segment.object_id), request.offset, request.offset + request.size)
                        if decode:
                            placer.place(np.frombuffer(data, np.uint8), request, sort_chunks(request, to.spots), to)

            list(pool.map(one, range(count)))

        def bare_get(name: str, begin: int, end: int) -> Any:
            return obstore.get_range(bare, name, start=begin, end=end)

        def s3fs_get(name: str, begin: int, end: int) -> Any:
            return files.cat_file(f"{BUCKET}/runs/{run}/{name}", start=begin, end=end)

        return interleaved(
            {
                "fsref, obstore driver": partial(read, "obstore"),
                "fsref, s3fs driver": partial(read, "fsspec"),
                "obstore GETs + decode": partial(by, bare_get, decode=True),
                "obstore GETs alone": partial(by, bare_get, decode=False),
                "s3fs GETs + decode": partial(by, s3fs_get, decode=True),
            },
            fetched,
            base="obstore GETs + decode",
        )


def _show(title: str, ways: dict[str, Speed]) -> None:
    print(title, *(f"  {name:24} {_cell(way)}" for name, way in ways.items()), sep="\n", flush=True)


DRIVERS: Final = ("obstore", "fsspec")


def publish(at: Server) -> Measured:
    """By size: stored MB/s of each way to put the same bytes under new names."""
    out: Measured = {}
    for title, (size, _) in SIZES.items():
        _, encoded = payloads(Codec(), size)
        whole = b"".join(bytes(b) for b in encoded.buffers)
        run = f"publish-{size}"
        with ExitStack() as stack:
            stores = {d: stack.enter_context(at.store(d, run=run)) for d in DRIVERS}
            pool = stack.enter_context(ThreadPoolExecutor(CONCURRENCY))
            bare, files = at.bare_obstore(f"runs/{run}"), at.bare_s3fs()
            names: list[str] = []

            def each(put: Callable[[str], object], count: int) -> None:
                fresh = [object_name(f"{INC}/{len(names) + n}") for n in range(count)]  # noqa: B023
                names.extend(fresh)  # noqa: B023
                list(pool.map(put, fresh))  # noqa: B023

            ways: dict[str, Callable[[str], object]] = {
                "fsref, obstore driver": lambda n: stores["obstore"].put(n, encoded.buffers),  # noqa: B023
                "fsref, s3fs driver": lambda n: stores["fsspec"].put(n, encoded.buffers),  # noqa: B023
                "obstore PUT": lambda n: obstore.put(bare, n, whole, use_multipart=False),  # noqa: B023
                "obstore PUT, create only": lambda n: obstore.put(bare, n, whole, mode="create", use_multipart=False),  # noqa: B023
                "s3fs PUT": lambda n: files.pipe_file(f"{BUCKET}/runs/{run}/{n}", whole),  # noqa: B023
            }
            out[title] = interleaved({name: partial(each, way) for name, way in ways.items()}, len(whole), base="obstore PUT")
            stores["obstore"].delete(names)
        _show(f"publish {title}", out[title])
    return out


def sections(found: dict[str, Any]) -> list[str]:
    """The section of docs/results.md."""
    head = (
        f"`python -m tools.s3_bench [bulk]`: one SeaweedFS server on the same machine ({found['cpus']} cores; its disk is memory), "
        f"{CONCURRENCY} requests at a time, {ROUNDS} interleaved rounds of turns of at least {1000 * TURN_S:.0f} ms. In a cell: MB/s "
        f"of stored bytes; speed relative to obstore's own requests in the same round; CPU time of the client relative to theirs; medians, "
        f"the range over the rounds in brackets. Objects are routing rows of {LAYERS} layers, {TOP_K} of {EXPERTS} experts."
    )
    lines = [head]
    for label, measured in found["fetch"].items():
        lines += ["", f"Fetch, check and decode into the caller's arrays, {label}:", "", *_table(measured)]
    lines += [
        "",
        "Publish under a new name, which fsref has the server refuse where it is taken (*create only*):",
        "",
        *_table(found["publish"]),
        "",
        "obstore's own PUTs send one buffer again and again; fsref joins the buffers of each object first.",
    ]
    lines += [
        "",
        f"A run of {COUNT:,} objects in one bucket:",
        "",
        "| | seconds | requests |",
        "|---|---|---|",
        *(f"| {name} | {v['seconds']:.2f} | {v['requests']:,.0f} |" for name, v in found["bulk"].items()),
        "",
        "The seconds are straight to the server, the requests are counted at a proxy in a run of their own. Who kept the objects",
        "and never sent them removes them at its close: an env worker.",
        "",
        *_against_aim(found["fetch"]),
    ]
    return lines


def _against_aim(fetched: dict[str, Measured]) -> list[str]:
    ratios = {
        f"{label}, {size}, {'time' if key == 'ratio' else 'CPU'}": value
        for label, m in fetched.items()
        for size, ways in m.items()
        for key, value in _of_aim(ways, alone=label == NONE).items()
    }
    below = [f"{name} {ratio:.2f}x" for name, ratio in ratios.items() if ratio < AIM]
    aim = f"The aim of the reader is {AIM}x of obstore's own GETs with the same decode, with codec none of the GETs alone"
    return [f"{aim}; below it in this run: {'; '.join(below)}." if below else f"{aim}: reached in every row, in time and in CPU time."]


def _of_aim(ways: dict[str, Speed], *, alone: bool) -> dict[str, float]:
    """The reader's speed, and the inverse of its CPU time, relative to what it is measured against."""
    ours, other = ways["fsref, obstore driver"], ways["obstore GETs alone" if alone else "obstore GETs + decode"]
    return {"ratio": ours["ratio"][0] / other["ratio"][0], "cpu": other["cpu"][0] / ours["cpu"][0]}


def _table(measured: Measured) -> list[str]:
    ways = list(next(iter(measured.values())))
    rows = [f"| {way} | {' | '.join(_cell(m[way]) for m in measured.values())} |" for way in ways]
    return [f"| | {' | '.join(measured)} |", f"|---|{'---|' * len(measured)}", *rows]


def _cell(way: Speed) -> str:
    (mb_s, _, _), (ratio, low, high), (cpu, _, _) = way["mb_s"], way["ratio"], way["cpu"]
    return f"{mb_s:.0f}; {ratio:.2f}x ({low:.2f} to {high:.2f}); {cpu:.2f}x"


DEFAULT: Final = ("fetch", "publish")


def main(argv: Sequence[str]) -> int:
    parts: dict[str, Callable[[Server], Any]] = {"fetch": fetch, "publish": publish, "bulk": bulk}
    if set(argv) - set(parts):
        print(__doc__)
        return 2
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        del os.environ[name]
    path = ROOT / "docs" / "results" / "s3.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    with server() as at:
        found |= {name: part(at) for name, part in parts.items() if name in (argv or DEFAULT)}
    found |= {"cpus": os.cpu_count(), "machine": platform.machine(), "rounds": ROUNDS, "concurrency": CONCURRENCY}
    path.write_text(json.dumps(found, indent=1) + "\n")
    if set(parts) <= set(found):
        replace_section("Object storage", sections(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
