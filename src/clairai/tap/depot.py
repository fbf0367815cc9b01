"""Takes courses of requests; gives tracks, and holds in the tables what the courses need.

Rows and programs are known by their content: requests that steer alike share them, and what nobody
uses any more stays as a cache until its place is needed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from clairai.steer.course import OPEN_END, Course, Row
from clairai.steer.segments import Segment, program_keys, segments
from clairai.tap.programs import Assembler
from clairai.tap.seats import Seats
from clairai.tap.steer_tables import SteerTables


@dataclass(frozen=True)
class Track:
    """A course, laid along the positions: from each edge up to the next, one program."""

    edges: tuple[int, ...]  # the first is 0; the last, OPEN_END, has no program
    programs: tuple[int, ...]
    seat: int | None  # where its gates remember, if they do
    keys: frozenset[bytes]
    digests: frozenset[str]

    def segment(self, position: int) -> tuple[int, int, int]:
        """Program of a position, and where its segment begins and ends."""
        index = bisect_right(self.edges, position) - 1
        return self.programs[index], self.edges[index], self.edges[index + 1]


class Depot:
    """What the tables hold for the requests that the worker knows."""

    def __init__(self, tables: SteerTables, site_of: Mapping[str, str]) -> None:
        self._tables = tables
        self._assembler = Assembler(tables.sites, site_of)
        self._rows: Seats[str] = Seats("rows of vectors", 0, len(tables.vectors_VD))
        self._programs: Seats[bytes] = Seats("programs", 1, len(tables.words_PSOW) - 1)
        self._seats: Seats[str] = Seats("seats", 0, len(tables.state_ZG))
        self._digests_of: dict[bytes, frozenset[str]] = {}  # rows of a program
        self._keys_of: defaultdict[str, set[bytes]] = defaultdict(set)  # programs with a row

    def load(self, req_id: str, course: Course) -> Track:
        """Have all that this request will need in the tables, from the next forward on."""
        self._check_token_ids(course)
        rows = {row.digest: row for row in _rows_of(course)}
        self._load_rows(rows.values())
        parts = segments(course)
        keys = program_keys(course, parts)
        lists = {key: active for key, (_, _, active) in zip(keys, parts, strict=True)}
        for key, active in lists.items():
            self._load_program(key, course, active)
        edges, programs = _laid(parts, [self._programs[key] for key in keys])
        seat = self._seat(req_id, course) if course.is_stateful else None
        return Track(edges, programs, seat, frozenset(lists), frozenset(rows))

    def unload(self, req_id: str, track: Track) -> None:
        for key in track.keys:
            self._programs.leave(key)
        for digest in track.digests:
            self._rows.leave(digest)
        if track.seat is not None:
            self._seats.leave(req_id)
            self._seats.forget(req_id)

    def _check_token_ids(self, course: Course) -> None:
        if self._tables.token_ids_T is not None:
            return
        if any(action.skips_special for action in course.actions):
            raise RuntimeError(
                "a course skips special tokens, and this runner shows no token ids; such requests "
                "are to be refused at admission: please report this"
            )

    def _load_rows(self, rows: Iterable[Row]) -> None:
        places = [(self._rows.take(row.digest), row) for row in rows]
        new = [(place, row) for place, row in places if place.is_new]
        for place, _ in new:
            # Nobody uses these either: whoever uses a program uses its rows.
            for key in tuple(self._keys_of.get(place.evicted or "", ())):
                self._programs.forget(key)
                self._unlink(key)
        if new:
            self._tables.put_rows([place.index for place, _ in new], [r.read() for _, r in new])

    def _load_program(self, key: bytes, course: Course, active: tuple[int, ...]) -> None:
        place = self._programs.take(key)
        if not place.is_new:
            return
        if place.evicted is not None:
            self._unlink(place.evicted)
        program = self._assembler.program(course, active, self._rows.__getitem__)
        self._tables.put_program(place.index, program.words_SOW, program.num_ops_S)
        self._digests_of[key] = frozenset(row.digest for row in _rows_of(course, active))
        for digest in self._digests_of[key]:
            self._keys_of[digest].add(key)

    def _unlink(self, key: bytes) -> None:
        """A program that is no longer in the tables."""
        for digest in self._digests_of.pop(key):
            self._keys_of[digest].discard(key)
            if not self._keys_of[digest]:
                del self._keys_of[digest]

    def _seat(self, req_id: str, course: Course) -> int:
        seat = self._seats.take(req_id).index
        self._tables.put_seat(seat, self._assembler.reads(course))
        return seat


def _rows_of(course: Course, active: Iterable[int] | None = None) -> list[Row]:
    chosen = range(len(course.actions)) if active is None else active
    actions = [course.actions[index] for index in chosen]
    gates = [course.gates[action.gate].row for action in actions if action.gate is not None]
    return [*gates, *(row for action in actions for row in action.rows)]


def _laid(
    parts: Iterable[Segment], programs: Iterable[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Edges and the program behind each; 0 where nothing acts."""
    starts, ends, laid = [], [0], []
    for (start, end, _), program in zip(parts, programs, strict=True):
        if start > ends[-1]:
            starts.append(ends[-1])
            laid.append(0)
        starts.append(start)
        laid.append(program)
        ends.append(end)
    if ends[-1] < OPEN_END:
        starts.append(ends[-1])
        laid.append(0)
    return (*starts, OPEN_END), tuple(laid)
