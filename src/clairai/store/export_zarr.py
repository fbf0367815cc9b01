"""Takes an open store; gives its rows as a Zarr group: one array for each column, one for values.

Imported only when it is asked for: zarr is an extra.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from clairai.store.export_rows import (
    BATCH_ROWS,
    COLUMNS,
    Outline,
    batches,
    missing,
    new_folder,
    outline,
    request_lines,
)
from clairai.store.reading import Store

VALUES: Final = "values"


def export_zarr(store: Store, out: str | os.PathLike[str]) -> Iterator[int]:
    """A group that `zarr.open_group` opens; how many rows each batch had, one by one.

    Attributes of the group: `points`, into which the array `point` counts, and `requests`.
    """
    try:
        import zarr
    except ImportError:
        raise missing("zarr", "zarr") from None

    about = outline(store)
    with new_folder(out) as folder:
        group = zarr.open_group(str(folder), mode="w")
        group.attrs.update(_attributes(about))
        arrays = _arrays(group, about)
        for batch in batches(store, about):
            for name, column in batch.columns.items():
                arrays[name].append(column)
            arrays[VALUES].append(batch.values_ND)
            yield len(batch)


def _attributes(about: Outline) -> dict[str, Any]:
    lines = [msgspec.structs.asdict(line) for line in request_lines(about)]
    return {"points": list(about.points), "requests": lines}


def _arrays(group: Any, about: Outline) -> dict[str, Any]:
    """Empty, in chunks as large as a batch: an append writes whole ones."""
    made = {
        name: group.create_array(name, shape=(0,), chunks=(BATCH_ROWS,), dtype=kind)
        for name, kind in COLUMNS.items()
    }
    made[VALUES] = group.create_array(
        VALUES, shape=(0, about.width), chunks=(BATCH_ROWS, about.width), dtype="float32"
    )
    return made
