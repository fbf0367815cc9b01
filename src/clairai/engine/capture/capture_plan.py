"""The capture plan: what one request gives, resolved by the engine core and carried to the worker.

Everything in it is content: points by name, absolute positions, an encoder with all parameters.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from clairai.fields.ranges import Range

AnswerId = tuple[int, int]  # stream and choice


class KeepThreshold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows are kept only if this probe scores some token at or above the threshold."""

    probe: str
    threshold: float


class CapturePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rows of one answer at these points and positions, encoded so, for these consumers."""

    points: tuple[str, ...]  # in path order
    ranges: tuple[Range, ...]  # sorted, disjoint, not empty
    encoder: str
    parameters: tuple[tuple[str, int | str], ...]  # all of the encoder's, in its order
    to: tuple[str, ...]
    tags: str = "{}"  # a JSON object, like steering
    steering: str = "{}"
    adapter: str | None = None  # name of the request's LoRA adapter
    hold: KeepThreshold | None = None
    label: str | None = None  # the caller's own name for the request
    owner: str | None = None  # name of the API key that made it

    @property
    def first_position(self) -> int:
        """From here on every token must be forwarded; a threshold needs the scores of all."""
        return self.ranges[0][0] if self.hold is None else 0

    @property
    def format_key(self) -> tuple[Any, ...]:
        """Plans with equal keys are copied and encoded together."""
        return (self.encoder, self.parameters, self.points, self.to)


PLAN_ENCODER: Final = msgspec.msgpack.Encoder()
PLAN_DECODER: Final = msgspec.msgpack.Decoder(CapturePlan)
