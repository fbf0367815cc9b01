"""Calls the listeners of every step so that an error ends the request it belongs to, and no other.

Runs in: the worker. What is asked of the worker was judged at admission, by the same code; an error
here is a bug, or a worker that disagrees. A request that cannot be served as asked must not be
served otherwise: it fails, and the engine core tells its client why (compat/failed_requests.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai.engine.step import ForwardInputs, NewRequest, StepBatch, StepListener
from clairai.errors import ClairaiError

_log: Final = logging.getLogger("clairai.step")


class StepGuard:
    """The listeners of one worker; each hears of a step in the same order."""

    def __init__(self, listeners: Sequence[StepListener]) -> None:
        self._listeners = tuple(listeners)
        self._failures: dict[str, str] = {}  # why requests have failed since they were last taken
        self._batch: StepBatch | None = None  # of this step

    def begin(self, new: Sequence[NewRequest], finished: Sequence[str]) -> None:
        self._batch = None
        for listener in self._listeners:
            try:
                errors = listener.begin(new, finished)
            except Exception as raised:  # it may have heard of none of them
                errors = {request.req_id: raised for request in new}
                _log.exception("%s could not begin a step", _name(listener))
            if errors:
                for req_id, error in errors.items():
                    self.fail(req_id, error)
                new = [request for request in new if request.req_id not in errors]

    def read(self, req_id: str, read: Callable[[], NewRequest]) -> NewRequest | None:
        """What a new request asks of the worker; None, and it has failed, if that is unreadable."""
        try:
            return read()
        except Exception as error:
            self.fail(req_id, error)
            return None

    def amend(self, req_id: str, amend: Callable[[StepListener], None]) -> None:
        """Change a running request at each listener."""
        try:
            for listener in self._listeners:
                amend(listener)
        except Exception as error:
            self.fail(req_id, error)

    def place(self, batch: StepBatch) -> None:
        self._batch = batch
        for listener in self._listeners:
            try:
                listener.place(batch)
            except Exception as error:
                self._fail_each(listener.place_failed(batch), listener, error)

    @property
    def batch(self) -> StepBatch | None:
        """The batch of this step; None if it is not placed, or forwards nothing."""
        return self._batch

    def reject(self, rejected_R: NDArray[np.int32]) -> None:
        """Before `end`: the sampler rejects so many of the last tokens of each request."""
        batch = self._batch
        for listener in self._listeners:
            try:
                listener.reject(rejected_R)
            except Exception as error:
                self._fail_each(listener.end_failed(batch), listener, error)

    def end(self, inputs: Callable[[], ForwardInputs]) -> bool:
        """True if all listeners can skip a step with the same batch."""
        batch, self._batch = self._batch, None
        for listener in self._listeners:
            try:
                listener.end(inputs)
            except Exception as error:
                self._fail_each(listener.end_failed(batch), listener, error)
        if self._failures:
            return False
        return all(listener.can_skip() for listener in self._listeners)

    def fail(self, req_id: str, error: Exception) -> None:
        """Serve this request no longer; what it still forwards is nobody's."""
        reason = error.reason if isinstance(error, ClairaiError) else type(error).__name__
        _log.error("request %s fails in the worker", req_id, exc_info=error)
        self._failures.setdefault(req_id, reason)
        for listener in self._listeners:
            try:
                listener.drop(req_id, reason)
            except Exception:
                _log.exception("%s could not drop request %s", _name(listener), req_id)

    def take_failures(self) -> dict[str, str]:
        """Why each request failed that has failed since the last call."""
        failures, self._failures = self._failures, {}
        return failures

    def before_dummy_run(self) -> None:
        for listener in self._listeners:
            listener.before_dummy_run()

    def after_dummy_run(self) -> None:
        for listener in self._listeners:
            listener.after_dummy_run()

    def _fail_each(self, req_ids: Iterable[str], listener: StepListener, error: Exception) -> None:
        """An error that belongs to the step as a whole: log it even if it ends no request."""
        _log.error("%s failed in a step", _name(listener), exc_info=error)
        for req_id in req_ids:
            self.fail(req_id, error)


def _name(listener: StepListener) -> str:
    return type(listener).__name__
