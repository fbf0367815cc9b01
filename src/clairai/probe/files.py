"""Takes paths of probe files, safetensors or the first clairai's JSON; gives checked Probes.

Nothing here trusts a file: only regular files are read, and only up to a bound.
"""

from __future__ import annotations

import glob
import os
import re
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Final, Protocol, TypeVar, cast

import numpy as np
import safetensors
from numpy.typing import NDArray

from clairai.errors import ProbeError
from clairai.points import Point, quote
from clairai.probe.file_format import (
    METADATA,
    FileFormat,
    errors_about,
    pack_file,
    parse_json_object,
    read_metadata,
    unpack_file,
)
from clairai.probe.model import MAX_WIDTH, Probe
from clairai.wire import ring_messages

SUFFIXES: Final = (".safetensors", ".json")
MAX_FILES: Final = 4096

StrPath = str | os.PathLike[str]


class _HasName(Protocol):
    @property
    def name(self) -> str: ...


Named = TypeVar("Named", bound=_HasName)


def load(path: StrPath, *, target_layer: int | None = None) -> Probe:
    """The probe in one file; `target_layer` serves a JSON file whose name has no layer."""
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
    """Every probe of a file, a folder (not its subfolders) or a glob, by name; none twice."""
    files = list_files(path, SUFFIXES)
    return sort_by_name((file, load(file, target_layer=target_layer)) for file in files)


def sort_by_name(loaded: Iterable[tuple[Path, Named]]) -> list[Named]:
    """In order of their names; ProbeError if two files hold one name."""
    found: dict[str, tuple[Path, Named]] = {}
    for file, one in loaded:
        if one.name in found:
            raise ProbeError(
                f"{quote_path(file)} and {quote_path(found[one.name][0])} are both named "
                f"{one.name}; "
                "names are unique: rename one of them"
            )
        found[one.name] = file, one
    return [found[name][1] for name in sorted(found)]


def save(path: StrPath, probe: Probe) -> None:
    """Write the probe whole or not at all: after a crash `path` is the old file or the new one."""
    file = Path(path)
    if file.suffix != ".safetensors":
        raise ProbeError(
            f"{quote_path(file)}: a probe is saved under a name ending in .safetensors"
        )
    try:
        replace_file(file, dumps(probe))
    except (OSError, ValueError) as error:
        raise ProbeError(
            f"{quote_path(file)}: not saved, {describe_error(error)}; check the folder"
        ) from None


