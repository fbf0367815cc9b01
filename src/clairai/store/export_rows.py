"""Takes an open store; gives its rows decoded, as .npz files for whoever has numpy alone."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from clairai.errors import ConfigError, StoreError
from clairai.points import Point, quote
from clairai.store.codecs.registry import named as encoder_named
from clairai.store.disk import LocalDisk, describe_error
from clairai.store.read import Store, StoredRequest, StoredRows
from clairai.store.recover import replace_file
from clairai.store.row_block import Origin
from clairai.store.shard import stream_hex


@dataclass(frozen=True)
class ExportFile:
    """One file: rows of one choice of a request at one point."""

    stream: int
    choice: int
    point: str

    @property
    def name(self) -> str:
        return f"{stream_hex(self.stream)}-{self.choice}-{self.point}.npz"


def export_files(store: Store) -> list[ExportFile]:
    return [
        ExportFile(request.stream, choice, point)
        for request in store.requests()
        for choice in request.choices
        for point in request.points
    ]


def export_npz(
    store: Store, wanted: Sequence[ExportFile], out: str | os.PathLike[str]
) -> Iterator[str]:
    """Write them into a new folder, each whole or not at all; the names, one by one."""
    path = Path(out)
    try:
        path.mkdir(mode=0o700, parents=True)
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{quote(str(path), 200)} cannot be made, {describe_error(error)}; give a new folder"
        ) from None
    disk = LocalDisk(path)
    for one in wanted:
        replace_file(disk, one.name, _npz_bytes(store, one))
        yield one.name


def _npz_bytes(store: Store, wanted: ExportFile) -> bytes:
    rows = store.rows(wanted.stream, point=wanted.point, choice=wanted.choice)
    target = io.BytesIO()
    np.savez(
        target,
        values=np.asarray(rows),
        position=rows.position,
        token_id=rows.token_id,
        phase=rows.phase,
    )
    return target.getvalue()


# MERGED
# Takes an open store; gives its requests as lines, and all its rows decoded, batch by batch.
#
# What exports into tables are made of. Shapes: N rows of a batch, D values of a decoded row.


BATCH_ROWS: Final = 1024
# Of each row, beside its values; `point` is an index into the points of the store.
TABLE_COLUMNS: Final[dict[str, str]] = {
    "stream": "uint64",
    "choice": "uint16",
    "point": "uint16",
    "position": "uint32",
    "token_id": "int32",
    "phase": "uint8",
}


class RequestRow(msgspec.Struct, frozen=True):
    """A request's rows of one origin; tags, steering and parameters are JSON."""

    stream: str  # 16 hex digits: not every reader knows 64-bit numbers
    rows: int
    model: str
    weights: str
    dtype: str
    encoder: str
    parameters: str
    tags: str
    steering: str


@dataclass(frozen=True)
class TableOutline:
    """What all rows have in common."""

    requests: tuple[StoredRequest, ...]
    points: tuple[str, ...]  # in path order
    width: int  # of a decoded row


@dataclass(frozen=True)
class ExportBatch:
    """Rows that follow each other: by request, choice, point, position."""

    columns: dict[str, NDArray[Any]]
    values_ND: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.values_ND)


def outline_store(store: Store) -> TableOutline:
    """StoreError if there are no rows, or if they do not fit into one table."""
    requests = tuple(store.requests())
    widths = {_decoded_width(origin) for request in requests for origin in request.origins}
    if not requests:
        raise StoreError("no rows are in this folder; there is nothing to export")
    if len(widths) > 1:
        said = ", ".join(map(str, sorted(widths)))
        raise StoreError(
            f"these rows have {len(widths)} widths when they are decoded ({said}), and a table has "
            "one; export npz, or capture with one encoder into one folder"
        )
    points = {point for request in requests for point in request.points}
    return TableOutline(requests, tuple(sorted(points, key=Point.parse)), widths.pop())


def request_rows(about: TableOutline) -> list[RequestRow]:
    return [
        RequestRow(
            stream=stream_hex(request.stream),
            rows=request.rows,
            model=origin.model,
            weights=origin.weights,
            dtype=origin.dtype,
            encoder=origin.encoder,
            parameters=origin.parameters,
            tags=msgspec.json.encode(request.tags).decode(),
            steering=msgspec.json.encode(request.steering).decode(),
        )
        for request in about.requests
        for origin in request.origins
    ]


