"""Takes nothing of ours; gives a course: all that steers one request, as it travels to the workers.

A course is content, not names: vectors and gates are in it, positions are absolute. Whatever a name
comes to mean later, a request that was admitted keeps what it was admitted with. D = model width.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from clairai.wire import Activation

Op = Literal["add", "ablate", "clamp", "replace"]
OPEN_END: Final = 2**31 - 1  # of a range that goes on for as long as the request does
MAX_OPS: Final = 16  # that act on one row at one point, gates included
MAX_GATES: Final = 8  # of one course
MAX_ACTIONS: Final = 64
MAX_RANGES: Final = 64  # of one action

Range = tuple[int, int]  # positions from the first up to, not including, the second


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a vector holds for one point."""

    point: str
    digest: str  # of the values
    values: bytes  # float32, little-endian

    def read(self) -> NDArray[np.float32]:
        return np.frombuffer(self.values, "<f4")


class Gate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A probe's score of the same token opens and closes an action."""

    probe: str
    row: Row  # the probe's direction, at its point
    bias: float
    activation: Activation
    threshold: float
    sharpness: float | None = None  # None: open or closed, nothing between
    release: float | None = None  # closes below this; None: closes below the threshold
    latch: bool = False  # never closes again

    @property
    def is_stateful(self) -> bool:
        """Whether it depends on the request's earlier tokens."""
        return self.latch or self.release is not None


class Action(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One vector's work: what it does, to which rows, how strongly."""

    vector: str  # its name; "" for one that came with the request
    digest: str  # of the whole vector
    op: Op
    rows: tuple[Row, ...]  # one for each point, in path order
    scale: float
    ranges: tuple[Range, ...]  # sorted, apart from each other, none of them empty
    is_matched: bool = False  # add: the vector has the length of the row it is added to
    low: float | None = None  # clamp
    high: float | None = None
    gate: int | None = None  # of the course's gates; each is one action's own
    skips_special: bool = False


class Course(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Actions in the order in which they act."""

    actions: tuple[Action, ...]
    gates: tuple[Gate, ...] = ()

    @property
    def is_stateful(self) -> bool:
        return any(gate.is_stateful for gate in self.gates)


ENCODER: Final = msgspec.msgpack.Encoder()
DECODER: Final = msgspec.msgpack.Decoder(Course)
