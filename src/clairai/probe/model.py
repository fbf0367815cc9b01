"""One linear probe: its fields, checked when it is made, and its exact scores.

T = tokens, P = probes, D = model width.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, get_args

import numpy as np
from numpy.typing import NDArray

from clairai.errors import ProbeError, quote
from clairai.points import Point
from clairai.probe.numeric_bounds import (
    MAX_NUMBER,
    MAX_ROW_LENGTH,
    MIN_ROW_LENGTH,
    ROW_LENGTHS,
    is_number,
    is_row_length,
    row_length,
)
from clairai.wire import control_messages, ring_messages

MAX_NAME: Final = 128
MAX_WIDTH: Final = 1_000_000
MAX_MODEL: Final = 256
MAX_DESCRIPTION: Final = 500
MIN_BINS: Final = 8
MAX_BINS: Final = 64
MAX_COUNT: Final = 10**12  # so that 64 of them fit one value of a file's metadata

_LEAST_SQUARE: Final = 1.001 * MIN_ROW_LENGTH**2
_MOST_SQUARE: Final = 0.999 * MAX_ROW_LENGTH**2
ACTIVATIONS: Final[tuple[ring_messages.Activation, ...]] = get_args(ring_messages.Activation)

NAME: Final = re.compile(rf"[A-Za-z0-9_:@+-][A-Za-z0-9._:/@+-]{{0,{MAX_NAME - 1}}}")


@dataclass(frozen=True, eq=False)
class Probe:
    """`activation(hidden @ direction + bias)` at one point; two probes are equal by content."""

    name: str
    point: Point
    direction_D: NDArray[np.float32]
    bias: float = 0.0
    activation: ring_messages.Activation = "none"
    threshold: float | None = None
    calibration: tuple[float, float] | None = None  # low and high end of the usual scores
    model: str | None = None  # the model it was made for
    # For people: the rest changes neither the score nor how it is read.
    description: str | None = None
    auroc: float | None = None  # on documents that neither the fit nor any choice used
    histogram: control_messages.Histogram | None = None  # of the scores on a reference set

    def __post_init__(self) -> None:
        _check_name(self.name)
        if not isinstance(self.point, Point):
            raise ProbeError(f"probe {self.name}: point is {quote(self.point)}; give a Point")
        if self.activation not in ACTIVATIONS:
            raise ProbeError(
                f"probe {self.name}: activation is {quote(self.activation)}; "
                f"use one of {', '.join(ACTIVATIONS)}"
            )
        for field, value in self._checked().items():
            object.__setattr__(self, field, value)

    def _checked(self) -> dict[str, object]:
        name = self.name
        model = check_optional_text(name, "model", self.model, limit=MAX_MODEL)
        described = check_optional_text(
            name, "description", self.description, limit=MAX_DESCRIPTION
        )
        return {
            "direction_D": check_direction(f"probe {name}: direction", self.direction_D),
            "bias": check_number(name, "bias", self.bias),
            "threshold": check_optional_number(name, "threshold", self.threshold),
            "calibration": check_calibration(name, self.calibration),
            "model": model,
            "description": described,
            "auroc": check_auroc(name, self.auroc),
            "histogram": check_histogram(name, self.histogram),
        }

    @property
    def width(self) -> int:
        return int(self.direction_D.shape[0])

    @cached_property
    def digest(self) -> str:
        """BLAKE2b-128 of everything that decides a score and how it is read, name included.

        What is only for people is left out, so that stored scores still match a probe whose
        description was corrected.
        """
        content = hashlib.blake2b(self._header, digest_size=16)
        content.update(self.direction_D.data)
        return content.hexdigest()

    @cached_property
    def _header(self) -> bytes:
        """Everything but the direction; a redirected probe keeps it."""
        fields = (self.name, str(self.point), self.bias, self.activation)
        header = json.dumps([*fields, self.threshold, self.calibration, self.model])
        return header.encode() + b"\0"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Probe):
            return NotImplemented
        return self.digest == other.digest and self._for_people() == other._for_people()

    def __hash__(self) -> int:
        return hash(self.digest)

    def _for_people(self) -> tuple[object, ...]:
        return self.description, self.auroc, self.histogram

    def apply(self, hidden_TD: NDArray[np.floating]) -> NDArray[np.floating]:
        """Return exact scores: summed in float64, returned in the precision of `hidden_TD`."""
        if hidden_TD.ndim != 2 or hidden_TD.shape[1] != self.width:
            raise ProbeError(
                f"probe {self.name} has width {self.width} and the rows have shape "
                f"{hidden_TD.shape}; give rows of shape (tokens, {self.width})"
            )
        with np.errstate(all="ignore"):  # a row that overflowed in the model scores inf or NaN
            scores_T = hidden_TD.astype(np.float64) @ self.direction_D.astype(np.float64)
            scores_T = _activate(self.activation, scores_T + self.bias)
            return scores_T.astype(np.result_type(hidden_TD.dtype, np.float32))

    def info(self) -> ring_messages.ProbeInfo:
        """Return what readers are told about this probe's column."""
        return ring_messages.ProbeInfo(
            name=self.name,
            point=str(self.point),
            activation=self.activation,
            threshold=self.threshold,
            calibration=self.calibration,
            digest=self.digest,
        )

    def listed(self) -> control_messages.ListedProbe:
        """Return `info` and the fields for people."""
        return control_messages.ListedProbe(
            name=self.name,
            point=str(self.point),
            activation=self.activation,
            threshold=self.threshold,
            calibration=self.calibration,
            digest=self.digest,
            description=self.description,
            auroc=self.auroc,
            histogram=self.histogram,
        )


