"""Takes the parts of one linear probe; gives a checked, frozen `Probe` and its exact scores."""

# T = tokens, D = model width

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

from clairai import wire
from clairai.errors import ProbeError
from clairai.points import Point, quote
from clairai.probe import checks
from clairai.probe.checks import MAX_WIDTH as MAX_WIDTH

MAX_NAME: Final = 128
ACTIVATIONS: Final[tuple[wire.Activation, ...]] = get_args(wire.Activation)

NAME: Final = re.compile(rf"[A-Za-z0-9_:@+-][A-Za-z0-9._:/@+-]{{0,{MAX_NAME - 1}}}")


@dataclass(frozen=True, eq=False)
class Probe:
    """`activation(hidden @ direction + bias)` at one point; two probes are equal by content."""

    name: str
    point: Point
    direction_D: NDArray[np.float32]
    bias: float = 0.0
    activation: wire.Activation = "none"
    threshold: float | None = None
    calibration: tuple[float, float] | None = None  # low and high end of the usual scores
    model: str | None = None  # the model it was made for
    # For people: what follows changes neither the score nor how it is read.
    description: str | None = None
    auroc: float | None = None  # on documents that neither the fit nor a choice has seen
    histogram: wire.Histogram | None = None  # of the scores on a reference set

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
        model = checks.optional_text(name, "model", self.model, limit=checks.MAX_MODEL)
        described = checks.optional_text(
            name, "description", self.description, limit=checks.MAX_DESCRIPTION
        )
        return {
            "direction_D": checks.direction(f"probe {name}: direction", self.direction_D),
            "bias": checks.number(name, "bias", self.bias),
            "threshold": checks.optional_number(name, "threshold", self.threshold),
            "calibration": checks.calibration(name, self.calibration),
            "model": model,
            "description": described,
            "auroc": checks.auroc(name, self.auroc),
            "histogram": checks.histogram(name, self.histogram),
        }

    @property
    def width(self) -> int:
        return int(self.direction_D.shape[0])

    @cached_property
    def digest(self) -> str:
        """BLAKE2b-128 of all that decides a score and how it is read, name included.

        What is only told to people is left out: kept scores still match a probe whose description
        was mended, and files from before descriptions keep the digest they had.
        """
        content = hashlib.blake2b(self._header, digest_size=16)
        content.update(self.direction_D.data)
        return content.hexdigest()

    @cached_property
    def _header(self) -> bytes:
        """All but the direction; a probe with another direction has the same."""
        fields = (self.name, str(self.point), self.bias, self.activation)
        header = json.dumps([*fields, self.threshold, self.calibration, self.model])
        return header.encode() + b"\0"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Probe):
            return NotImplemented
        return self.digest == other.digest and self._told() == other._told()

    def __hash__(self) -> int:
        return hash(self.digest)

    def _told(self) -> tuple[object, ...]:
        return self.description, self.auroc, self.histogram

    def apply(self, hidden_TD: NDArray[np.floating]) -> NDArray[np.floating]:
        """Scores as they should be: summed in float64, given back as wide as `hidden_TD`."""
        if hidden_TD.ndim != 2 or hidden_TD.shape[1] != self.width:
            raise ProbeError(
                f"probe {self.name} has width {self.width} and the rows have shape "
                f"{hidden_TD.shape}; give rows of shape (tokens, {self.width})"
            )
        with np.errstate(all="ignore"):  # a row that overflowed in the model scores inf or nan
            scores_T = hidden_TD.astype(np.float64) @ self.direction_D.astype(np.float64)
            scores_T = _activate(self.activation, scores_T + self.bias)
            return scores_T.astype(np.result_type(hidden_TD.dtype, np.float32))

    def info(self) -> wire.ProbeInfo:
        """What a reader is told of this probe's column."""
        return wire.ProbeInfo(
            name=self.name,
            point=str(self.point),
            activation=self.activation,
            threshold=self.threshold,
            calibration=self.calibration,
            digest=self.digest,
        )

    def listed(self) -> wire.ListedProbe:
        """`info`, and what people are told besides."""
        return wire.ListedProbe(
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


def redirected(probes: Sequence[Probe], rows_PD: NDArray[np.float32]) -> tuple[Probe, ...]:
    """The same probes with other directions, a row for each; nothing else is looked at again."""
    return turned(probes, checked_rows([probe.name for probe in probes], rows_PD))


def checked_rows(names: Sequence[str], rows_PD: NDArray[np.float32]) -> NDArray[np.float32]:
    """A direction for each of these probes, which nobody can write to; ProbeError for others."""
    if rows_PD.ndim != 2 or rows_PD.dtype != np.float32 or len(rows_PD) != len(names):
        raise ProbeError(
            f"directions are {rows_PD.dtype}{rows_PD.shape}; give a row of float32 for each of "
            f"{len(names)} probes"
        )
    return checks.directions(names, rows_PD)


def turned(probes: Sequence[Probe], checked_PD: NDArray[np.float32]) -> tuple[Probe, ...]:
    """As `redirected`, to rows that were checked where they came from and that nobody changes."""
    return tuple(map(_turned, probes, checked_PD))


def _turned(probe: Probe, direction_D: NDArray[np.float32]) -> Probe:
    made: Probe = object.__new__(Probe)  # not by __init__: a bank of hundreds is made in no time
    fields = probe.__dict__.copy()
    fields["direction_D"] = direction_D
    fields.pop("digest", None)  # of the old one
    object.__setattr__(made, "__dict__", fields)
    return made


def _activate(activation: wire.Activation, scores_T: NDArray[np.float64]) -> NDArray[np.float64]:
    if activation == "relu":
        return np.maximum(scores_T, 0.0)
    if activation == "sigmoid":
        # 1 / (1 + exp(-x)) overflows for large negative x; tanh does not.
        return 0.5 * (1.0 + np.tanh(0.5 * scores_T))
    return scores_T


def _check_name(name: object) -> None:
    # A name is shown, sent and may become a file's name: nothing that could climb a path.
    if not isinstance(name, str) or NAME.fullmatch(name) is None or ".." in name:
        raise ProbeError(
            f"{quote(name)} cannot name a probe; use 1 to {MAX_NAME} of A-Z a-z 0-9 . _ : / @ + -, "
            "not starting with . or / and without .."
        )
