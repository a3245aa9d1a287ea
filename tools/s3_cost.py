"""Requests, bytes and money of a step on object storage, for a run of your shape and with your prices.

    python -m tools.s3_cost                                   # the example shape, requests and bytes
    python -m tools.s3_cost SHAPE.toml --prices PRICES.toml   # yours

Pure arithmetic on what fsref promises (docs/object-storage.md); a test runs a small run through a counting proxy and compares. No price is
a constant here: without ``--prices`` no money is shown.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from fsref.loader.feed import POLL_ROOT_S, POLL_S

BULK: Final = 1000
SEAL_S: Final = 60.0
MONTH_S: Final = 30 * 24 * 3600.0
GIB: Final = 1 << 30
Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]


class Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run, as far as its storage sees it."""

    samples: Count = 512
    """Objects that a step ships: one a trained branch."""
    dropped: Natural = 64
    """Objects a step that were kept and not shipped: filtered, stale, pruned."""
    tokens: Count = 8192
    """Kept tokens of a sample."""
    field_bytes: dict[str, float] = msgspec.field(default_factory=lambda: {"routed_experts": 270.0, "top_logprobs": 100.0})
    """Stored (compressed) bytes per token of each field; measure with ``fsref inspect step_N``."""
    data: Count = 8
    """Data ranks."""
    context: Count = 1
    """Context parallel ranks of a data rank; each reads its tokens of every sample."""
    zigzag: bool = True
    """Whether a context rank's tokens lie in two places."""
    pipeline: Count = 1
    """Pipeline ranks; each reads its layers."""
    tensor: Count = 1
    """Tensor ranks that read for themselves; 1 where they share what one reads."""
    env_batches: Natural = 0
    """Batches a step in which env workers remove objects that they never sent; each costs one request."""
    seconds: Positive = 120.0
    """Of a step."""
    commit: Literal["fetched", "checkpoint", "keep_last"] = "checkpoint"
    checkpoint_every: Count = 10
    """Steps between checkpoints, where ``commit = "checkpoint"``."""
    keep_last: Natural = 2
    ahead: Natural = 1
    """Steps generated ahead."""
    rank_file_bytes_per_token: Positive = 20.0
    """Of a step file: ids, masks, logprobs, advantages, references."""

    @property
    def ranks(self) -> int:
        return self.data * self.context * self.pipeline * self.tensor

    @property
    def object_bytes(self) -> float:
        return self.tokens * sum(self.field_bytes.values())


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a provider asks, in any currency."""

    put_1000: Natural | float
    """1,000 PUT, POST (but removals) or LIST requests."""
    get_1000: Natural | float
    """1,000 GET or HEAD requests."""
    delete_1000: Natural | float
    """1,000 removal requests; often 0."""
    stored_gib_month: Natural | float
    in_gib: Natural | float
    """Written from where the env servers run; 0 within a region."""
    out_gib: Natural | float
    """Read by the trainers; 0 within a region."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Of one step, on average."""

    requests: dict[str, float]
    """By what they are for."""
    bytes_in: float
    bytes_out: float
    bytes_stored: float
    """At rest at any time, on average."""


def cost(shape: Shape) -> Cost:
    """Requests and bytes of a step. Opening, closing, audits and retries come on top, per process and run, not per step."""
    ranges = 2 if shape.context > 1 and shape.zigzag else 1
    reads = shape.samples * shape.context * shape.pipeline * shape.tensor * ranges
    steps_held = {"checkpoint": (shape.checkpoint_every + 1) / 2, "fetched": 1.0, "keep_last": shape.keep_last + 1.0}[shape.commit]
    per_commit = shape.checkpoint_every if shape.commit == "checkpoint" else 1
    share = math.ceil(shape.samples / shape.data)
    trained = shape.data * math.ceil(share * per_commit / BULK) / per_commit
    dropped = math.ceil(shape.dropped / BULK)
    rank_bytes = shape.samples * shape.tokens * shape.rank_file_bytes_per_token
    requests = {
        "PUT objects": float(shape.samples + shape.dropped),
        "PUT step files": float(shape.data + 1),
        "PUT ledger": 1 + 1 / per_commit + max(0, dropped - 1) + math.floor(shape.seconds / SEAL_S) * (shape.dropped > 0),
        "GET objects": float(reads),
        "GET step files": 2.0 * shape.ranks,
        "GET looking for the next step": float(shape.ranks * looks(shape.seconds)),
        "HEAD before removals": dropped + 1 / per_commit,
        "DELETE": dropped + trained + shape.env_batches,
    }
    return Cost(
        requests=requests,
        bytes_in=(shape.samples + shape.dropped) * shape.object_bytes + rank_bytes,
        bytes_out=shape.samples * shape.object_bytes * shape.tensor + rank_bytes * shape.context * shape.pipeline * shape.tensor,
        bytes_stored=shape.samples * shape.object_bytes * (steps_held + shape.ahead),
    )


def looks(seconds: float) -> int:
    """How often a rank asks for a step that comes ``seconds`` after it began to look."""
    count, waited, pause = 0, 0.0, POLL_S
    while waited < seconds:
        count, waited, pause = count + 1, waited + pause, min(POLL_ROOT_S, 2 * pause)
    return count


def money(shape: Shape, prices: Prices) -> dict[str, float]:
    """The price of a step, by what it is for."""
    found = cost(shape)
    per_1000 = {"PUT": prices.put_1000, "GET": prices.get_1000, "HEAD": prices.get_1000, "DELETE": prices.delete_1000}
    out = {name: count / 1000 * per_1000[name.partition(" ")[0]] for name, count in found.requests.items()}
    out["bytes in"] = found.bytes_in / GIB * prices.in_gib
    out["bytes out"] = found.bytes_out / GIB * prices.out_gib
    out["bytes at rest"] = found.bytes_stored / GIB * prices.stored_gib_month * shape.seconds / MONTH_S
    return out


def report(shape: Shape, prices: Prices | None = None) -> list[str]:
    """A table in Markdown."""
    found = cost(shape)
    priced: Mapping[str, float] = money(shape, prices) if prices is not None else {}
    head = ["a step", "", *(["price"] if prices else [])]
    rows = [[name, f"{count:,.1f}"] for name, count in found.requests.items()]
    for name, count in (("bytes in", found.bytes_in), ("bytes out", found.bytes_out), ("bytes at rest", found.bytes_stored)):
        rows.append([name, f"{count / GIB:,.3f} GiB"])
    if prices is not None:
        rows = [[*row, f"{priced[row[0]]:.6f}"] for row in rows]
        rows.append(["all", "", f"{sum(priced.values()):.6f}"])
    return [_row(head), _row(["---"] * len(head)), *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.s3_cost", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("shape", nargs="?", type=Path, help="TOML file with the keys of Shape")
    parser.add_argument("--prices", type=Path, help="TOML file with the keys of Prices")
    asked = parser.parse_args(argv)
    shape = msgspec.toml.decode(asked.shape.read_bytes(), type=Shape) if asked.shape else Shape()
    prices = msgspec.toml.decode(asked.prices.read_bytes(), type=Prices) if asked.prices else None
    print("\n".join(report(shape, prices)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
