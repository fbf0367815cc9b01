"""`clairai.captures`: the captured rows of the outputs of vLLM's `LLM`, read when needed.

Runs in: the user's process. Imports no vllm.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clairai.errors import StoreError
from clairai.library.engine_control import ask_engine
from clairai.library.request_outputs import get_request_ids
from clairai.store.disk import MANIFEST
from clairai.store.read import Store, StoredRows
from clairai.store.read import open as open_store
from clairai.wire import capture_messages
from clairai.wire.capture_messages import Captured

POLL_S: Final = 0.01


@dataclass(frozen=True)
class Capture:
    """The captured rows of one answer; `report` is what the engine says of them."""

    report: Captured
    num_forwarded: int  # of prompt and answer; rows that a step computed beyond are left out
    stores: dict[str, Store] = field(default_factory=dict, repr=False, compare=False)

    @property
    def id(self) -> str:
        return self.report.id

    @property
    def points(self) -> tuple[str, ...]:
        return self.report.points

    @property
    def state(self) -> str:
        """`kept`: all of it is safe. `discarded`: its rule was not met. For `failed` and `writing`
        see `reason`."""
        return self.report.state

    @property
    def reason(self) -> str:
        return self.report.reason

    @property
    def lost(self) -> int:
        """Rows (tokens times points) that are missing at some consumer."""
        return self.report.lost

    @property
    def where(self) -> dict[str, str]:
        """Where each consumer has the rows."""
        return {place.consumer: place.where for place in self.report.places}

    def rows(self, point: str) -> StoredRows:
        """In order of position; decoded on access."""
        return self._rows(point)

    @cached_property
    def _first(self) -> StoredRows:
        return self._rows(self.points[0])

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The token of each row of a point."""
        return self._first.token_id

    @property
    def positions(self) -> NDArray[np.uint32]:
        return self._first.position

    def _rows(self, point: str) -> StoredRows:
        folder = next((f for f in self.where.values() if (Path(f) / MANIFEST).is_file()), None)
        if folder is None:
            raise StoreError(
                f"rows of {self.id} went to {', '.join(self.where.values()) or 'nobody'}, and no "
                "folder of captures is there; read them where they went, or add the consumer fs"
            )
        if folder not in self.stores:
            self.stores[folder] = open_store(folder)
        found = self.stores[folder].rows(self.report.stream, point=point, choice=self.report.choice)
        return found.before(self.num_forwarded)


def captures(llm: Any, outputs: Sequence[Any], *, timeout_s: float = 60.0) -> list[list[Capture]]:
    """For each RequestOutput, a Capture of every answer that was captured, in order.

    Waits until the rows are safe at their consumers, or known not to be; then see `state`, `reason`
    and `lost`.
    """
    asked = capture_messages.FindCaptures(get_request_ids(outputs, "captures"), is_ended=True)
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = ask_engine(llm, asked, capture_messages.Captures).found
        waiting = [one for answers in found for one in answers if one.state in ("open", "writing")]
        if not waiting or time.monotonic() > deadline_s:
            break
        time.sleep(POLL_S)
    stores: dict[str, Store] = {}
    return [
        [Capture(report, _count_forwarded(output, report), stores) for report in reports]
        for output, reports in zip(outputs, found, strict=True)
    ]


def _count_forwarded(output: Any, report: Captured) -> int:
    """All tokens but the last that was sampled: whether a step forwards it depends on timing."""
    (answer,) = (one for one in output.outputs if one.index == report.choice)
    return len(output.prompt_token_ids) + max(len(answer.token_ids) - 1, 0)
