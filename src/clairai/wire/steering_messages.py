"""Control messages about steering, answered by the engine core."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class ListedVector(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What users see of a steering vector."""

    name: str
    points: tuple[str, ...]
    width: int
    digest: str  # of its content
    norms: Annotated[tuple[float, ...], msgspec.Meta(description="one for each point")]
    description: str | None = None
    method: str | None = None  # how it was made
    scale: Annotated[float, msgspec.Meta(description="suggested")] = 1.0


class ListVectors(msgspec.Struct, frozen=True, tag="list_vectors", forbid_unknown_fields=True):
    """Which steering vectors are there?"""


class GetVector(msgspec.Struct, frozen=True, tag="get_vector", forbid_unknown_fields=True):
    """The file of one vector."""

    name: str


class PutVectors(msgspec.Struct, frozen=True, tag="put_vectors", forbid_unknown_fields=True):
    """Store these vectors (safetensors) by name; all of them, or none and a Refusal.

    `add` refuses a name that exists, `replace` one that does not.
    """

    files: tuple[bytes, ...]
    mode: Literal["add", "replace", "put"] = "put"


class RemoveVectors(msgspec.Struct, frozen=True, tag="remove_vectors", forbid_unknown_fields=True):
    """Remove these vectors; all of them, or none. Running requests keep theirs."""

    names: tuple[str, ...]


class GetSteering(msgspec.Struct, frozen=True, tag="get_steering", forbid_unknown_fields=True):
    """What steers every request?"""


class SetSteering(msgspec.Struct, frozen=True, tag="set_steering", forbid_unknown_fields=True):
    """Steer every new request like this; a tier is a JSON list, None leaves it as it is."""

    base: bytes | None = None
    prefill: bytes | None = None
    decode: bytes | None = None


class ChangeSteering(msgspec.Struct, frozen=True, tag="amend", forbid_unknown_fields=True):
    """Change the steering of a running request; `steer` is a JSON list."""

    stream: int
    steer: bytes


class WhyRefused(msgspec.Struct, frozen=True, tag="why_refused", forbid_unknown_fields=True):
    """Why was the last request of this stream refused?"""

    stream: int


SteeringControl = (
    ListVectors
    | GetVector
    | PutVectors
    | RemoveVectors
    | GetSteering
    | SetSteering
    | ChangeSteering
    | WhyRefused
)


class VectorState(msgspec.Struct, frozen=True, tag="vector_state", forbid_unknown_fields=True):
    """The vectors after what was asked, and the limits."""

    version: int
    vectors: tuple[ListedVector, ...]
    points: tuple[str, ...]  # that can be steered
    width: int
    rows: int  # of vectors and gates that unfinished requests can use at once
    programs: int  # ways to steer a row that they can use at once


class VectorFile(msgspec.Struct, frozen=True, tag="vector_file", forbid_unknown_fields=True):
    """A vector as safetensors."""

    name: str
    digest: str
    data: bytes


class SteeringState(msgspec.Struct, frozen=True, tag="steering_state", forbid_unknown_fields=True):
    """What steers every request; each tier a JSON list."""

    version: int
    base: bytes
    prefill: bytes
    decode: bytes


class SteeringChanged(msgspec.Struct, frozen=True, tag="amended", forbid_unknown_fields=True):
    """The position from which each of the stream's running requests is steered anew.

    Empty if none runs in this engine core; another one may run it.
    """

    positions: tuple[int, ...]
    applied: bytes  # a JSON list


class RefusalReason(msgspec.Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    """Why a request was refused; both empty if the core does not remember one."""

    code: str
    reason: str


SteeringReply = VectorState | VectorFile | SteeringState | SteeringChanged | RefusalReason
