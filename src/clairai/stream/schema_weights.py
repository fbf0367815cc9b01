"""The JSON of new weights, as models. Takes nothing; gives what document.py puts into the document.

The proxy hands a manifest on as it came: what is wrong with one the engine says.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Answer(BaseModel):
    """The engine's own; it may say more."""

    model_config = ConfigDict(extra="allow")


class WeightsState(_Answer):
    """The weights that serve."""

    version: int = Field(description="counts hand-overs; 0: those the engine was started with")
    label: str
    digest: str = Field(description="of the content; empty if nobody handed it over")
    epoch: str
    device: str = Field(description='"cpu", or a GPU\'s UUID')
    num_tensors: int
    is_torn: bool = Field(description="a load stopped half-way; nobody is served")


class SendableTensor(_Answer):
    name: str
    dtypes: list[str]
    shape: list[int]


class TensorList(_Answer):
    """What can be sent."""

    data: list[SendableTensor]


class ManifestTensor(_Model):
    """One tensor, dense and in C order, in one buffer."""

    name: str
    dtype: str
    shape: list[int]
    buffer: int
    offset: int
    nbytes: int
    checksum: str = ""


class WeightsManifest(_Model):
    """One hand-over: all of it takes effect at once, or none."""

    version: Literal[1]
    transfer: str = Field(pattern="^[0-9a-f]{32}$")
    epoch: str = Field(pattern="^[0-9a-f]{16}$")
    device: str
    buffers: list[int]
    tensors: list[ManifestTensor]
    label: str = ""


class WeightsPlanned(_Answer):
    """The plan is good."""

    transfer: str
    nbytes: int


class WeightsCommitted(_Answer):
    """They serve."""

    version: int
    digest: str
    nbytes: int
    load_s: float
    bank_version: int | None = Field(None, description="of the probes, if any came along")
    vectors_version: int | None = Field(None, description="of steering vectors, likewise")


PARTS = (WeightsManifest,)