def replace_file(file: Path, data: bytes) -> None:
    """After a crash `file` is the old one or the new one."""
    descriptor, scratch = tempfile.mkstemp(prefix=".clairai-", suffix=".tmp", dir=file.parent)
    try:
        with open(descriptor, "wb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(scratch, file)
    except BaseException:
        os.unlink(scratch)
        raise
    _sync_folder(file.parent)


def _sync_folder(folder: Path) -> None:
    # Without this the rename itself can be lost in a power cut.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_file(file: Path, limit: int) -> bytes:
    """All of a regular file, if it has at most `limit` bytes."""
    with errors_about(str(file)):
        descriptor = _open_file(file)
        try:
            return _regular_bytes(descriptor, limit)
        except OSError as error:
            raise ProbeError(
                f"cannot be read, {describe_error(error)}; copy the file again"
            ) from None
        finally:
            os.close(descriptor)


def _open_file(file: Path) -> int:
    # O_NONBLOCK: opening a FIFO would otherwise wait for a writer that never comes.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        return os.open(file, flags)
    except (OSError, ValueError) as error:
        raise ProbeError(f"cannot be opened, {describe_error(error)}; check the path") from None


def _regular_bytes(descriptor: int, limit: int) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ProbeError("not a regular file; give the file itself")
    data = b""
    if status.st_size <= limit:  # a file may grow after this, and some in /proc say 0
        with open(descriptor, "rb", closefd=False) as opened:
            data = opened.read(limit + 1)
    if max(status.st_size, len(data)) > limit:
        raise ProbeError(f"over {limit} bytes, the most such a file has; export it again")
    return data


def list_files(path: StrPath, suffixes: tuple[str, ...]) -> list[Path]:
    """The files of a file, a folder or a glob, by name."""
    text = os.fspath(path)
    try:
        if os.path.isdir(text):
            files = [Path(text, name) for name in os.listdir(text) if _has_suffix(name, suffixes)]
        elif os.path.exists(text) or not glob.has_magic(text):
            return [Path(text)]
        else:
            files = [
                Path(name) for name in glob.iglob(text) if _has_suffix(Path(name).name, suffixes)
            ]
    except (OSError, ValueError) as error:
        raise ProbeError(f"{quote(text)}: cannot be listed, {describe_error(error)}") from None
    if not 1 <= len(files) <= MAX_FILES:
        raise ProbeError(
            f"{quote(text)} has {len(files)} such files; "
            f"give 1 to {MAX_FILES} with names ending in {' or '.join(suffixes)}"
        )
    return sorted(files)


def _has_suffix(name: str, suffixes: tuple[str, ...]) -> bool:
    return name.endswith(suffixes) and not name.startswith(".")


def quote_path(file: Path) -> str:
    return quote(str(file), limit=200)


def describe_error(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or "the path is not usable"


# MERGED
# Takes a Probe, gives the bytes of its safetensors file; and back, from bytes nobody vouches for.
#
# The file holds one tensor, `direction` [D], and string metadata: clairai="probe/1", name, point,
# and where set bias, activation, threshold, calibration ("low,high"), model, description, auroc
# and
# histogram ("low,high,count,count,...").


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
_NUMBER_PATTERN: Final = re.compile(r"-?[0-9]{1,40}(?:\.[0-9]{1,40})?(?:[eE][+-]?[0-9]{1,4})?")


def dumps(probe: Probe) -> bytes:
    """The file's bytes; equal probes give equal bytes."""
    body = probe.direction_D.astype("<f4").tobytes()
    tensor = {"dtype": "F32", "shape": [probe.width], "data_offsets": [0, len(body)]}
    return pack_file({METADATA: _probe_metadata(probe), "direction": tensor}, body)


def loads(data: bytes, *, source: str) -> Probe:
    """The probe in `data`; `source` names it in errors. Raises ProbeError, whatever the bytes."""
    with errors_about(source):
        header, nbytes = unpack_file(data, PROBE_FILE)
        said = read_metadata(header.get(METADATA), PROBE_FILE)
        _check_tensor(header, nbytes)
        return _build_probe(said, _read_direction(data))


def _probe_metadata(probe: Probe) -> dict[str, str]:
    said = {"clairai": PROBE_FORMAT, "name": probe.name, "point": str(probe.point)}
    said |= {"bias": repr(probe.bias), "activation": probe.activation}
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
    return said | {key: value for key, value in optional.items() if value is not None}


def _join_numbers(numbers: Iterable[float]) -> str:
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


def _read_direction(data: bytes) -> NDArray[np.float32]:
    try:
        ((_, tensor),) = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise ProbeError(f"safetensors refuses it ({error}); save the probe again") from None
    with np.errstate(all="ignore"):  # NaN is refused by the probe, in words
        return to_float32(tensor["dtype"], bytes(tensor["data"]))


def to_float32(dtype: str, body: bytes) -> NDArray[np.float32]:
    """The numbers of a tensor of any of the dtypes that are read."""
    if dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(body, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(body, "<f2" if dtype == "F16" else "<f4").astype(np.float32)


def _build_probe(said: dict[str, str], direction_D: NDArray[np.float32]) -> Probe:
    calibration = said.get("calibration")
    ends = None if calibration is None else [parse_number(end) for end in calibration.split(",")]
    return Probe(
        name=_required(said, "name"),
        point=Point.parse(_required(said, "point")),
        direction_D=direction_D,
        bias=parse_number(said.get("bias", "0.0")),
        activation=cast(
            ring_messages.Activation, said.get("activation", "none")
        ),  # Probe checks it
        threshold=parse_number(said["threshold"]) if "threshold" in said else None,
        calibration=cast(tuple[float, float] | None, ends),  # Probe checks it
        model=said.get("model"),
        description=said.get("description"),
        auroc=parse_number(said["auroc"]) if "auroc" in said else None,
        histogram=_parse_histogram(said["histogram"]) if "histogram" in said else None,
    )


def _parse_histogram(text: str) -> ring_messages.Histogram:
    low, _, rest = text.partition(",")
    high, _, counts = rest.partition(",")
    return ring_messages.Histogram(
        parse_number(low), parse_number(high), tuple(map(_parse_count, counts.split(",")))
    )


def _required(fields: dict[str, str], key: str) -> str:
    if key not in fields:
        raise ProbeError(f"metadata has no {key}; save the probe again with {key} set")
    return fields[key]


def parse_number(text: str) -> float:
    """A number in metadata, in digits and nothing else."""
    if _NUMBER_PATTERN.fullmatch(text) is None:
        raise ProbeError(f"{quote(text)} is not a number; write it as 0.5 or 5e-1")
    return float(text)


def _parse_count(text: str) -> int:
    if _COUNT_PATTERN.fullmatch(text) is None:
        raise ProbeError(f"{quote(text)} is not a count; write it as 0 or 17")
    return int(text)


# MERGED
# Takes the JSON of the first clairai, `{"vector": [...]}`, and its file name; gives a Probe.
#
# `enc_19_name.json` is the probe `name` at post_block.19; without a layer in the file name the
# caller's `target_layer` is used. Scores went through a ReLU there, so they do here.


MAX_JSON_NBYTES: Final = 8 << 20

_JSON_FILE_NAME: Final = re.compile(r"enc_([0-9]{1,5})_(.+)", re.DOTALL)


def loads_json(data: bytes, *, source: str, target_layer: int | None = None) -> Probe:
    """The probe in `data`; `source` is its file name. Raises ProbeError, whatever the bytes.

    `bias`, `name`, `threshold` and `activation` are honoured where present, other keys ignored.
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
        with np.errstate(over="ignore"):  # what overflows is refused by Probe as infinity
            return np.array(vector, dtype=np.float64).astype(np.float32)
    except OverflowError:
        raise ProbeError("vector holds a number beyond float64; use finite numbers") from None
