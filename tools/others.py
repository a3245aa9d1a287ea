"""Fetching beside what a framework would use instead: Ray's object store, TransferQueue, and on S3 obstore and s3fs, each in one run.

Writes docs/results/others.json and two sections of docs/benchmarks.md. Ray and TransferQueue are no extra of this package
(docs/benchmarks.md says how to install them); where they are absent, this ends with an error.

    python -m tools.others            # about three minutes on two cores
    python -m tools.others --write    # the sections again from docs/results/others.json; measures nothing
"""

import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from fsref.bench import methods, others
from fsref.bench.fetch import fetch
from fsref.bench.report import markdown, ratio_rows, show_bytes
from fsref.bench.suite import in_process
from fsref.bench.workload import Options
from tools.results import paragraph, replace_section
from tools.s3_bench import BUCKET, server

ROOT: Final = Path(__file__).resolve().parent.parent
JSON: Final = ROOT / "docs" / "results" / "others.json"
PAGE: Final = ROOT / "docs" / "benchmarks.md"
PACKAGES: Final = ("ray", "TransferQueue", "s3fs", "obstore")
RAY_ROWS: Final = (methods.PREADV, methods.FSREF, methods.FSREF_NONE, methods.HTTP, methods.RAY, methods.TRANSFER_QUEUE)
S3_ROWS: Final = (methods.GETS, others.S3FS, methods.FSREF_NONE, methods.GETS_DECODE, others.S3FS_DECODE, methods.FSREF)
RAY_TITLE: Final = "Beside Ray and TransferQueue"
S3_TITLE: Final = "Beside obstore and s3fs"


class Run(msgspec.Struct, frozen=True):
    """One run of the bench, picklable."""

    options: Options

    def __call__(self) -> dict[str, Any]:
        return fetch(self.options)


def measure() -> dict[str, Any]:
    """All runs; raises ``SystemExit`` where Ray or TransferQueue is not installed."""
    out: dict[str, Any] = {"versions": {p: _version(p) for p in PACKAGES}}
    for label, kept in (("whole samples", 1.0), ("truncated to 60 %", 0.6)):
        found = in_process(Run(Options(kept=kept)))
        if found["absent"]:
            raise SystemExit(f"not installed: {', '.join(found['absent'])}; docs/benchmarks.md says how to install them")
        out[label] = found
        print(label, flush=True)
    with server() as at:
        keys = {"AWS_ACCESS_KEY_ID": at.keys[0], "AWS_SECRET_ACCESS_KEY": at.keys[1]}
        os.environ.update(keys)  # as a run gets them; the processes of the bench inherit them
        for label, tokens, samples in (("S3, 16,384 tokens", 16_384, 4), ("S3, 1,024 tokens", 1_024, 16)):
            place = Options(root=f"s3://{BUCKET}/bench", endpoint=at.section.endpoint, region="us-east-1", tokens=tokens, samples=samples)
            out[label] = in_process(Run(place))
            print(label, flush=True)
    return out


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def ray_lines(found: dict[str, Any]) -> Iterator[str]:
    """The section about Ray and TransferQueue."""
    first, versions = found["whole samples"], found["versions"]
    yield (
        f"`python -m tools.others` on {first['machine']}: Ray {versions['ray']}, TransferQueue {versions['TransferQueue']};"
        f" [results/others.json](results/others.json)."
    )
    yield ""
    yield from INSTALL
    yield ""
    yield from _shown(found, ("whole samples", "truncated to 60 %"), RAY_ROWS, ("Ray", "TransferQueue"))
    yield ""
    yield from paragraph(READ_RAY)


def s3_lines(found: dict[str, Any]) -> Iterator[str]:
    """The section about clients of object storage."""
    versions = found["versions"]
    yield (
        f"`python -m tools.others`, SeaweedFS on the same machine as the server: obstore {versions['obstore']}, s3fs {versions['s3fs']}."
        " The plan's requests, as many at once as there are threads (2); *and decode*: checked and unpacked to the same places."
    )
    yield ""
    yield from _shown(found, ("S3, 16,384 tokens", "S3, 1,024 tokens"), S3_ROWS, ("GETs", "s3fs"))
    yield ""
    yield from paragraph(READ_S3)


def _shown(found: dict[str, Any], labels: tuple[str, ...], methods_: tuple[str, ...], of: tuple[str, ...]) -> Iterator[str]:
    for label in labels:
        one = found[label]
        rows = {r["method"]: r for r in one["rows"]}
        rows_shown = f"{one['samples']} samples, {show_bytes(one['raw_bytes'])} of rows"
        yield f"{label}: {rows_shown}, {one['threads']} threads, {one['repeats']} rounds:"
        yield ""
        yield from markdown([rows[m] for m in methods_])
        yield ""
        yield from markdown([{k: r[k] for k in ("ratio", "measured", "by processor time")} for r in ratio_rows(one) if _about(r, of)])
        yield ""


def _about(row: dict[str, str], of: tuple[str, ...]) -> bool:
    return any(word in row["ratio"] for word in of)


INSTALL: Final = (
    "Neither is an extra of this package: TransferQueue's tree (hydra, omegaconf) wants another antlr runtime than constraints.txt pins.",
    "Both are Apache-2.0; in an environment of their own:",
    "",
    "    pip install -e '.[demo,s3,test]' 'ray==2.60.0' 'TransferQueue==0.1.11' 'hydra-core>=1.3' 'omegaconf>=2.3'",
)
READ_RAY: Final = (
    "How to read it. *Ray*: arrays that one process put to the node's shared memory, mapped without a copy and copied to the "
    "buffers, so it is a copy within memory and as fast. Nothing is unpacked or checked, nothing leaves the node, and an object is "
    "gone with its owner: it is what a node pays once the bytes are there, and fsref's way from storage costs more. "
    "*TransferQueue*: a key per sample, a tensor per column in its simple storage (two processes), one `kv_batch_get` per sample "
    "and thread (one call for all samples took longer); whole samples, raw bytes over sockets. By processor time neither is "
    "charged for what its own processes do. Both hold the arrays of all steps in flight in memory that nobody else can use, "
    "fsref's lie in files, and in the page cache."
)
READ_S3: Final = (
    "The server shares the two cores with its clients, so rates of this table say which client costs less, not what a network "
    "gives. One request per sample by every method: the plan's. s3fs is asyncio in one thread beside the callers."
)


def main(argv: list[str]) -> int:
    """The command line."""
    if argv not in ([], ["--write"]):
        print(__doc__)
        return 2
    found = json.loads(JSON.read_text(encoding="utf-8")) if argv else measure()
    JSON.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    replace_section(RAY_TITLE, list(ray_lines(found)), path=PAGE)
    replace_section(S3_TITLE, list(s3_lines(found)), path=PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
