"""The short way for steps that are like the last one: C does what all listeners would do.

Runs in: the worker. A dozen short Python functions, none of them in a CPU cache by then, take
longer in a step than all that they compute (step.c). While the same requests decode, the wrapped
methods of vLLM's model runner stay in C.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clairai.engine.publish.header_layout import StepCounters
from clairai.engine.publish.step_rows import RepeatedBatch

RunnerMethod = Callable[..., Any]
AttributeNames = tuple[str, str, str]


class RepeatPath:
    """While it is on, listeners hear nothing of a step that is like the last one.

    Whoever has something to do in the next step turns it off.
    """

    def __init__(
        self, extension: Any = None, counters: StepCounters | None = None, memory: object = None
    ) -> None:
        """`extension` is the module that step.c is; without it no step takes the short way.

        `memory` is that of the headers: it is kept for as long as C may write there.
        """
        self._extension, self._memory = extension, memory
        self._counters = StepCounters() if counters is None else counters
        self._address = ctypes.addressof(self._counters)
        self._batch: RepeatedBatch | None = None  # C reads it

    @property
    def is_on(self) -> bool:
        return bool(self._counters.is_repeating)

    @is_on.setter
    def is_on(self, is_on: bool) -> None:
        self._counters.is_repeating = is_on

    def start(self, batch: RepeatedBatch) -> bool:
        """From now on, steps like this one may be repeated. False if there is no C to do it."""
        if self._extension is None:
            return False
        self._batch, self._counters.batch = batch, id(batch.known)
        return True

    def repeat(
        self, req_ids: Sequence[str], counts_R: NDArray[np.int32], starts_R: NDArray[np.int32]
    ) -> bool:
        """Write the header of a step like the last one. False if it is not: nothing was done."""
        if self._extension is None:
            return False
        return bool(self._extension.repeat_step(self._address, req_ids, counts_R, starts_R))

    def wrap_execute_model(
        self,
        original: RunnerMethod,
        otherwise: RunnerMethod,
        then: RunnerMethod,
        names: AttributeNames,
    ) -> RunnerMethod:
        """`original` alone for a step like the last one, `otherwise` for any other.

        It may be like the last one if the first argument has nothing new: two of its attributes
        `names` are empty, and the third does not exist. If its batch turns out to be another one,
        `then()` ends the step, and returns whether the next may be repeated.
        """
        if self._extension is None:
            return otherwise
        return self._wrapped("wrap_execute_model", original, otherwise, then, names)

    def wrap_prepare_inputs(
        self,
        original: RunnerMethod,
        otherwise: RunnerMethod,
        then: RunnerMethod,
        names: AttributeNames,
    ) -> RunnerMethod:
        """`original`, and `then(batch)` for a batch unlike the last; `otherwise` is its twin.

        `names` are the attributes of the batch that `repeat` takes.
        """
        if self._extension is None:
            return otherwise
        return self._wrapped("wrap_prepare_inputs", original, otherwise, then, names)

    def _wrapped(self, name: str, *given: Any) -> RunnerMethod:
        wrapped: RunnerMethod = getattr(self._extension, name)(*given, self._address, self)
        return wrapped
