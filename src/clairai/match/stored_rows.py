"""Finds the rows of many requests in blocks of stored rows, and reads their scores when needed.

The blocks are arrays that someone else holds, such as mapped files: an index of rows in the order
of arrival, and their scores. Only the index is read to find out which rows there are. The rules by
which rows meet tokens are those of `align.py`. Runs in: any reader.

N = tokens of prompt and output together, P = probes, R = rows of a block, C = columns of its bank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clairai.errors import ClairaiError
from clairai.match.align import Placement, Scores, place_rows
from clairai.match.row_collector import UNKNOWN_VERSION, RowIndex, cached_spans, newest_rows
from clairai.wire import ring_messages

ROWS_AT_ONCE: Final = 1 << 20  # of an index, which may be longer than memory has room for


class StoredColumns(NamedTuple):
    """The columns of the rows that one version of the bank scored."""

    names: tuple[str, ...]
    weights: int | None = None


@dataclass(frozen=True, eq=False)
class StoredBlock:
    """Rows in the order of arrival."""

    rows_R: NDArray[np.void]  # ring_messages.ROW
    banks_R: NDArray[np.uint32]
    scores_RC: NDArray[np.float32]


ColumnsOf = Callable[[int], StoredColumns]


@dataclass(frozen=True, eq=False)
class StoredAnswer:
    """The rows of one choice of one request, in the order of arrival.

    Field by field, and not as ring_messages.ROW: numpy takes those many times faster.
    """

    position_R: NDArray[np.int64]
    token_R: NDArray[np.int32]
    phase_R: NDArray[np.uint8]
    span_R: NDArray[np.uint32]
    flags_R: NDArray[np.uint8]
    banks_R: NDArray[np.uint32]
    block_R: NDArray[np.int64]  # the block that has the row
    at_R: NDArray[np.int64]  # where it lies in that block


def find_answers(
    blocks: Sequence[StoredBlock], streams: Sequence[int]
) -> dict[tuple[int, int], StoredAnswer]:
    """The rows of these streams, by stream and choice."""
    wanted = np.unique(np.array(streams, np.uint64))
    found = [
        _pick_rows(number, block, wanted, begin)
        for number, block in enumerate(blocks)
        for begin in range(0, len(block.rows_R), ROWS_AT_ONCE)
    ]
    if not found:
        return {}
    rows_R, *places = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return dict(_split_answers(rows_R, places, wanted))


def _pick_rows(
    number: int, block: StoredBlock, wanted: NDArray[np.uint64], begin: int
) -> tuple[NDArray[Any], ...]:
    streams_R = np.ascontiguousarray(block.rows_R["stream"][begin : begin + ROWS_AT_ONCE])
    if len(wanted) == 1:
        at_R = np.flatnonzero(streams_R == wanted[0])
    else:
        place_R = np.minimum(np.searchsorted(wanted, streams_R), len(wanted) - 1)
        at_R = np.flatnonzero(wanted[place_R] == streams_R)
    at_R += begin
    return block.rows_R[at_R], block.banks_R[at_R], np.full(len(at_R), number), at_R


def _split_answers(
    rows_R: NDArray[np.void], places: Sequence[NDArray[Any]], wanted: NDArray[np.uint64]
) -> Iterator[tuple[tuple[int, int], StoredAnswer]]:
    """Rows of one answer together, each still in the order of arrival."""
    streams, choices = rows_R["stream"], rows_R["choice"]
    order = _sort_rows(streams, choices, wanted)
    streams, choices = streams[order], choices[order]
    position_R = rows_R["position"][order].astype(np.int64)
    others = [rows_R[name][order] for name in ("token_id", "phase", "span", "flags")]
    fields = (position_R, *others, *(place[order] for place in places))
    is_first = np.ones(len(order), bool)
    is_first[1:] = (streams[1:] != streams[:-1]) | (choices[1:] != choices[:-1])
    begins = np.flatnonzero(is_first)
    ends = np.append(begins, len(order))[1:]
    keys = zip(streams[begins].tolist(), choices[begins].tolist(), strict=True)
    for key, begin, end in zip(keys, begins.tolist(), ends.tolist(), strict=True):
        yield key, StoredAnswer(*(field[begin:end] for field in fields))


def _sort_rows(
    streams: NDArray[np.uint64], choices: NDArray[np.uint16], wanted: NDArray[np.uint64]
) -> NDArray[np.intp]:
    """An order by stream and choice in which rows of one answer stay in the order of arrival."""
    if choices.any() or len(wanted) > 1 << 16:
        return np.lexsort((choices, streams))
    # numpy sorts 16 bits by their value, in a tenth of the time.
    return np.argsort(np.searchsorted(wanted, streams).astype(np.uint16), kind="stable")


class _RowPart(NamedTuple):
    """Rows of an answer that lie in one block and have the same columns."""

    scores_RC: NDArray[np.float32]
    at: NDArray[np.int64]  # where they lie there
    positions: NDArray[np.int64]  # of their tokens, ascending
    columns: NDArray[np.intp] | None  # where their columns go; None: they are all columns


class StoredScores(Scores):
    """Scores that are read from where they are stored, at every access anew.

    They take no memory until they are read. Keep what you read if you read it often.
    """

    def __init__(self, names: tuple[str, ...], placed: Placement, parts: tuple[_RowPart, ...]):
        values = {
            "names": names,
            "token_ids": placed.token_ids,
            "phase": placed.phase,
            "num_prompt": placed.num_prompt,
            "missing": placed.missing,
            "weights": placed.weights,
            "media": placed.media,
            "_parts": parts,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)  # as in any frozen dataclass

    _parts: tuple[_RowPart, ...]

    @property
    def scores_NP(self) -> NDArray[np.float32]:
        return self._read(0, len(self.token_ids))

    @property
    def prompt(self) -> NDArray[np.float32]:
        return self._read(0, self.num_prompt)

    @property
    def generated(self) -> NDArray[np.float32]:
        return self._read(self.num_prompt, len(self.token_ids))

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        """One probe's score of every token."""
        if name not in self.names:
            return super().__getitem__(name)
        column = self.names.index(name)
        found = np.full(len(self.token_ids), np.nan, np.float32)
        for part in self._parts:
            if part.columns is None:
                found[part.positions] = part.scores_RC[part.at, column]
            elif len(at := np.flatnonzero(part.columns == column)):
                found[part.positions] = part.scores_RC[part.at, at[0]]
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process has its scores in memory."""
        return Scores, (
            self.names,
            self.token_ids,
            self.scores_NP,
            self.phase,
            self.num_prompt,
            self.missing,
            self.weights,
            self.media,
        )

    def _read(self, begin: int, end: int) -> NDArray[np.float32]:
        """Rows of the tokens from `begin` to before `end`."""
        found = np.empty((end - begin, len(self.names)), np.float32)
        is_read = np.zeros(end - begin, bool)
        for part in self._parts:
            first, last = np.searchsorted(part.positions, (begin, end))
            rows = part.positions[first:last] - begin
            _copy_rows(part, part.at[first:last], found, rows)
            is_read[rows] = True
        found[~is_read] = np.nan
        return found


def _copy_rows(
    part: _RowPart, at: NDArray[np.int64], into: NDArray[np.float32], rows: NDArray[np.int64]
) -> None:
    if not len(rows):
        return
    if part.columns is not None:
        into[rows] = np.nan
        into[np.ix_(rows, part.columns)] = part.scores_RC[at]
    elif rows[-1] - rows[0] + 1 == len(rows):
        # With another mode numpy would copy them twice.
        np.take(part.scores_RC, at, axis=0, out=into[rows[0] : rows[-1] + 1], mode="clip")
    else:
        into[rows] = part.scores_RC[at]


def align_stored(
    answer: StoredAnswer,
    blocks: Sequence[StoredBlock],
    columns_of: ColumnsOf,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
) -> StoredScores:
    """As `align`, without reading a score; `columns_of` describes a version of the bank."""
    is_token_R = answer.phase_R < ring_messages.CACHED
    tokens = np.flatnonzero(is_token_R)
    newest = _newest(answer.position_R, tokens)
    columns = {version: columns_of(version) for version in _versions(answer, is_token_R)}
    names = _join_names(columns)
    index = _index_rows(answer, newest, is_token_R, names, columns)
    placed = place_rows(index, prompt_token_ids, output_token_ids)
    kept = newest[placed.is_kept]
    parts = tuple(_split_parts(answer, kept, blocks, names, columns))
    return StoredScores(names, placed, parts)


def _newest(position_R: NDArray[np.int64], tokens: NDArray[np.intp]) -> NDArray[np.intp]:
    positions = position_R[tokens]
    if (positions[1:] > positions[:-1]).all():  # nothing was computed twice
        return tokens
    return tokens[newest_rows(positions)]


def _versions(answer: StoredAnswer, is_token_R: NDArray[np.bool_]) -> list[int]:
    """The banks of its rows in order; of marks only the first, which may be all there is."""
    if (answer.banks_R == answer.banks_R[0]).all():
        return [int(answer.banks_R[0])]
    is_named_R = is_token_R.copy()
    is_named_R[:1] = True
    return list(dict.fromkeys(answer.banks_R[is_named_R].tolist()))


def _join_names(columns: Mapping[int, StoredColumns]) -> tuple[str, ...]:
    found = [one.names for one in columns.values()]
    return found[0] if len(found) == 1 else tuple(dict.fromkeys(sum(found, ())))


def _index_rows(
    answer: StoredAnswer,
    newest: NDArray[np.intp],
    is_token_R: NDArray[np.bool_],
    names: tuple[str, ...],
    columns: Mapping[int, StoredColumns],
) -> RowIndex:
    cached = np.flatnonzero(answer.phase_R == ring_messages.CACHED)
    marks = (answer.position_R[cached], answer.span_R[cached], answer.flags_R[cached])
    return RowIndex(
        names=names,
        positions=answer.position_R[newest],
        token_ids=answer.token_R[newest],
        phases=answer.phase_R[newest],
        media=ring_messages.media_of(answer.flags_R[newest]),
        weights_N=_weights_of(answer.banks_R[newest], columns),
        cached=cached_spans(*marks),
        finished=len(cached) < len(is_token_R) - int(is_token_R.sum()),
    )


def _weights_of(
    banks_N: NDArray[np.uint32], columns: Mapping[int, StoredColumns]
) -> NDArray[np.int64]:
    known = [UNKNOWN_VERSION if one.weights is None else one.weights for one in columns.values()]
    weights_N = np.full(len(banks_N), known[0], np.int64)
    for version, weights in zip([*columns][1:], known[1:], strict=True):
        weights_N[banks_N == version] = weights
    return weights_N


def _split_parts(
    answer: StoredAnswer,
    kept: NDArray[np.intp],
    blocks: Sequence[StoredBlock],
    names: tuple[str, ...],
    columns: Mapping[int, StoredColumns],
) -> Iterator[_RowPart]:
    block_N, at_N = answer.block_R[kept], answer.at_R[kept]
    positions_N = answer.position_R[kept]
    if len(columns) == 1 and len(kept) and (block_N == block_N[0]).all():
        yield _make_part(blocks[block_N[0]], at_N, positions_N, names, names)
        return
    banks_N = answer.banks_R[kept]
    by_names: dict[tuple[str, ...], list[int]] = {}
    for version, one in columns.items():
        by_names.setdefault(one.names, []).append(version)
    for number in np.unique(block_N).tolist():
        for held, versions in by_names.items():
            is_part = (block_N == number) & np.isin(banks_N, versions)
            if is_part.any():
                yield _make_part(blocks[number], at_N[is_part], positions_N[is_part], held, names)


def _make_part(
    block: StoredBlock,
    at: NDArray[np.int64],
    positions: NDArray[np.int64],
    held: tuple[str, ...],
    names: tuple[str, ...],
) -> _RowPart:
    """`held` are the columns of these rows, `names` those of the whole answer."""
    if block.scores_RC.shape[1] != len(held):
        raise ClairaiError(
            f"stored rows have {block.scores_RC.shape[1]} columns for {len(held)} probes: "
            "please report"
        )
    into = None if held == names else np.array([names.index(name) for name in held], np.intp)
    return _RowPart(block.scores_RC, at, positions, into)
