"""One step of the engine as the worker's parts see it: scores, steering and captures.

Runs in: the worker. A step is one forward pass. R = requests in the step, T = its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from clairai.engine.capture.capture_plan import CapturePlan
from clairai.engine.steer.steering_plan import SteeringPlan

if TYPE_CHECKING:  # the engine core reads requests too, and needs no torch for that
    import torch


@dataclass(frozen=True)
class RequestMark:
    """Who a request is outside of the engine: its stream id, and which of its answers this is."""

    stream: int
    choice: int = 0


@dataclass(frozen=True)
class NewRequest:
    """A request as it first reaches the worker."""

    req_id: str
    request_id: str  # what the caller of vLLM knows it by
    mark: RequestMark
    prompt_len: int
    plan: SteeringPlan | None = None  # what steers it
    capture_plan: CapturePlan | None = None  # what is captured of it
    # What is embedded at each position of the prompt, up to the last that is no text token: TEXT,
    # IMAGE, ... of wire/ring_messages.py. None: text alone.
    media: NDArray[np.uint8] | None = None
    num_known: int = 0  # tokens that it has; more than the prompt's if it comes back


class StepBatch(msgspec.Struct, frozen=True):
    """How the model runner laid out one step. A Struct: one is made in every step."""

    req_ids: Sequence[str]
    counts_R: NDArray[np.int32]  # tokens forwarded for each request
    starts_R: NDArray[np.int32]  # absolute position of the first of them
    # How many of the last of them are drafts, which the sampler may reject; None: the engine does
    # not speculate.
    drafts_R: NDArray[np.int32] | None = None
    # Set if `starts_R` is where each request would be if no draft of the steps before had been
    # rejected: the least that its first position can be. Only the device knows which it is, and
    # which drafts are rejected in this step.
    lowest_R: NDArray[np.int32] | None = None

    @property
    def is_ahead(self) -> bool:
        return self.lowest_R is not None


@dataclass(frozen=True, eq=False)
class JudgedDrafts:
    """What the sampler said of the drafts of a step, on the device, in the order of the batch."""

    starts_R: torch.Tensor  # index of each request's first token, and behind the last one's last
    rejected_R: torch.Tensor  # how many of each request's last tokens are rejected


@dataclass(frozen=True)
class ForwardInputs:
    """The forward's own inputs: tensors on its device, at least as long as the step."""

    positions_T: torch.Tensor
    token_ids_T: torch.Tensor
    drafts: JudgedDrafts | None = None  # of a step whose drafts only the device knows


RequestErrors = dict[str, Exception]  # by the request's id


def try_each(requests: Sequence[NewRequest], add: Callable[[NewRequest], None]) -> RequestErrors:
    """Add requests one by one: an error belongs to the request that it is raised for."""
    errors: RequestErrors = {}
    for request in requests:
        try:
            add(request)
        except Exception as error:
            errors[request.req_id] = error
    return errors


class StepListener(Protocol):
    """Hears of every real step, in the order in which the engine does things.

    Listeners are called through a StepGuard, which ends a request and not the step if one raises.
    """

    def begin(self, new: Sequence[NewRequest], finished: Sequence[str]) -> RequestErrors:
        """Requests come and go; the errors of those that could not be added."""

    def amend(self, req_id: str, plan: SteeringPlan | None) -> None:
        """From now on this plan steers the request."""

    def place(self, batch: StepBatch) -> None:
        """The batch is laid out; the forward has not begun."""

    def reject(self, rejected_R: NDArray[np.int32]) -> None:
        """The sampler rejects so many of the last tokens of each request: they never were.

        Only in an engine that speculates, between `place` and `end`.
        """

    def end(self, inputs: Callable[[], ForwardInputs]) -> None:
        """The forward is queued on the device; with speculation, the sampler has judged it too."""

    def drop(self, req_id: str, reason: str) -> None:
        """The request has failed and is dropped, whether or not this listener knows it."""

    def place_failed(self, batch: StepBatch) -> Sequence[str]:
        """`place` raised: make the forward safe, and name requests that cannot go on as asked."""

    def end_failed(self, batch: StepBatch | None) -> Sequence[str]:
        """`end` raised: as `place_failed`, behind the forward. None: nothing was forwarded."""

    def can_skip(self) -> bool:
        """True if this listener can skip a step identical to the last one."""

    def before_dummy_run(self) -> None:
        """vLLM is about to run a forward that belongs to no request."""

    def after_dummy_run(self) -> None:
        """That forward is queued on the device."""
