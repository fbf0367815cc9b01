"""Probe files: safetensors of ours, or the JSON files of the first clairai.

A safetensors file holds one tensor, `direction` [D], and string metadata: clairai="probe/1", name,
point, and where set bias, activation, threshold, calibration ("low,high"), model, description,
auroc and histogram ("low,high,count,count,...").

A JSON file holds `{"vector": [...]}`. `enc_19_name.json` is the probe `name` at post_block.19;
without a layer in the file name the caller's `target_layer` is used. Its scores go through a ReLU,
as they did in the first clairai.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Final, cast

import numpy as np
import safetensors
from numpy.typing import NDArray

from clairai.errors import ProbeError, describe_os_error, printable, quote
from clairai.points import Point
from clairai.probe.file_format import (
    METADATA,
    FileFormat,
    StrPath,
    errors_about,
    list_files,
    pack_file,
    parse_json_object,
    parse_number,
    quote_path,
    read_file,
    read_metadata,
    replace_file,
    sort_by_name,
    to_float32,
    unpack_file,
)
from clairai.probe.model import MAX_WIDTH, Probe
from clairai.wire import control_messages, ring_messages

SUFFIXES: Final = (".safetensors", ".json")
MAX_JSON_NBYTES: Final = 8 << 20
PROBE_FORMAT: Final = "probe/1"
MAX_PROBE_NBYTES: Final = 16 << 20
MAX_HEADER: Final = 64 << 10
PROBE_FILE: Final = FileFormat(
    noun="probe",
    format=PROBE_FORMAT,
    max_nbytes=MAX_PROBE_NBYTES,
    max_header=MAX_HEADER,
    other="this is not a clairai probe: make one with clairai.probe.files.save",
    again="save the probe again with clairai.probe.files.save",
)

_COUNT_PATTERN: Final = re.compile(r"0|[1-9][0-9]{0,12}")
_JSON_FILE_NAME: Final = re.compile(r"enc_([0-9]{1,5})_(.+)", re.DOTALL)


def load(path: StrPath, *, target_layer: int | None = None) -> Probe:
    """Load the probe in one file; `target_layer` is for a JSON file whose name has no layer."""
    file = Path(path)
    if file.suffix == ".json":
        data = read_file(file, MAX_JSON_NBYTES)
        return loads_json(data, source=os.fspath(path), target_layer=target_layer)
    if file.suffix == ".safetensors":
        return loads(read_file(file, MAX_PROBE_NBYTES), source=os.fspath(path))
    raise ProbeError(
        f"{quote_path(file)}: not a probe file; its name must end in {' or '.join(SUFFIXES)}"
    )


def load_many(path: StrPath, *, target_layer: int | None = None) -> list[Probe]:
    """Load every probe of a file, a folder (not its subfolders) or a glob, sorted by name."""
    files = list_files(path, SUFFIXES)
    return sort_by_name((file, load(file, target_layer=target_layer)) for file in files)


def save(path: StrPath, probe: Probe) -> None:
    """Write a probe so that after a crash `path` is the old file or the new one."""
    file = Path(path)
    if file.suffix != ".safetensors":
        raise ProbeError(
            f"{quote_path(file)}: a probe is saved under a name ending in .safetensors"
        )
    try:
        replace_file(file, dumps(probe))
    except (OSError, ValueError) as error:
        raise ProbeError(
            f"{quote_path(file)}: not saved, {describe_os_error(error)}; check the folder"
        ) from None


def dumps(probe: Probe) -> bytes:
    """Return the bytes of a probe's file; equal probes give equal bytes."""
    body = probe.direction_D.astype("<f4").tobytes()
    tensor = {"dtype": "F32", "shape": [probe.width], "data_offsets": [0, len(body)]}
    return pack_file({METADATA: _probe_metadata(probe), "direction": tensor}, body)


def loads(data: bytes, *, source: str) -> Probe:
    """Parse a probe; `source` names it in errors. Raises only ProbeError, whatever the bytes."""
    with errors_about(source):
        header, nbytes = unpack_file(data, PROBE_FILE)
        metadata = read_metadata(header.get(METADATA), PROBE_FILE)
        _check_tensor(header, nbytes)
        return _build_probe(metadata, _read_direction(data))


def _probe_metadata(probe: Probe) -> dict[str, str]:
    required = {"clairai": PROBE_FORMAT, "name": probe.name, "point": str(probe.point)}
    required |= {"bias": repr(probe.bias), "activation": probe.activation}
    histogram = probe.histogram
    bins = None if histogram is None else (histogram.low, histogram.high, *histogram.counts)
    optional = {
        "threshold": None if probe.threshold is None else repr(probe.threshold),
        "calibration": None if probe.calibration is None else _join_numbers(probe.calibration),
        "model": probe.model,
        "description": probe.description,
        "auroc": None if probe.auroc is None else repr(probe.auroc),
        "histogram": None if bins is None else _join_numbers(bins),
    }
    return required | {key: value for key, value in optional.items() if value is not None}


