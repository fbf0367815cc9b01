"""Takes a Probe, gives the bytes of its safetensors file; and back, from bytes nobody vouches for.

The file holds one tensor, `direction` [D], and string metadata: clairai="probe/1", name, point,
and where set bias, activation, threshold, calibration ("low,high"), model, description, auroc and
histogram ("low,high,count,count,...").
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable
from typing import Final, cast

import numpy as np
import safetensors
from numpy.typing import NDArray

from clairai import wire
from clairai.errors import ProbeError
from clairai.points import Point, quote
from clairai.probe.model import MAX_WIDTH, Probe
from clairai.probe.parse import strict_object, within

FORMAT: Final = "probe/1"
MAX_NBYTES: Final = 16 << 20
MAX_HEADER: Final = 64 << 10
MAX_KEYS: Final = 32
MAX_VALUE: Final = 1024

_LENGTH: Final = struct.Struct("<Q")
_COUNT: Final = re.compile(r"0|[1-9][0-9]{0,12}")
_NUMBER: Final = re.compile(r"-?[0-9]{1,40}(?:\.[0-9]{1,40})?(?:[eE][+-]?[0-9]{1,4})?")


def dumps(probe: Probe) -> bytes:
    """The file's bytes; equal probes give equal bytes."""
    # safetensors' own writer puts metadata in a random order, so the header is written here.
    body = probe.direction_D.astype("<f4").tobytes()
    tensor = {"dtype": "F32", "shape": [probe.width], "data_offsets": [0, len(body)]}
    header = {"__metadata__": _metadata(probe), "direction": tensor}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the numbers aligned, as safetensors does
    return _LENGTH.pack(len(text)) + text + body


def loads(data: bytes, *, source: str) -> Probe:
    """The probe in `data`; `source` names it in errors. Raises ProbeError, whatever the bytes."""
    with within(source):
        if len(data) > MAX_NBYTES:
            raise ProbeError(f"{len(data)} bytes, and a probe has at most {MAX_NBYTES}")
        header, offset = _header(data)
        fields = _fields(header.get("__metadata__"))
        _check_tensor(header, len(data) - offset)
        return _probe(fields, _direction(data))


def _metadata(probe: Probe) -> dict[str, str]:
    fields = {"clairai": FORMAT, "name": probe.name, "point": str(probe.point)}
    fields |= {"bias": repr(probe.bias), "activation": probe.activation}
    histogram = probe.histogram
    bins = None if histogram is None else (histogram.low, histogram.high, *histogram.counts)
    optional = {
        "threshold": None if probe.threshold is None else repr(probe.threshold),
        "calibration": None if probe.calibration is None else _joined(probe.calibration),
        "model": probe.model,
        "description": probe.description,
        "auroc": None if probe.auroc is None else repr(probe.auroc),
        "histogram": None if bins is None else _joined(bins),
    }
    fields |= {key: value for key, value in optional.items() if value is not None}
    return fields


def _joined(numbers: Iterable[float]) -> str:
    return ",".join(map(repr, numbers))


def _header(data: bytes) -> tuple[dict[str, object], int]:
    """The header, and where the numbers start."""
    if len(data) < _LENGTH.size:
        raise ProbeError(f"{len(data)} bytes is too short for safetensors; copy the file again")
    (length,) = _LENGTH.unpack_from(data)
    if length > MAX_HEADER:
        raise ProbeError(
            f"header of {length} bytes, and a probe has at most {MAX_HEADER}; "
            "this is not a clairai probe: make one with clairai.probe.files.save"
        )
    offset = _LENGTH.size + length
    if offset > len(data):
        raise ProbeError(f"cut short: {len(data)} of at least {offset} bytes; copy the file again")
    return strict_object(data[_LENGTH.size : offset]), offset


