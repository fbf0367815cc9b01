"""Takes a Probe, gives the bytes of its safetensors file; and back, from bytes nobody vouches for.

The file holds one tensor, `direction` [D], and string metadata: clairai="probe/1", name, point,
and where set bias, activation, threshold, calibration ("low,high"), model, description, auroc and
histogram ("low,high,count,count,...").
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, cast

import numpy as np
import safetensors
from numpy.typing import NDArray

from clairai import wire
from clairai.errors import ProbeError
from clairai.points import Point, quote
from clairai.probe.envelope import METADATA, Kind, fields, pack, unpack
from clairai.probe.model import MAX_WIDTH, Probe
from clairai.probe.parse import within

FORMAT: Final = "probe/1"
MAX_NBYTES: Final = 16 << 20
MAX_HEADER: Final = 64 << 10
KIND: Final = Kind(
    noun="probe",
    format=FORMAT,
    max_nbytes=MAX_NBYTES,
    max_header=MAX_HEADER,
    other="this is not a clairai probe: make one with clairai.probe.files.save",
    again="save the probe again with clairai.probe.files.save",
)

_COUNT: Final = re.compile(r"0|[1-9][0-9]{0,12}")
_NUMBER: Final = re.compile(r"-?[0-9]{1,40}(?:\.[0-9]{1,40})?(?:[eE][+-]?[0-9]{1,4})?")


def dumps(probe: Probe) -> bytes:
    """The file's bytes; equal probes give equal bytes."""
    body = probe.direction_D.astype("<f4").tobytes()
    tensor = {"dtype": "F32", "shape": [probe.width], "data_offsets": [0, len(body)]}
    return pack({METADATA: _metadata(probe), "direction": tensor}, body)


def loads(data: bytes, *, source: str) -> Probe:
    """The probe in `data`; `source` names it in errors. Raises ProbeError, whatever the bytes."""
    with within(source):
        header, nbytes = unpack(data, KIND)
        said = fields(header.get(METADATA), KIND)
        _check_tensor(header, nbytes)
        return _probe(said, _direction(data))


def _metadata(probe: Probe) -> dict[str, str]:
    said = {"clairai": FORMAT, "name": probe.name, "point": str(probe.point)}
    said |= {"bias": repr(probe.bias), "activation": probe.activation}
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
    return said | {key: value for key, value in optional.items() if value is not None}


def _joined(numbers: Iterable[float]) -> str:
    return ",".join(map(repr, numbers))


def _check_tensor(header: dict[str, object], nbytes: int) -> None:
    # Stricter than safetensors, and first: the library never sees a header we would refuse.
    tensor = header.get("direction")
    if len(header) != 2 or not isinstance(tensor, dict):
        names = quote(", ".join(sorted(header.keys() - {METADATA})))
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


def _probe(said: dict[str, str], direction_D: NDArray[np.float32]) -> Probe:
    calibration = said.get("calibration")
    ends = None if calibration is None else [number(end) for end in calibration.split(",")]
    return Probe(
        name=_required(said, "name"),
        point=Point.parse(_required(said, "point")),
        direction_D=direction_D,
        bias=number(said.get("bias", "0.0")),
        activation=cast(wire.Activation, said.get("activation", "none")),  # Probe checks it
        threshold=number(said["threshold"]) if "threshold" in said else None,
        calibration=cast(tuple[float, float] | None, ends),  # Probe checks it
        model=said.get("model"),
        description=said.get("description"),
        auroc=number(said["auroc"]) if "auroc" in said else None,
        histogram=_histogram(said["histogram"]) if "histogram" in said else None,
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
