"""Takes an open store; gives its rows decoded, as .npz files for whoever has numpy alone."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clairai.errors import StoreError
from clairai.points import quote
from clairai.store.disk import LocalDisk, cause
from clairai.store.reading import Store
from clairai.store.recover import write_whole
from clairai.store.shard import named


@dataclass(frozen=True)
class Wanted:
    """One file: rows of one choice of a request at one point."""

    stream: int
    choice: int
    point: str

    @property
    def name(self) -> str:
        return f"{named(self.stream)}-{self.choice}-{self.point}.npz"


def files(store: Store) -> list[Wanted]:
    return [
        Wanted(request.stream, choice, point)
        for request in store.requests()
        for choice in request.choices
        for point in request.points
    ]


def export_npz(
    store: Store, wanted: Sequence[Wanted], out: str | os.PathLike[str]
) -> Iterator[str]:
    """Write them into a new folder, each whole or not at all; the names, one by one."""
    path = Path(out)
    try:
        path.mkdir(mode=0o700, parents=True)
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{quote(str(path), 200)} cannot be made, {cause(error)}; give a new folder"
        ) from None
    disk = LocalDisk(path)
    for one in wanted:
        write_whole(disk, one.name, _npz(store, one))
        yield one.name


def _npz(store: Store, wanted: Wanted) -> bytes:
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