def replace_directions(probes: Sequence[Probe], rows_PD: NDArray[np.float32]) -> tuple[Probe, ...]:
    """Return the same probes with other directions, one row each; only those are checked."""
    return replace_checked_directions(
        probes, check_direction_rows([probe.name for probe in probes], rows_PD)
    )


def check_direction_rows(names: Sequence[str], rows_PD: NDArray[np.float32]) -> NDArray[np.float32]:
    """Check one direction for each of these probes, and return them read-only."""
    if rows_PD.ndim != 2 or rows_PD.dtype != np.float32 or len(rows_PD) != len(names):
        raise ProbeError(
            f"directions are {rows_PD.dtype}{rows_PD.shape}; give a row of float32 for each of "
            f"{len(names)} probes"
        )
    return check_directions(names, rows_PD)


def replace_checked_directions(
    probes: Sequence[Probe], checked_PD: NDArray[np.float32]
) -> tuple[Probe, ...]:
    """As `replace_directions`, for rows that are already checked and that nobody changes."""
    return tuple(map(_with_direction, probes, checked_PD))


def _with_direction(probe: Probe, direction_D: NDArray[np.float32]) -> Probe:
    made: Probe = object.__new__(Probe)  # skips __init__ and its checks: banks have hundreds
    fields = probe.__dict__.copy()
    fields["direction_D"] = direction_D
    fields.pop("digest", None)  # it was the old direction's
    object.__setattr__(made, "__dict__", fields)
    return made


def _activate(
    activation: ring_messages.Activation, scores_T: NDArray[np.float64]
) -> NDArray[np.float64]:
    if activation == "relu":
        return np.maximum(scores_T, 0.0)
    if activation == "sigmoid":
        # 1 / (1 + exp(-x)) overflows for large negative x; tanh does not.
        return 0.5 * (1.0 + np.tanh(0.5 * scores_T))
    return scores_T


def _check_name(name: object) -> None:
    # A name may become a file's name, so nothing in it may leave a folder.
    if not isinstance(name, str) or NAME.fullmatch(name) is None or ".." in name:
        raise ProbeError(
            f"{quote(name)} cannot name a probe; use 1 to {MAX_NAME} of A-Z a-z 0-9 . _ : / @ + -, "
            "not starting with . or / and without .."
        )


# Checks of single fields: each returns the value, or raises ProbeError.


def check_number(name: str, field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating):
        raise ProbeError(f"probe {name}: {field} is {quote(value)}; give a number")
    if is_number(value):
        return float(value)
    raise ProbeError(
        f"probe {name}: {field} is {quote(value)}; give a finite number, "
        f"at most {MAX_NUMBER:g} in size"
    )