def _fields(metadata: object) -> dict[str, str]:
    if not isinstance(metadata, dict) or metadata.get("clairai") != FORMAT:
        found = metadata.get("clairai") if isinstance(metadata, dict) else None
        raise ProbeError(
            f"metadata says clairai={quote(found)}, and this version reads {FORMAT}; "
            "save the probe again with clairai.probe.files.save"
        )
    if len(metadata) > MAX_KEYS:
        raise ProbeError(f"{len(metadata)} metadata keys, and a probe has at most {MAX_KEYS}")
    for key, value in metadata.items():
        if not isinstance(value, str) or len(value) > MAX_VALUE or len(key) > MAX_VALUE:
            raise ProbeError(
                f"metadata {quote(key)} must be text of at most {MAX_VALUE} characters"
            )
    return cast(dict[str, str], metadata)


def _check_tensor(header: dict[str, object], nbytes: int) -> None:
    # Stricter than safetensors, and first: the library never sees a header we would refuse.
    tensor = header.get("direction")
    if len(header) != 2 or not isinstance(tensor, dict):
        names = quote(", ".join(sorted(header.keys() - {"__metadata__"})))
        raise ProbeError(f"holds the tensors {names}; a probe file holds one, named direction")
    dtype, shape = tensor.get("dtype"), tensor.get("shape")
    itemsize = _itemsize(dtype)
    if not isinstance(shape, list) or len(shape) != 1 or type(shape[0]) is not int:
        raise ProbeError(f"direction has shape {quote(shape)}; give one dimension, [width]")
    if not 1 <= shape[0] <= MAX_WIDTH:
        raise ProbeError(f"direction has width {quote(shape[0])}; give 1 to {MAX_WIDTH}")
    extent = [0, shape[0] * itemsize]
    if tensor.get("data_offsets") != extent or nbytes != extent[1] or len(tensor) != 3:
        raise ProbeError(
            f"direction of width {shape[0]} needs {extent[1]} bytes and the file has {nbytes}, "
            "or its header says otherwise; copy the file again"
        )


def _itemsize(dtype: object) -> int:
    if dtype == "F32":
        return 4
    if dtype in ("F16", "BF16"):
        return 2
    raise ProbeError(f"direction has dtype {quote(dtype)}; use F32, F16 or BF16")


def _direction(data: bytes) -> NDArray[np.float32]:
    try:
        ((_, tensor),) = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise ProbeError(f"safetensors refuses it ({error}); save the probe again") from None
    with np.errstate(all="ignore"):  # NaN is refused by the probe, in words
        return float32(tensor["dtype"], bytes(tensor["data"]))


def float32(dtype: str, body: bytes) -> NDArray[np.float32]:
    """The numbers of a tensor of any of the dtypes that are read."""
    if dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(body, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(body, "<f2" if dtype == "F16" else "<f4").astype(np.float32)


def _probe(fields: dict[str, str], direction_D: NDArray[np.float32]) -> Probe:
    calibration = fields.get("calibration")
    ends = None if calibration is None else [number(end) for end in calibration.split(",")]
    return Probe(
        name=_required(fields, "name"),
        point=Point.parse(_required(fields, "point")),
        direction_D=direction_D,
        bias=number(fields.get("bias", "0.0")),
        activation=cast(wire.Activation, fields.get("activation", "none")),  # Probe checks it
        threshold=number(fields["threshold"]) if "threshold" in fields else None,
        calibration=cast(tuple[float, float] | None, ends),  # Probe checks it
        model=fields.get("model"),
        description=fields.get("description"),
        auroc=number(fields["auroc"]) if "auroc" in fields else None,
        histogram=_histogram(fields["histogram"]) if "histogram" in fields else None,
    )


def _histogram(text: str) -> wire.Histogram:
    low, _, rest = text.partition(",")
    high, _, counts = rest.partition(",")
    return wire.Histogram(number(low), number(high), tuple(map(_whole, counts.split(","))))


def _required(fields: dict[str, str], key: str) -> str:
    if key not in fields:
        raise ProbeError(f"metadata has no {key}; save the probe again with {key} set")
    return fields[key]


def number(text: str) -> float:
    """A number in metadata, in digits and nothing else."""
    if _NUMBER.fullmatch(text) is None:
        raise ProbeError(f"{quote(text)} is not a number; write it as 0.5 or 5e-1")
    return float(text)


def _whole(text: str) -> int:
    if _COUNT.fullmatch(text) is None:
        raise ProbeError(f"{quote(text)} is not a count; write it as 0 or 17")
    return int(text)