def _join_numbers(numbers: Iterable[float]) -> str:
    return ",".join(map(repr, numbers))


def _check_tensor(header: dict[str, object], nbytes: int) -> None:
    # Stricter than safetensors, and before it: the library never sees a header we refuse.
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


def _read_direction(data: bytes) -> NDArray[np.float32]:
    try:
        ((_, tensor),) = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise ProbeError(f"safetensors refuses it ({printable(error)}); save it again") from None
    with np.errstate(all="ignore"):  # Probe refuses NaN with a message
        return to_float32(tensor["dtype"], bytes(tensor["data"]))


def _build_probe(metadata: dict[str, str], direction_D: NDArray[np.float32]) -> Probe:
    calibration = metadata.get("calibration")
    ends = None if calibration is None else [parse_number(end) for end in calibration.split(",")]
    return Probe(
        name=_required(metadata, "name"),
        point=Point.parse(_required(metadata, "point")),
        direction_D=direction_D,
        bias=parse_number(metadata.get("bias", "0.0")),
        # Probe checks the types of these two.
        activation=cast(ring_messages.Activation, metadata.get("activation", "none")),
        threshold=parse_number(metadata["threshold"]) if "threshold" in metadata else None,
        calibration=cast(tuple[float, float] | None, ends),
        model=metadata.get("model"),
        description=metadata.get("description"),
        auroc=parse_number(metadata["auroc"]) if "auroc" in metadata else None,
        histogram=_parse_histogram(metadata["histogram"]) if "histogram" in metadata else None,
    )


def _parse_histogram(text: str) -> control_messages.Histogram:
    low, _, rest = text.partition(",")
    high, _, counts = rest.partition(",")
    return control_messages.Histogram(
        parse_number(low), parse_number(high), tuple(map(_parse_count, counts.split(",")))
    )


def _required(fields: dict[str, str], key: str) -> str:
    if key not in fields:
        raise ProbeError(f"metadata has no {key}; save the probe again with {key} set")
    return fields[key]


def _parse_count(text: str) -> int:
    if _COUNT_PATTERN.fullmatch(text) is None:
        raise ProbeError(f"{quote(text)} is not a count; write it as 0 or 17")
    return int(text)


def loads_json(data: bytes, *, source: str, target_layer: int | None = None) -> Probe:
    """Parse a JSON probe; `source` is its file name. Raises only ProbeError, whatever the bytes.

    `bias`, `name`, `threshold` and `activation` are used where present, other keys ignored.
    """
    with errors_about(source):
        if len(data) > MAX_JSON_NBYTES:
            raise ProbeError(f"{len(data)} bytes, and a JSON probe has at most {MAX_JSON_NBYTES}")
        fields = {key: value for key, value in parse_json_object(data).items() if value is not None}
        layer, name = _layer_and_name(source, target_layer)
        return Probe(
            name=cast(str, fields.get("name", name)),  # Probe checks the types of all of these
            point=Point("post_block", layer),
            direction_D=_json_direction(fields.get("vector")),
            bias=cast(float, fields.get("bias", 0.0)),
            activation=cast(ring_messages.Activation, fields.get("activation", "relu")),
            threshold=cast(float | None, fields.get("threshold")),
        )


def _layer_and_name(source: str, target_layer: int | None) -> tuple[int, str]:
    stem = PurePath(source).stem
    matched = _JSON_FILE_NAME.fullmatch(stem)
    if matched is not None:
        return int(matched[1]), matched[2]
    if target_layer is None:
        raise ProbeError(
            "the file name does not say which layer; name it enc_LAYER_NAME.json, "
            "or set TARGET_LAYER"
        )
    return target_layer, stem


def _json_direction(vector: object) -> NDArray[np.float32]:
    if not isinstance(vector, list) or not vector:
        raise ProbeError(
            f"vector is {quote(vector)}; give a list of numbers as long as the model is wide"
        )
    if len(vector) > MAX_WIDTH:
        raise ProbeError(f"vector has {len(vector)} numbers; give at most {MAX_WIDTH}")
    # type() and not isinstance(): true and false are ints to isinstance.
    if any(type(item) not in (int, float) for item in vector):
        raise ProbeError("vector holds something other than numbers; give numbers only")
    try:
        with np.errstate(over="ignore"):  # Probe refuses what overflows, as infinity
            return np.array(vector, dtype=np.float64).astype(np.float32)
    except OverflowError:
        raise ProbeError("vector holds a number beyond float64; use finite numbers") from None
