"""Takes an open store; gives its rows as a Hugging Face dataset or as a Lance dataset.

Both hold Arrow tables: `rows`, one line for each row, and `requests`, what is known of each
request. A stream is 16 hex digits, as everywhere: in numpy's format datasets makes every whole
number an int64, which not every stream is. Imported only when it is asked for: pyarrow, datasets
and lance are extras.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from clairai.store.export_rows import (
    COLUMNS,
    Batch,
    Outline,
    RequestLine,
    batches,
    missing,
    new_folder,
    outline,
    request_lines,
)
from clairai.store.reading import Store
from clairai.store.shard import named

ROWS: Final = "rows"
REQUESTS: Final = "requests"
_TEXTS: Final = ("stream", "point")


def export_datasets(store: Store, out: str | os.PathLike[str]) -> Iterator[int]:
    """Folders that `datasets.load_from_disk` opens; how many rows each batch had, one by one."""
    try:
        import datasets
        from datasets.arrow_writer import ArrowWriter
    except ImportError:
        raise missing("datasets", "datasets") from None

    about = outline(store)
    datasets.disable_progress_bars()  # whoever calls this shows one of their own
    with new_folder(out) as folder:
        scratch = folder / "rows.arrow"
        features = datasets.Features.from_arrow_schema(_schema(about))
        with ArrowWriter(path=str(scratch), features=features) as writer:
            for batch in batches(store, about):
                writer.write_table(_table(batch, about))
                yield len(batch)
            writer.finalize()
        datasets.Dataset.from_file(str(scratch)).save_to_disk(str(folder / ROWS))
        scratch.unlink()
        known = datasets.Dataset(_requests(about))
        known.save_to_disk(str(folder / REQUESTS))


def export_lance(store: Store, out: str | os.PathLike[str]) -> Iterator[int]:
    """Datasets that `lance.dataset` opens; how many rows each batch had, one by one."""
    try:
        import lance
    except ImportError:
        raise missing("pylance", "lance") from None

    about = outline(store)
    with new_folder(out) as folder:
        path = str(folder / f"{ROWS}.lance")
        lance.write_dataset(_requests(about), str(folder / f"{REQUESTS}.lance"))
        lance.write_dataset(_schema(about).empty_table(), path)
        for held in _together(batches(store, about)):
            lance.write_dataset(_concatenated(held, about), path, mode="append")
            yield sum(map(len, held))


_FRAGMENT_BATCHES: Final = 64  # in one append: each makes files of its own


def _together(found: Iterator[Batch]) -> Iterator[list[Batch]]:
    held: list[Batch] = []
    for batch in found:
        held.append(batch)
        if len(held) == _FRAGMENT_BATCHES:
            yield held
            held = []
    if held:
        yield held


def _concatenated(held: list[Batch], about: Outline) -> Any:
    import pyarrow as pa

    return pa.concat_tables([_table(batch, about) for batch in held])


def _schema(about: Outline) -> Any:
    import pyarrow as pa

    fields = [(name, pa.from_numpy_dtype(kind)) for name, kind in COLUMNS.items()]
    named = [(name, pa.string() if name in _TEXTS else kind) for name, kind in fields]
    return pa.schema([*named, ("values", pa.list_(pa.float32(), about.width))])


def _table(batch: Batch, about: Outline) -> Any:
    import pyarrow as pa

    texts = {
        "stream": [named(stream) for stream in batch.columns["stream"].tolist()],
        "point": [about.points[place] for place in batch.columns["point"].tolist()],
    }
    columns = [pa.array(texts.get(name, column)) for name, column in batch.columns.items()]
    flat = pa.array(batch.values_ND.reshape(-1))
    columns.append(pa.FixedSizeListArray.from_arrays(flat, about.width))
    return pa.Table.from_arrays(columns, schema=_schema(about))


def _requests(about: Outline) -> Any:
    import pyarrow as pa

    lines = [msgspec.structs.asdict(line) for line in request_lines(about)]
    kinds = {name: pa.string() for name in RequestLine.__struct_fields__}
    return pa.Table.from_pylist(lines, schema=pa.schema(kinds | {"rows": pa.int64()}))
