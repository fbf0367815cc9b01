"""Takes what the worker tells of each step; gives the rows that orders ask for to the clerk.

Beside the Station, on the first rank alone: every rank holds the same rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from clairai.capture.backend import CaptureBackend
from clairai.engine.capture.capture_resolver import steering_json
from clairai.engine.capture.row_copier import RowCopier, ScoreSource
from clairai.engine.capture.row_selection import RowSelection, RowSelector
from clairai.engine.steer.steering_plan import SteeringPlan
from clairai.engine.step import ForwardInputs, NewRequest, StepBatch
from clairai.wire import capture_messages

MAX_REMEMBERED_STREAMS: Final = 1 << 16


class WorkerCapture:
    """The worker's side of captures: who is captured, which rows of a step are theirs."""

    def __init__(
        self,
        copier: RowCopier,
        clerk: CaptureBackend,
        site_of: Mapping[str, int],
        scores: ScoreSource,
    ) -> None:
        self._taker, self._clerk, self._scores = copier, clerk, scores
        self._picks = RowSelector(site_of)
        self._pick: RowSelection | None = None
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
        while len(self._streams) > MAX_REMEMBERED_STREAMS:
            self._streams.popitem(last=False)

    def _close(self, req_id: str) -> None:
        seat = self._picks.close(req_id)
        if seat is None:
            return
        self._open[seat[0]].discard(req_id)
        if not self._open[seat[0]]:
            del self._open[seat[0]]
        self._clerk.finish(seat)

    def amend(self, req_id: str, plan: SteeringPlan | None) -> None:
        seat = self._picks.answer_id_of(req_id)
        if seat is not None:
            self._clerk.amend(seat, steering_json(plan))

    def place(self, batch: StepBatch) -> None:
        self._pick = self._picks.step(batch)

    def end(self, inputs: Callable[[], ForwardInputs]) -> None:
        selection, self._pick = self._pick, None
        if selection is not None:
            self._taker.take(selection, inputs(), self._scores)

    def can_skip(self) -> bool:
        """Who was the last to be captured left in a step that began here."""
        return not len(self._picks)

    def before_dummy_run(self) -> None:
        """A forward of nobody's rows may write over the last step's."""
        self._taker.begin()

    def after_dummy_run(self) -> None:
        """Nothing of it is left."""

    def answer(self, control: capture_messages.CaptureControl) -> capture_messages.CaptureReply:
        results = self._clerk.results
        match control:
            case capture_messages.FindCaptures(request_ids, streams, is_ended):
                known = [*map(self._streams.get, request_ids), *streams]
                if is_ended:
                    self._end(stream for stream in known if stream is not None)
                return capture_messages.Captures(
                    tuple(() if one is None else results.of_stream(one) for one in known)
                )
            case capture_messages.ListCaptures(limit):
                return capture_messages.Captures(results.newest(limit))
            case capture_messages.DescribeCapture():
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
