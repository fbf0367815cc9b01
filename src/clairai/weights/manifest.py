"""The manifest of a transfer: which tensor is where in which buffer, as JSON.

Nothing in it is trusted: every number is bounded here, and check_manifest.py compares it with the
engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal, get_args

import msgspec

from clairai.errors import WeightsError, printable

VERSION: Final = 1
# Smaller GPU allocations share a block, and a handle opens the whole block.
GRANULE_BYTES: Final = 2 << 20
ALIGNMENT: Final = 256
MAX_MANIFEST_BYTES: Final = 32 << 20
MAX_TENSORS: Final = 1 << 17
MAX_BUFFERS: Final = 1 << 12
_MAX_DIMENSIONS: Final = 8
MAX_NAME: Final = 512
MAX_I64: Final = (1 << 63) - 1
CPU: Final = "cpu"
PROBE_PREFIX: Final = "probe::"
STEER_PREFIX: Final = "steer::"

Dtype = Literal["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "F8_E4M3"]
ITEM_BYTES: Final[dict[str, int]] = dict(
    zip(get_args(Dtype), (8, 4, 2, 2, 8, 4, 2, 1, 1, 1, 1), strict=True)
)
_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_I64)]
_Hex16 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
_Hex32 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
_Device = Annotated[str, msgspec.Meta(pattern=r"^(cpu|[0-9a-f]{32})\Z")]
MAX_RANKS: Final = 1 << 10


class PlannedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor, dense and in C order, in one buffer."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
    dtype: Dtype
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=_MAX_DIMENSIONS)]
    buffer: Annotated[int, msgspec.Meta(ge=0, lt=MAX_BUFFERS)]
    offset: _Size
    nbytes: _Size
    checksum: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{16})?\Z")] = ""  # none in a plan


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One transfer, which takes effect as a whole or not at all."""

    version: Literal[1]
    transfer: _Hex32
    epoch: _Hex16  # of the target engine
    # Of the buffers; of each rank's own, if the ranks of the engine have several GPUs.
    device: _Device | Annotated[tuple[_Device, ...], msgspec.Meta(max_length=MAX_RANKS)]
    buffers: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_BUFFERS)]  # bytes of each
    tensors: Annotated[tuple[PlannedTensor, ...], msgspec.Meta(max_length=MAX_TENSORS)]
    label: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:/@+-]{0,128}\Z")] = ""


_DECODER: Final = msgspec.json.Decoder(Manifest)


def parse_manifest(raw: bytes) -> Manifest:
    """Decode a manifest; WeightsError if it is malformed or too long."""
    if len(raw) > MAX_MANIFEST_BYTES:
        raise WeightsError(
            f"the manifest has {len(raw)} bytes, may have {MAX_MANIFEST_BYTES}; send less at once"
        )
    try:
        return _DECODER.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(
            f"this is no manifest of version {VERSION}: {printable(error)}; use the "
            "Sender of the same clairai"
        ) from None


def encode_manifest(manifest: Manifest) -> bytes:
    return msgspec.json.encode(manifest)


def for_rank(manifest: Manifest, rank: int, num_ranks: int) -> Manifest:
    """The manifest as one rank sees it: `device` is where its own buffers are."""
    if isinstance(manifest.device, str):
        return manifest
    if len(manifest.device) != num_ranks:
        raise WeightsError(
            f"buffers for {len(manifest.device)} ranks, and the engine has {num_ranks}; ask it "
            f"again"
        )
    return msgspec.structs.replace(manifest, device=manifest.device[rank])


def kind_of(name: str) -> str:
    """`probe`, `steer` or `model`."""
    for prefix in (PROBE_PREFIX, STEER_PREFIX):
        if name.startswith(prefix):
            return prefix.removesuffix("::")
    return "model"


def changes_model(manifest: Manifest) -> bool:
    """True if answers change: probes only watch, and vectors act only where they are named."""
    return any(kind_of(tensor.name) == "model" for tensor in manifest.tensors)


def content_digest(tensors: Iterable[PlannedTensor]) -> str:
    """A digest of the tensors' content, independent of how they were packed."""
    parts = sorted((t.name, t.dtype, t.shape, t.checksum) for t in tensors)
    return hashlib.blake2b(msgspec.msgpack.encode(parts), digest_size=16).hexdigest()


def round_up(offset: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-offset // step) * step


def bank_name(names: Sequence[str]) -> str:
    """The name of the tensor that holds all directions of a bank, made of the probes in order.

    A bank with other probes, or in another order, expects no such tensor, so that no row can reach
    the wrong probe. No probe's own name begins with a slash.
    """
    content = hashlib.blake2b(msgspec.msgpack.encode(tuple(names)), digest_size=8)
    return f"{PROBE_PREFIX}/{content.hexdigest()}"


def bank(names: Sequence[str], rows_PD: Any) -> dict[str, Any]:
    """New directions of a whole bank for Sender.send; `names` in the order of GET /v1/probes.

    `rows_PD` is float32, a row for each name. Hundreds of probes take as long as one.
    """
    if len(set(names)) != len(names) or tuple(rows_PD.shape[:1]) != (len(names),):
        raise WeightsError(
            f"{len(names)} names, {len(set(names))} of them different, and rows of shape "
            f"{list(rows_PD.shape)}; give each name once, and a row for each"
        )
    return {bank_name(names): rows_PD}
