"""The ranks of one training run: who am I, and the few collectives that a step needs.

Owns the process group, or one of its own over the ranks of somebody's. Started like ``torchrun`` starts processes: ``RANK``,
``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``; without them the run has one rank. Control values travel as CPU tensors
over gloo, gradients over nccl on GPUs.

Every collective is over **all** ranks of the run, those of every axis. That is the group that a step's agreement needs: the ranks that
train one micro batch (context, tensor and pipeline ranks of a data rank) must drop it together, and the data ranks among each other must
run equally many forwards (FSDP gathers parameters in each) and must know together that a step is lost.

A collective that fails means that a peer is gone or stuck: ``RoleFailed``.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fsref.errors import ConfigError, FsrefError, RoleFailed
from fsref.parallel import Coordinate, Parallel

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
    """Collectives over all ranks; a context manager. Each must be called by all ranks, in the same order, by one thread at a time."""

    def __init__(self, parallel: Parallel, place: Place, *, at: Coordinate | None = None, device: torch.device | None = None) -> None:
        """Use ``joined`` or ``over`` where there are several ranks. Raises ``ConfigError`` if the world does not fit ``parallel``."""
        if place.world_size != parallel.world_size:
            sizes = ", ".join(f"{axis} {parallel.ranks(axis)}" for axis in ("data", "context", "tensor", "pipeline"))
            raise ConfigError(
                f"trainer.parallel has {parallel.world_size} ranks ({sizes}), but {place.world_size} ranks were started (WORLD_SIZE)"
            )
        self.parallel = parallel
        self.at = parallel.coordinate(place.rank) if at is None else at
        self.rank, self.world_size = place.rank, place.world_size
        self.data_rank, self.data_ranks = self.at.data, parallel.data
        self.is_leader = self.at == Coordinate(data=self.at.data)
        """Of the ranks that train the same micro batches, the one that removes their objects."""
        self.device = device or torch.device("cpu")
        self._group: dist.ProcessGroup | None = None
        self._grouped = self._owned = False

    @classmethod
    def joined(cls, parallel: Parallel, place: Place | None = None, *, collective_s: float) -> "Ranks":
        """Opens torch's default process group and waits for the others; closing it leaves the group. Raises ``ConfigError``."""
        place = Place.read(os.environ) if place is None else place
        ranks = cls(parallel, place)
        if torch.cuda.is_available():
            ranks.device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(ranks.device)
        if place.world_size > 1:
            backend = "cpu:gloo,cuda:nccl" if ranks.device.type == "cuda" else "gloo"
            limit = timedelta(seconds=collective_s)
            ranks._grouped = ranks._owned = True
            ranks._call("joining", lambda: dist.init_process_group(backend, timeout=limit, rank=place.rank, world_size=place.world_size))
        return ranks

    @classmethod
    def over(
        cls, parallel: Parallel, *, at: Coordinate | None = None, device: torch.device | None = None, collective_s: float = 300.0
    ) -> "Ranks":
        """Over the default process group that the caller has opened, whatever its backend, with a gloo group of one's own in it.

        Collective. ``at``: this rank's place where ``parallel.order`` does not say it, such as
        ``Coordinate(data=mesh.get_local_rank("dp"), context=mesh.get_local_rank("cp"))``.
        Raises ``ConfigError`` if two ranks stand in one place, or were given different layouts.
        """
        if not dist.is_initialized():
            return cls(parallel, Place(), at=at, device=device)
        ranks = cls(parallel, Place(dist.get_rank(), dist.get_world_size()), at=at, device=device)
        if ranks.world_size > 1:
            ranks._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=collective_s))
            ranks._grouped = True
            ranks._check_places()
        return ranks

    def sum_in_place(self, tensor: Tensor) -> None:
        """Adds ``tensor`` up over all ranks; on its device."""
        if self._grouped:
            self._call("all_reduce", lambda: dist.all_reduce(tensor, dist.ReduceOp.SUM, group=self._group))

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Elementwise maximum over all ranks."""
        tensor = torch.tensor(values, dtype=torch.int64)
        if self._grouped:
            self._call("all_reduce", lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group))
        return [int(v) for v in tensor]

    def gather(self, value: _T) -> list[_T]:
        """``value`` of every rank in rank order, on every rank; small picklable values."""
        if not self._grouped:
            return [value]
        out: list[Any] = [None] * self.world_size
        self._call("all_gather", lambda: dist.all_gather_object(out, value, group=self._group))
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
            raise self.failed_elsewhere(what)
        return value

    def failed_elsewhere(self, what: str) -> RoleFailed:
        """What a rank raises that learns of another one's error."""
        return RoleFailed(f"trainer rank {self.rank}: {what} failed on another rank, whose log says why")

    def close(self) -> None:
        """Leaves the group without waiting for anyone; a default group that somebody else opened stays."""
        if self._grouped:
            self._grouped = False
            dist.destroy_process_group(None if self._owned else self._group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_places(self) -> None:
        found = self.gather((self.at, repr(self.parallel)))
        if len({text for _, text in found}) > 1:
            raise ConfigError("the ranks were given different parallel layouts: " + "; ".join(sorted({text for _, text in found})))
        twice = [tuple(at) for at, count in Counter(at for at, _ in found).items() if count > 1]
        if twice:
            raise ConfigError(f"several ranks stand at data, context, tensor, pipeline = {twice}: give each its own coordinate")

    def _call(self, what: str, collective: Callable[[], Any]) -> None:
        try:
            collective()
        except RuntimeError as e:  # DistError and what gloo raises bare
            first = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            raise RoleFailed(
                f"trainer rank {self.rank}: {what} over {self.world_size} ranks failed, another rank is gone or stuck: {first}"
            ) from e
