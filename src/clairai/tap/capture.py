"""Takes what the worker tells of each step; gives the rows that orders ask for to the clerk.

Beside the Station, on the first rank alone: every rank holds the same rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from clairai import wire_capture
from clairai.capture.clerks import Clerk
from clairai.capture.resolve import steering_note
from clairai.steer.course import Course
from clairai.tap.outlet import Inputs
from clairai.tap.picks import Pick, Picks
from clairai.tap.rows import Batch
from clairai.tap.station import NewRequest
from clairai.tap.taker import Scores, Taker

REMEMBERED: Final = 1 << 16


class Capture:
    """The worker's side of captures: who is captured, which rows of a step are theirs."""

    def __init__(
        self, taker: Taker, clerk: Clerk, site_of: Mapping[str, int], scores: Scores
    ) -> None:
        self._taker, self._clerk, self._scores = taker, clerk, scores
        self._picks = Picks(site_of)
        self._pick: Pick | None = None
        self._streams: OrderedDict[str, int] = OrderedDict()  # by the id the caller knows
        self._open: dict[int, set[str]] = {}  # requests of a stream that are not finished

    def begin(self, new: Sequence[NewRequest], finished: Sequence[str]) -> None:
        self._taker.begin()
        for req_id in finished:
            self._close(req_id)
        for request in new:
            if request.order is not None:
                self._enter(request)
        if new or finished:
            self._clerk.post()
        self._pick = None

    def _enter(self, request: NewRequest) -> None:
        order, mark = request.order, request.mark
        assert order is not None
        if not self._picks.open(request.req_id, mark, request.prompt_len, order):
            return
        self._clerk.begin((mark.stream, mark.choice), order)
        self._open.setdefault(mark.stream, set()).add(request.req_id)
        self._streams[request.request_id] = mark.stream
        while len(self._streams) > REMEMBERED:
            self._streams.popitem(last=False)

    def _close(self, req_id: str) -> None:
        seat = self._picks.close(req_id)
        if seat is None:
            return
        self._open[seat[0]].discard(req_id)
        if not self._open[seat[0]]:
            del self._open[seat[0]]
        self._clerk.finish(seat)

    def amend(self, req_id: str, course: Course | None) -> None:
        seat = self._picks.seat_of(req_id)
        if seat is not None:
            self._clerk.amend(seat, steering_note(course))

    def place(self, batch: Batch) -> None:
        self._pick = self._picks.step(batch)

    def end(self, inputs: Callable[[], Inputs]) -> None:
        pick, self._pick = self._pick, None
        if pick is not None:
            self._taker.take(pick, inputs(), self._scores)

    def rests(self) -> bool:
        """Who was the last to be captured left in a step that began here."""
        return not len(self._picks)

    def blank(self) -> None:
        """A forward of nobody's rows may write over the last step's."""
        self._taker.begin()

    def blanked(self) -> None:
        """Nothing of it is left."""

    def answer(self, control: wire_capture.Control) -> wire_capture.Reply:
        results = self._clerk.results
        match control:
            case wire_capture.FindCaptures(request_ids, streams, is_ended):
                known = [*map(self._streams.get, request_ids), *streams]
                if is_ended:
                    self._end(stream for stream in known if stream is not None)
                return wire_capture.Captures(
                    tuple(() if one is None else results.of_stream(one) for one in known)
                )
            case wire_capture.ListCaptures(limit):
                return wire_capture.Captures(results.newest(limit))
            case wire_capture.DescribeCapture():
                return results.state(
                    staging_nbytes=self._taker.arena.nbytes,
                    pending_nbytes=self._clerk.pending_nbytes,
                    stash_nbytes=self._taker.stash_nbytes,
                )

    def _end(self, streams: Iterable[int]) -> None:
        """The caller has their last token; the scheduler may never take a step that says so."""
        for stream in streams:
            for req_id in list(self._open.get(stream, ())):
                self._close(req_id)
        self._clerk.commit()

    def close(self) -> None:
        self._clerk.close()
        self._taker.close()
