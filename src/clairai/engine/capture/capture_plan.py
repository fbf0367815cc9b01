"""Takes nothing of ours; gives an order: what one request must give, as it travels to the worker.

Everything in it is content: points by name, absolute positions, an encoder with all its parameters.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from clairai.fields.ranges import Range


class KeepThreshold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows are kept only if this probe's score of some token is at or above the threshold."""

    probe: str
    threshold: float


class CapturePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All rows of one answer at these points and positions, encoded so, for these consumers."""

    points: tuple[str, ...]  # in path order
    ranges: tuple[Range, ...]  # sorted, apart from each other, none empty
    encoder: str
    parameters: tuple[tuple[str, int | str], ...]  # all of the encoder's, in its order
    to: tuple[str, ...]
    tags: str = "{}"  # JSON objects
    steering: str = "{}"
    adapter: str | None = None  # whose weights were added to the model's
    hold: KeepThreshold | None = None

    @property
    def first_position(self) -> int:
        """From here on all tokens must be forwarded; a rule looks at every one of them."""
        return self.ranges[0][0] if self.hold is None else 0

    @property
    def kind(self) -> tuple[Any, ...]:
        """Requests of one kind are taken together."""
        return (self.encoder, self.parameters, self.points, self.to)


PLAN_ENCODER: Final = msgspec.msgpack.Encoder()
PLAN_DECODER: Final = msgspec.msgpack.Decoder(CapturePlan)
