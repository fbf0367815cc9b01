"""Takes one field of a probe as somebody gave it; gives it checked, or a ProbeError in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai import wire
from clairai.errors import ProbeError
from clairai.points import quote

MAX_WIDTH: Final = 1_000_000
MAX_MODEL: Final = 256
MAX_DESCRIPTION: Final = 500
MIN_BINS: Final = 8
MAX_BINS: Final = 64
MAX_COUNT: Final = 10**12  # 64 of them fit one value of a file's metadata

_LARGEST: Final = float(np.finfo(np.float32).max)


def number(name: str, field: str, value: object) -> float:
    # Scores are float32 in the engine: what is beyond float32 would be infinity there.
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating):
        raise ProbeError(f"probe {name}: {field} is {quote(value)}; give a number")
    if -_LARGEST <= value <= _LARGEST:  # false for NaN too
        return float(value)
    raise ProbeError(
        f"probe {name}: {field} is {quote(value)}; give a finite number, "
        f"at most {_LARGEST:.3g} in size"
    )


def direction(what: str, given: object) -> NDArray[np.float32]:
    """Finite numbers, one for each dimension; a copy, for the caller's array stays the caller's."""
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
    copied = np.array(given, dtype="<f4", order="C")
    copied.setflags(write=False)
    return copied


def directions(names: Sequence[str], given_PD: NDArray[np.float32]) -> NDArray[np.float32]:
    """As `direction`, for a row of each probe; one look at all of them finds a bad one.

    Numbers that nobody can write to any more are not copied.
    """
    for at in np.flatnonzero(~are_good(given_PD)).tolist():
        direction(f"probe {names[at]}: direction", given_PD[at])
    if not given_PD.flags.writeable:
        return given_PD
    copied = np.array(given_PD, dtype="<f4", order="C")
    copied.setflags(write=False)
    return copied


def are_good(given_PD: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Rows that are surely finite and not all zeros, in one pass; any other is to be looked at.

    A NaN or an infinity stays one in the sum of squares; so does a number too large to be squared.
    """
    with np.errstate(all="ignore"):
        # Row by column: BLAS, which reads memory several times as fast as einsum.
        square_P: NDArray[np.float32] = (given_PD[:, None, :] @ given_PD[:, :, None]).reshape(-1)
        return np.isfinite(square_P) & (square_P > 0)


def optional_number(name: str, field: str, value: object) -> float | None:
    return None if value is None else number(name, field, value)


def optional_text(name: str, field: str, value: object, *, limit: int) -> str | None:
    if value is None:
        return None
    if isinstance(value, str) and 1 <= len(value) <= limit and value.isprintable():
        return value
    raise ProbeError(
        f"probe {name}: {field} is {quote(value)}; give 1 to {limit} printable characters, "
        "or leave it out"
    )


def calibration(name: str, value: object) -> tuple[float, float] | None:
    if value is None:
        return None
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ProbeError(f"probe {name}: calibration is {quote(value)}; give (low, high)")
    return _range(name, "calibration", value[0], value[1])


def auroc(name: str, value: object) -> float | None:
    if value is None:
        return None
    area = number(name, "auroc", value)
    if 0 <= area <= 1:
        return area
    raise ProbeError(f"probe {name}: auroc is {area}; give 0 to 1, or leave it out")


def histogram(name: str, value: object) -> wire.Histogram | None:
    if value is None:
        return None
    if not isinstance(value, wire.Histogram):
        raise ProbeError(f"probe {name}: histogram is {quote(value)}; give a wire.Histogram")
    low, high = _range(name, "histogram", value.low, value.high)
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
    return wire.Histogram(low, high, tuple(counts))


def _range(name: str, field: str, *ends: object) -> tuple[float, float]:
    low, high = (number(name, field, end) for end in ends)
    if low < high:
        return low, high
    raise ProbeError(f"probe {name}: {field} runs from {low} to {high}; low must be below high")
