"""Takes blocks as they come, and a layout; gives drafts: the blocks that will be one file each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

import numpy as np

from clairai.errors import StoreError
from clairai.points import quote
from clairai.store.rows import Block, Given, Note
from clairai.store.shard import named

Layout = Literal["sharded", "packed", "per_file", "npz"]
LAYOUTS: Final[tuple[Layout, ...]] = get_args(Layout)
MAX_DRAFTS: Final = 512  # files of one commit


@dataclass
class Draft:
    """Blocks of one kind that will be sealed together."""

    tail: str  # of the file's name
    suffix: str
    blocks: list[Block] = field(default_factory=list)
    notes: dict[int, Note] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def num_rows(self) -> int:
        return sum(block.num_rows for block in self.blocks)

    def halves(self) -> tuple[Draft, Draft]:
        """The same rows as two files; for a draft of two rows or more."""
        blocks = self.blocks
        if len(blocks) == 1:
            places = np.arange(blocks[0].num_rows)
            blocks = [blocks[0].taken(part) for part in np.array_split(places, 2)]
        middle = len(blocks) // 2
        first, second = blocks[:middle], blocks[middle:]
        return (
            Draft(self.tail, self.suffix, first, self.notes),
            Draft(self.tail, self.suffix, second, self.notes),
        )


class Drafts:
    """What was accepted and is not yet handed to the disk."""

    def __init__(self, layout: str) -> None:
        if layout not in LAYOUTS:
            raise StoreError(
                f"no layout is named {quote(layout)}; give one of {', '.join(LAYOUTS)}"
            )
        self._layout: str = layout
        self._drafts: dict[tuple[object, ...], Draft] = {}
        self._finished: list[Draft] = []
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._drafts) + len(self._finished)

    @property
    def is_full(self) -> bool:
        return len(self) >= MAX_DRAFTS

    def add(self, given: Given) -> None:
        for stream, part in self._parts(given.block):
            draft = self._draft(stream, part)
            draft.blocks.append(part)
            self._grow(draft, part.nbytes)
            streams = given.notes if stream is None else given.notes.keys() & {stream}
            for one in streams:
                self._remember(draft, one, given.notes[one])

    def _remember(self, draft: Draft, stream: int, note: Note) -> None:
        """The newest: a request may be steered otherwise on its way, and its note tells it all."""
        known = draft.notes.get(stream)
        if known != note:
            draft.notes[stream] = note
            self._grow(draft, note.nbytes - (0 if known is None else known.nbytes))

    def _grow(self, draft: Draft, nbytes: int) -> None:
        draft.nbytes += nbytes
        self.nbytes += nbytes

    def _parts(self, block: Block) -> Iterator[tuple[int | None, Block]]:
        streams = block.rows_N["stream"]
        if self._layout == "sharded":
            yield None, block
        elif len(streams) and (streams == streams[0]).all():
            yield int(streams[0]), block
        else:
            for stream in np.unique(streams).tolist():
                yield stream, block.taken(np.flatnonzero(streams == stream))

    def _draft(self, stream: int | None, block: Block) -> Draft:
        point = block.point if self._layout in ("per_file", "npz") else ""
        key = (stream, point, block.kind)
        if key not in self._drafts:
            tail = "" if stream is None else f"-{named(stream)}" + (f"-{point}" if point else "")
            suffix = "npz" if self._layout == "npz" else "safetensors"
            self._drafts[key] = Draft(tail, suffix)
        return self._drafts[key]

    def finish(self, stream: int) -> bool:
        """The request has ended; whether files of its own can be sealed."""
        own = [key for key in self._drafts if key[0] == stream]
        self._finished += [self._drafts.pop(key) for key in own]
        return bool(self._finished)

    def take_finished(self) -> list[Draft]:
        """Those that nothing can be added to."""
        taken, self._finished = self._finished, []
        self.nbytes -= sum(draft.nbytes for draft in taken)
        return taken

    def take(self) -> list[Draft]:
        """All of them; what comes next begins new ones."""
        taken = [*self._finished, *self._drafts.values()]
        self._finished, self._drafts, self.nbytes = [], {}, 0
        return taken