def check_direction(what: str, given: object) -> NDArray[np.float32]:
    """Check a direction, and return a read-only copy: the caller keeps its array."""
    if not isinstance(given, np.ndarray) or given.dtype != np.float32 or given.ndim != 1:
        kind, shape = getattr(given, "dtype", type(given).__name__), getattr(given, "shape", "")
        raise ProbeError(f"{what} is {kind}{shape}; give a float32 array of one dimension")
    if not 1 <= given.shape[0] <= MAX_WIDTH:
        raise ProbeError(
            f"{what} has {given.shape[0]} numbers; give 1 to {MAX_WIDTH}, "
            "one for each dimension of the model"
        )
    if not np.isfinite(given).all():
        raise ProbeError(f"{what} holds NaN or infinity; make it again")
    if not given.any():
        raise ProbeError(f"{what} is all zeros and does nothing; make it again, or leave it out")
    length = row_length(given)
    if not is_row_length(length):
        raise ProbeError(
            f"{what} has length {length:.3g}, and the engine computes in float32; scale it to a "
            f"length of {ROW_LENGTHS}"
        )
    copied = np.array(given, dtype="<f4", order="C")
    copied.setflags(write=False)
    return copied


def check_directions(names: Sequence[str], given_PD: NDArray[np.float32]) -> NDArray[np.float32]:
    """As `check_direction`, for one row per probe, in one pass over all of them.

    Rows that are already read-only are not copied.
    """
    for at in np.flatnonzero(~are_usable(given_PD)).tolist():
        check_direction(f"probe {names[at]}: direction", given_PD[at])
    if not given_PD.flags.writeable:
        return given_PD
    copied = np.array(given_PD, dtype="<f4", order="C")
    copied.setflags(write=False)
    return copied


def are_usable(given_PD: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Whether each row is certainly finite and of a usable length; look closer at the others.

    NaN and infinity survive in the sum of squares, and so does a number too large to be squared.
    """
    with np.errstate(all="ignore"):
        # Row times column goes to BLAS, which reads memory several times as fast as einsum.
        square_P: NDArray[np.float32] = (given_PD[:, None, :] @ given_PD[:, :, None]).reshape(-1)
        # A sum in float32 is not exact: rows within a thousandth of a bound are looked at again.
        return (square_P > _LEAST_SQUARE) & (square_P < _MOST_SQUARE)


def check_optional_number(name: str, field: str, value: object) -> float | None:
    return None if value is None else check_number(name, field, value)


def check_optional_text(name: str, field: str, value: object, *, limit: int) -> str | None:
    if value is None:
        return None
    if isinstance(value, str) and 1 <= len(value) <= limit and value.isprintable():
        return value
    raise ProbeError(
        f"probe {name}: {field} is {quote(value)}; give 1 to {limit} printable characters, "
        "or leave it out"
    )


def check_calibration(name: str, value: object) -> tuple[float, float] | None:
    if value is None:
        return None
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ProbeError(f"probe {name}: calibration is {quote(value)}; give (low, high)")
    return _check_range(name, "calibration", value[0], value[1])


def check_auroc(name: str, value: object) -> float | None:
    if value is None:
        return None
    area = check_number(name, "auroc", value)
    if 0 <= area <= 1:
        return area
    raise ProbeError(f"probe {name}: auroc is {area}; give 0 to 1, or leave it out")


def check_histogram(name: str, value: object) -> control_messages.Histogram | None:
    if value is None:
        return None
    if not isinstance(value, control_messages.Histogram):
        raise ProbeError(f"probe {name}: histogram is {quote(value)}; give a wire.Histogram")
    low, high = _check_range(name, "histogram", value.low, value.high)
    counts = value.counts
    if not isinstance(counts, tuple | list) or not MIN_BINS <= len(counts) <= MAX_BINS:
        raise ProbeError(
            f"probe {name}: histogram has counts {quote(counts)}; give {MIN_BINS} to {MAX_BINS}"
        )
    # type() and not isinstance(): true and false are ints to isinstance.
    if not all(type(count) is int and 0 <= count <= MAX_COUNT for count in counts):
        raise ProbeError(
            f"probe {name}: histogram counts must be whole numbers of 0 to {MAX_COUNT}; count again"
        )
    if not any(counts):
        raise ProbeError(f"probe {name}: histogram counts nothing; leave it out")
    return control_messages.Histogram(low, high, tuple(counts))


def _check_range(name: str, field: str, *ends: object) -> tuple[float, float]:
    low, high = (check_number(name, field, end) for end in ends)
    if low < high:
        return low, high
    raise ProbeError(f"probe {name}: {field} runs from {low} to {high}; low must be below high")
