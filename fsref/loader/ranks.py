"""The ranks of one training run: who am I, and the few collectives that a step needs.

Owns the process group. Started like ``torchrun`` starts processes: ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``,
``MASTER_PORT``; without them the run has one rank. Control values travel as CPU tensors over gloo, gradients over nccl on GPUs.

A collective that fails means that a peer is gone or stuck: ``RoleFailed``. The layout is pure data parallel, so every rank is the
leader of its own data rank; ``is_leader`` keeps the place for model parallel ranks.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fsref.config import Config
from fsref.errors import ConfigError, FsrefError, RoleFailed

_T = TypeVar("_T")


@dataclass(frozen=True)
class Place:
    """This process among the ranks."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def read(cls, env: Mapping[str, str]) -> "Place":
        """From torchrun's variables; raises ``ConfigError`` where they do not make sense."""
        try:
            place = cls(int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1")), int(env.get("LOCAL_RANK", env.get("RANK", "0"))))
        except ValueError as e:
            raise ConfigError(f"RANK, WORLD_SIZE and LOCAL_RANK must be numbers: {e}") from None
        if not 0 <= place.rank < place.world_size:
            raise ConfigError(f"RANK {place.rank} is not below WORLD_SIZE {place.world_size}")
        return place


class Ranks:
    """The open process group; a context manager. Every collective must be called by all ranks, in the same order."""

    def __init__(self, config: Config, place: Place | None = None) -> None:
        """Joins the group and waits for the others. Raises ``ConfigError`` if the world does not fit ``trainer.parallel``."""
        place = Place.read(os.environ) if place is None else place
        if place.world_size != config.trainer.parallel.data:
            raise ConfigError(
                f"trainer.parallel.data is {config.trainer.parallel.data}, but {place.world_size} ranks were started (WORLD_SIZE)"
            )
        self.rank, self.world_size = place.rank, place.world_size
        self.data_rank, self.data_ranks = place.rank, place.world_size
        self.is_leader = True
        if torch.cuda.is_available():
            self.device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
        self._grouped = self.world_size > 1
        if self._grouped:
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            self._call(
                "joining",
                lambda: dist.init_process_group(
                    backend, timeout=timedelta(seconds=config.trainer.collective_s), rank=self.rank, world_size=self.world_size
                ),
            )

    def sum_in_place(self, tensor: Tensor) -> None:
        """Adds ``tensor`` up over all ranks; on its device."""
        if self._grouped:
            self._call("all_reduce", lambda: dist.all_reduce(tensor, dist.ReduceOp.SUM))

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Elementwise maximum over all ranks."""
        tensor = torch.tensor(values, dtype=torch.int64)
        if self._grouped:
            self._call("all_reduce", lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX))
        return [int(v) for v in tensor]

    def gather(self, value: _T) -> list[_T]:
        """``value`` of every rank in rank order, on every rank; small picklable values."""
        if not self._grouped:
            return [value]
        out: list[Any] = [None] * self.world_size
        self._call("all_gather", lambda: dist.all_gather_object(out, value))
        return out

    def barrier(self) -> None:
        """Returns on no rank before every rank is here."""
        self.maximum([0])

    def together(self, what: str, action: Callable[[], _T]) -> _T:
        """Runs ``action`` here and returns its value once it succeeded on every rank.

        Where it raised a ``FsrefError`` that goes on; every other rank raises ``RoleFailed`` instead of waiting for a rank that has left.
        """
        try:
            value = action()
        except FsrefError:
            self.maximum([1])
            raise
        if self.maximum([0])[0]:
            raise RoleFailed(f"trainer rank {self.rank}: {what} failed on another rank, whose log says why")
        return value

    def close(self) -> None:
        """Leaves the group without waiting for anyone."""
        if self._grouped:
            self._grouped = False
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _call(self, what: str, collective: Callable[[], Any]) -> None:
        try:
            collective()
        except RuntimeError as e:  # DistError and what gloo raises bare
            first = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            raise RoleFailed(
                f"trainer rank {self.rank}: {what} over {self.world_size} ranks failed, another rank is gone or stuck: {first}"
            ) from e
