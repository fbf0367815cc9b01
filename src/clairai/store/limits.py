"""Takes nothing; gives what bounds a writer of captures, and the states it can be in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from clairai.errors import StoreError

Commits = Literal["soon", "on_flush"]
COMMITS: Final[tuple[Commits, ...]] = get_args(Commits)


@dataclass(frozen=True)
class Limits:
    """Bounds of one writer."""

    shard_nbytes: int = 64 << 20
    seal_after_s: float = 5.0
    queue_nbytes: int = 256 << 20
    reserve_nbytes: int = 64 << 20  # of the disk, left to others
    retry_s: float = 1.0
    spill_nbytes: int = 1 << 30

    def __post_init__(self) -> None:
        for name in ("shard_nbytes", "queue_nbytes", "spill_nbytes", "seal_after_s", "retry_s"):
            if not getattr(self, name) > 0:
                raise StoreError(f"{name} is {getattr(self, name)}, must be above 0")
        if self.reserve_nbytes < 0:
            raise StoreError(f"reserve_nbytes is {self.reserve_nbytes}, must be 0 or above")


@dataclass(frozen=True)
class State:
    """`stopped` ends by itself; `failed` does not: the folder must be opened again."""

    name: Literal["writing", "stopped", "failed"] = "writing"
    reason: str = ""