def row_batches(store: Store, about: TableOutline) -> Iterator[ExportBatch]:
    """Every row once; all batches but the last have BATCH_ROWS rows."""
    held: list[ExportBatch] = []
    for request in about.requests:
        rows = store.rows(request.stream)
        for start in range(0, len(rows), BATCH_ROWS):
            held.append(_read_batch(rows, start, about))
            while sum(map(len, held)) >= BATCH_ROWS:
                whole = _join_batches(held)
                yield _slice_batch(whole, 0, BATCH_ROWS)
                held = [_slice_batch(whole, BATCH_ROWS, len(whole))]
    last = _join_batches(held)
    if len(last):
        yield last


def num_batches(about: TableOutline) -> int:
    """At most: a row that was computed twice is counted twice here, and given once."""
    return -(-sum(request.rows for request in about.requests) // BATCH_ROWS)


def _read_batch(rows: StoredRows, start: int, about: TableOutline) -> ExportBatch:
    chosen = slice(start, start + BATCH_ROWS)
    places = {point: place for place, point in enumerate(about.points)}
    columns: dict[str, NDArray[Any]] = {
        name: getattr(rows, name)[chosen] for name in TABLE_COLUMNS if name != "point"
    }
    points_N = np.array([places[point] for point in rows.point[chosen]], TABLE_COLUMNS["point"])
    return ExportBatch({name: columns.get(name, points_N) for name in TABLE_COLUMNS}, rows[chosen])


def _join_batches(parts: list[ExportBatch]) -> ExportBatch:
    columns = {
        name: np.concatenate([np.empty(0, kind), *(part.columns[name] for part in parts)])
        for name, kind in TABLE_COLUMNS.items()
    }
    values = [part.values_ND for part in parts]
    return ExportBatch(columns, np.concatenate(values) if values else np.empty((0, 0), np.float32))


def _slice_batch(batch: ExportBatch, start: int, end: int) -> ExportBatch:
    columns = {name: column[start:end] for name, column in batch.columns.items()}
    return ExportBatch(columns, batch.values_ND[start:end])


def _decoded_width(origin: Origin) -> int:
    encoder = encoder_named(origin.encoder, msgspec.json.decode(origin.parameters))
    return encoder.decoded_width(origin.width)


@contextmanager
def new_folder(out: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder to fill; it has its name when the block has ended, and is gone if that failed."""
    path = Path(out)
    if path.exists() or path.is_symlink():
        raise StoreError(f"{quote(str(path), 200)} is there already; give a new folder")
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir(mode=0o700)
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{quote(str(temporary), 200)} cannot be made, {describe_error(error)}; "
            "give a new folder"
        ) from None
    try:
        yield temporary
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def missing_extra(library: str, extra: str) -> ConfigError:
    return ConfigError(f"this needs {library}; run `pip install 'clairai[{extra}]'`")


# MERGED
# Takes an open store; gives its rows as a Hugging Face dataset or as a Lance dataset.
#
# Both hold Arrow tables: `rows`, one line for each row, and `requests`, what is known of each
# request. A stream is 16 hex digits, as everywhere: in numpy's format datasets makes every whole
# number an int64, which not every stream is. Imported only when it is asked for: pyarrow,
# datasets
# and lance are extras.


ROWS_TABLE: Final = "rows"
REQUESTS_TABLE: Final = "requests"
_TEXT_COLUMNS: Final = ("stream", "point")


def export_datasets(store: Store, out: str | os.PathLike[str]) -> Iterator[int]:
    """Folders that `datasets.load_from_disk` opens; how many rows each batch had, one by one."""
    try:
        import datasets
        from datasets.arrow_writer import ArrowWriter
    except ImportError:
        raise missing_extra("datasets", "datasets") from None

    about = outline_store(store)
    datasets.disable_progress_bars()  # whoever calls this shows one of their own
    with new_folder(out) as folder:
        scratch = folder / "rows.arrow"
        features = datasets.Features.from_arrow_schema(_arrow_schema(about))
        with ArrowWriter(path=str(scratch), features=features) as writer:
            for batch in row_batches(store, about):
                writer.write_table(_arrow_table(batch, about))
                yield len(batch)
            writer.finalize()
        datasets.Dataset.from_file(str(scratch)).save_to_disk(str(folder / ROWS_TABLE))
        scratch.unlink()
        known = datasets.Dataset(_requests_table(about))
        known.save_to_disk(str(folder / REQUESTS_TABLE))


def export_lance(store: Store, out: str | os.PathLike[str]) -> Iterator[int]:
    """Datasets that `lance.dataset` opens; how many rows each batch had, one by one."""
    try:
        import lance
    except ImportError:
        raise missing_extra("pylance", "lance") from None

    about = outline_store(store)
    with new_folder(out) as folder:
        path = str(folder / f"{ROWS_TABLE}.lance")
        lance.write_dataset(_requests_table(about), str(folder / f"{REQUESTS_TABLE}.lance"))
        lance.write_dataset(_arrow_schema(about).empty_table(), path)
        for held in _group_batches(row_batches(store, about)):
            lance.write_dataset(_concat_tables(held, about), path, mode="append")
            yield sum(map(len, held))


_FRAGMENT_BATCHES: Final = 64  # in one append: each makes files of its own


def _group_batches(found: Iterator[ExportBatch]) -> Iterator[list[ExportBatch]]:
    held: list[ExportBatch] = []
    for batch in found:
        held.append(batch)
        if len(held) == _FRAGMENT_BATCHES:
            yield held
            held = []
    if held:
        yield held


def _concat_tables(held: list[ExportBatch], about: TableOutline) -> Any:
    import pyarrow as pa

    return pa.concat_tables([_arrow_table(batch, about) for batch in held])


def _arrow_schema(about: TableOutline) -> Any:
    import pyarrow as pa

    fields = [(name, pa.from_numpy_dtype(kind)) for name, kind in TABLE_COLUMNS.items()]
    named = [(name, pa.string() if name in _TEXT_COLUMNS else kind) for name, kind in fields]
    return pa.schema([*named, ("values", pa.list_(pa.float32(), about.width))])


def _arrow_table(batch: ExportBatch, about: TableOutline) -> Any:
    import pyarrow as pa

    texts = {
        "stream": [stream_hex(stream) for stream in batch.columns["stream"].tolist()],
        "point": [about.points[place] for place in batch.columns["point"].tolist()],
    }
    columns = [pa.array(texts.get(name, column)) for name, column in batch.columns.items()]
    flat = pa.array(batch.values_ND.reshape(-1))
    columns.append(pa.FixedSizeListArray.from_arrays(flat, about.width))
    return pa.Table.from_arrays(columns, schema=_arrow_schema(about))


def _requests_table(about: TableOutline) -> Any:
    import pyarrow as pa

    lines = [msgspec.structs.asdict(line) for line in request_rows(about)]
    kinds = {name: pa.string() for name in RequestRow.__struct_fields__}
    return pa.Table.from_pylist(lines, schema=pa.schema(kinds | {"rows": pa.int64()}))


# MERGED
# Takes an open store; gives its rows as a Zarr group: one array for each column, one for values.
#
# Imported only when it is asked for: zarr is an extra.


VALUES_ARRAY: Final = "values"


def export_zarr(store: Store, out: str | os.PathLike[str]) -> Iterator[int]:
    """A group that `zarr.open_group` opens; how many rows each batch had, one by one.

    Attributes of the group: `points`, into which the array `point` counts, and `requests`.
    """
    try:
        import zarr
    except ImportError:
        raise missing_extra("zarr", "zarr") from None

    about = outline_store(store)
    with new_folder(out) as folder:
        group = zarr.open_group(str(folder), mode="w")
        group.attrs.update(_zarr_attributes(about))
        arrays = _create_zarr_arrays(group, about)
        for batch in row_batches(store, about):
            for name, column in batch.columns.items():
                arrays[name].append(column)
            arrays[VALUES_ARRAY].append(batch.values_ND)
            yield len(batch)


def _zarr_attributes(about: TableOutline) -> dict[str, Any]:
    lines = [msgspec.structs.asdict(line) for line in request_rows(about)]
    return {"points": list(about.points), "requests": lines}


def _create_zarr_arrays(group: Any, about: TableOutline) -> dict[str, Any]:
    """Empty, in chunks as large as a batch: an append writes whole ones."""
    made = {
        name: group.create_array(name, shape=(0,), chunks=(BATCH_ROWS,), dtype=kind)
        for name, kind in TABLE_COLUMNS.items()
    }
    made[VALUES_ARRAY] = group.create_array(
        VALUES_ARRAY, shape=(0, about.width), chunks=(BATCH_ROWS, about.width), dtype="float32"
    )
    return made
