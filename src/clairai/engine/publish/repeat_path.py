"""Takes a step that its graph published; gives the next ones that are like it, each in one call.

What a step costs the host is what it touches (steady.h): a dozen short functions of Python, none of
which is in any cache, take longer than all they compute. While the same requests decode, C stands
for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from clairai.engine.publish import step_library

RunnerMethod = Callable[..., Any]
AttributeNames = tuple[str, str, str]


class RepeatPath(Protocol):
    """One for each ring's writer.

    While it is on, listeners hear nothing of a step that is like the last one: its brief is written
    here. Whoever has something to do in the next step turns it off.
    """

    is_on: bool

    def repeat(self, pace: int, ledger: int, held: object) -> bool:
        """These are the last step's, by their addresses; `held` keeps the pace there."""

    def again(
        self, req_ids: Sequence[str], counts_R: NDArray[np.int32], starts_R: NDArray[np.int32]
    ) -> bool:
        """Write the brief of a step that keeps the pace; False: it does not, nothing was done."""

    def stepping(
        self,
        wrapped: RunnerMethod,
        otherwise: RunnerMethod,
        then: RunnerMethod,
        names: AttributeNames,
    ) -> RunnerMethod:
        """`wrapped` alone while it is on and stays on, then `then()`, which says if it is on again.

        `otherwise` if it is off, or if an argument is named, or if an attribute of the first one
        says something: `names` of those that are empty, and of one that is not there.
        """

    def laying(
        self,
        wrapped: RunnerMethod,
        otherwise: RunnerMethod,
        then: RunnerMethod,
        names: AttributeNames,
    ) -> RunnerMethod:
        """`wrapped`, and `then(batch)` for a batch that does not keep the pace.

        `names` of the batch's attributes that `again` takes. `otherwise` is the same in Python.
        """


class NoRepeatPath:
    """Repeats nothing: for steps that the host publishes, and machines without a compiler."""

    is_on = False

    def repeat(self, pace: int, ledger: int, held: object) -> bool:
        del pace, ledger, held
        return False

    def again(
        self, req_ids: Sequence[str], counts_R: NDArray[np.int32], starts_R: NDArray[np.int32]
    ) -> bool:
        del req_ids, counts_R, starts_R
        return False

    def stepping(
        self,
        wrapped: RunnerMethod,
        otherwise: RunnerMethod,
        then: RunnerMethod,
        names: AttributeNames,
    ) -> RunnerMethod:
        del wrapped, then, names
        return otherwise

    def laying(
        self,
        wrapped: RunnerMethod,
        otherwise: RunnerMethod,
        then: RunnerMethod,
        names: AttributeNames,
    ) -> RunnerMethod:
        del wrapped, then, names
        return otherwise


def make_repeat_path() -> RepeatPath:
    step = step_library.find_step_library()
    return NoRepeatPath() if step is None else cast(RepeatPath, step.Steady())
