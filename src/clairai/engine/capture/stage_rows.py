"""Captured rows of earlier pipeline stages, on their way to the last one, which stores them all.

A stage sends the rows that requests ask for with the step that they belong to. The last stage puts
them into its stash, beside the rows of its own points, and captures as an engine without stages
does. All ranks number sites alike and have a stash of one shape: a place in it is the same row in
each of them.

M = rows that are sent (tokens times points), S = sites, R = rows of the stash, D = model width.

Runs in: the workers of a pipeline. `compat/pipeline_stages.py` sends and receives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from clairai.engine.capture.row_selection import Ints, RowSelection, RowSelector
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.steer.steering_plan import SteeringPlan
from clairai.engine.step import ForwardInputs, NewRequest, RequestErrors, StepBatch, try_each
from clairai.errors import TapMissingError

_log: Final = logging.getLogger("clairai.capture")


@dataclass(frozen=True, eq=False)
class SentRows:
    """Rows of one step, and where in the stash each of them lies."""

    places_M: torch.Tensor
    rows_MD: torch.Tensor


class StageStash:
    """The stash of one rank, as far as it holds the rows of some stages."""

    def __init__(self, tables: ScoreTables, sites: Iterable[int]) -> None:
        """`sites` are the numbers of those whose rows are meant."""
        num_sites, self._num_rows, width = tables.stash_SRD.shape
        self._stash = tables.stash_SRD.view(num_sites * self._num_rows, width)
        self._is_meant_S = np.zeros(num_sites, bool)
        self._is_meant_S[list(sites)] = True

    def places(self, selection: RowSelection) -> Ints:
        """Where the selected rows of these sites lie, in an order that all ranks share."""
        bounds, found = selection.bounds().tolist(), list[Ints]()
        formats = zip(selection.batch.formats, bounds[:-1], bounds[1:], strict=True)
        for format, first, end in formats:
            sites_P = format.sites_P[self._is_meant_S[format.sites_P]]
            row_N = selection.row_N[first:end]
            found.append((sites_P[:, None] * self._num_rows + row_N[None]).ravel())
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def read(self, selection: RowSelection) -> SentRows | None:
        """A copy of the selected rows of these sites; None if there are none."""
        places_M = self.places(selection)
        if not len(places_M):
            return None
        at_M = torch.from_numpy(places_M).to(self._stash.device)
        return SentRows(at_M, self._stash.index_select(0, at_M))

    def write(self, sent: SentRows) -> None:
        self._stash.index_copy_(0, sent.places_M, sent.rows_MD)


class EarlierRows:
    """What came with a step from the stages before this one."""

    def __init__(self, stash: StageStash) -> None:
        """`stash`: the part of ours that holds the rows of those stages."""
        self._stash = stash
        self._sent: SentRows | None = None

    def receive(self, sent: SentRows | None) -> None:
        """Called for every step, also for one that brings nothing."""
        self._sent = sent

    def fill(self, selection: RowSelection) -> None:
        """Put the rows of this step into the stash. TapMissingError if a selected one is missing:

        its place still has a row of another step.
        """
        wanted_M, sent = self._stash.places(selection), self._sent
        if not len(wanted_M):
            return
        sent_M = np.zeros(0, np.int64) if sent is None else sent.places_M.cpu().numpy()
        # An earlier stage may send more: it hears later that a request has ended.
        if sent is None or not (
            np.array_equal(wanted_M, sent_M) or bool(np.isin(wanted_M, sent_M).all())
        ):
            raise TapMissingError(
                f"of {len(wanted_M)} captured rows of earlier pipeline stages "
                f"{np.isin(wanted_M, sent_M).sum()} came with their step; the captured requests "
                f"of this step end, because the others would be rows of another step. Please "
                f"report it"
            )
        self._stash.write(sent)


class StageCapture:
    """Listens to the steps of a stage before the last, and says which rows to send on.

    An error here ends no request: rows that are not sent are missed by the last stage, which ends
    the requests that wanted them. A request that wanted none of them goes on.
    """

    def __init__(
        self, site_of: Mapping[str, int], handed: StageStash, earlier: EarlierRows
    ) -> None:
        """`handed`: the part of the stash that holds the rows of this stage and earlier ones."""
        self._selector = RowSelector(site_of)
        self._handed, self._earlier = handed, earlier
        self._selection: RowSelection | None = None  # of the step that runs

    def take_rows(self) -> SentRows | None:
        """The rows of the step that has just run, once."""
        selection, self._selection = self._selection, None
        if selection is None or not len(selection):
            return None
        try:
            self._earlier.fill(selection)
            return self._handed.read(selection)
        except Exception:
            _log.exception("captured rows of this step cannot be sent to the next pipeline stage")
            return None

    def begin(self, new: Sequence[NewRequest], finished: Sequence[str]) -> RequestErrors:
        self._selection = None
        for req_id in finished:
            self._selector.close(req_id)
        for req_id, error in try_each(new, self._add).items():
            _log.error("no rows of request %s are sent to the next stage", req_id, exc_info=error)
        return {}

    def _add(self, request: NewRequest) -> None:
        plan = request.capture_plan
        if plan is not None:
            given = (request.req_id, request.mark, request.prompt_len)
            self._selector.open(*given, plan, request.media)

    def amend(self, req_id: str, plan: SteeringPlan | None) -> None:
        """Nothing: the last stage says how its rows were steered."""

    def place(self, batch: StepBatch) -> None:
        self._selection = self._selector.step(batch)

    def reject(self, rejected_R: NDArray[np.int32]) -> None:
        """Never called: speculation with several ranks is refused."""

    def end(self, inputs: Callable[[], ForwardInputs]) -> None:
        """Nothing: `take_rows` is called when the forward has returned."""

    def drop(self, req_id: str, reason: str) -> None:
        del reason
        self._selector.close(req_id)

    def place_failed(self, batch: StepBatch) -> Sequence[str]:
        del batch
        self._selection = None
        return ()

    def end_failed(self, batch: StepBatch | None) -> Sequence[str]:
        del batch
        return ()

    def can_skip(self) -> bool:
        """True while no request is captured."""
        return not len(self._selector)

    def before_dummy_run(self) -> None:
        """Nothing waits in the stash."""

    def after_dummy_run(self) -> None:
        """It left nothing to send."""
