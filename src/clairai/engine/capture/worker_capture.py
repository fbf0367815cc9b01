"""Captures the rows of each step that requests ask for.

Runs in: the worker with the step publisher. Every rank of a stage holds the same rows; those of
earlier pipeline stages come with the step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai.capture.backend import CaptureBackend
from clairai.engine.capture.capture_resolver import steering_json
from clairai.engine.capture.row_copier import RowCopier, ScoreSource
from clairai.engine.capture.row_selection import RowSelection, RowSelector
from clairai.engine.capture.stage_rows import EarlierRows
from clairai.engine.steer.steering_plan import SteeringPlan
from clairai.engine.step import ForwardInputs, NewRequest, RequestErrors, StepBatch, try_each
from clairai.wire import capture_messages

MAX_REMEMBERED_STREAMS: Final = 1 << 16


class WorkerCapture:
    """Listens to the steps of the worker and answers what was captured."""

    def __init__(
        self,
        copier: RowCopier,
        backend: CaptureBackend,
        site_of: Mapping[str, int],
        scores: ScoreSource,
        earlier: EarlierRows | None = None,
    ) -> None:
        """`earlier`: rows that other stages of a pipeline send; None without stages."""
        self._copier, self._backend, self._scores = copier, backend, scores
        self._earlier = earlier
        self._selector = RowSelector(site_of)
        self._selection: RowSelection | None = None  # of the step that runs
        self._batch: StepBatch | None = None  # of that step
        self._streams: OrderedDict[str, int] = OrderedDict()  # by vLLM's external request id
        self._open: dict[int, set[str]] = {}  # unfinished requests of each stream

    def begin(self, new: Sequence[NewRequest], finished: Sequence[str]) -> RequestErrors:
        self._selection = None
        self._copier.begin()
        for req_id in finished:
            self._finish(req_id)
        errors = try_each(new, self._add)
        if new or finished:
            self._backend.send()
        return errors

    def drop(self, req_id: str, reason: str) -> None:
        answer = self._selector.answer_of(req_id)
        if answer is not None:
            self._backend.results.fail(answer, f"the request failed in the worker: {reason}")
            self._finish(req_id)

    def place_failed(self, batch: StepBatch) -> Sequence[str]:
        """Rows of this step that were asked for are missing: their requests cannot go on."""
        self._selection = None
        return [id_ for id_ in batch.req_ids if self._selector.answer_of(id_) is not None]

    def end_failed(self, batch: StepBatch | None) -> Sequence[str]:
        return () if batch is None else self.place_failed(batch)

    def _add(self, request: NewRequest) -> None:
        plan, mark = request.capture_plan, request.mark
        given = (request.req_id, mark, request.prompt_len)
        if plan is None or not self._selector.open(*given, plan, request.media, request.num_known):
            return
        self._backend.begin((mark.stream, mark.choice), plan)
        self._open.setdefault(mark.stream, set()).add(request.req_id)
        self._streams[request.request_id] = mark.stream
        while len(self._streams) > MAX_REMEMBERED_STREAMS:
            self._streams.popitem(last=False)

    def _finish(self, req_id: str) -> None:
        answer = self._selector.close(req_id)
        if answer is None:
            return
        stream = answer[0]
        unfinished = self._open.get(stream, set())  # none if it failed before it was remembered
        unfinished.discard(req_id)
        if not unfinished:
            self._open.pop(stream, None)
        self._backend.finish(answer)

    def amend(self, req_id: str, plan: SteeringPlan | None) -> None:
        answer = self._selector.answer_of(req_id)
        if answer is not None:
            self._backend.amend(answer, steering_json(plan))

    def place(self, batch: StepBatch) -> None:
        self._selection, self._batch = self._selector.step(batch), batch

    def reject(self, rejected_R: NDArray[np.int32]) -> None:
        self._selector.reject(rejected_R)
        if self._selection is not None and self._batch is not None:
            self._selection = self._selection.leave_out(self._batch, rejected_R)

    def end(self, inputs: Callable[[], ForwardInputs]) -> None:
        selection, self._selection = self._selection, None
        if selection is not None:
            if self._earlier is not None:
                self._earlier.fill(selection)
            self._copier.copy(selection, inputs(), self._scores)

    def can_skip(self) -> bool:
        """True while no request is captured: nothing is to do until one begins."""
        return not len(self._selector)

    def before_dummy_run(self) -> None:
        """A forward pass without requests begins; it may overwrite the stash."""
        self._copier.begin()

    def after_dummy_run(self) -> None:
        """It left nothing to copy."""

    def answer(self, control: capture_messages.CaptureControl) -> capture_messages.CaptureReply:
        results = self._backend.results
        match control:
            case capture_messages.FindCaptures(request_ids, streams, is_ended):
                known = [*map(self._streams.get, request_ids), *streams]
                found = tuple(() if one is None else results.of_stream(one) for one in known)
                if is_ended and any(found):  # another engine core may have captured them
                    self._end(stream for stream in known if stream is not None)
                    found = tuple(() if one is None else results.of_stream(one) for one in known)
                return capture_messages.Captures(found)
            case capture_messages.ListCaptures(limit, owner):
                return capture_messages.Captures(results.newest(limit, owner))
            case capture_messages.DescribeCapture():
                return results.state(
                    staging_nbytes=self._copier.arena.nbytes,
                    pending_nbytes=self._backend.pending_nbytes,
                    stash_nbytes=self._copier.stash_nbytes,
                    failure=self._backend.lasting_failure,
                )

    def _end(self, streams: Iterable[int]) -> None:
        """The caller has their last token; the scheduler may never run a step that says so."""
        for stream in streams:
            for req_id in list(self._open.get(stream, ())):
                self._finish(req_id)
        self._backend.commit()

    def close(self) -> None:
        self._backend.close()
        self._copier.close()
