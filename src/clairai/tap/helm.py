"""Takes what the worker tells of each step; gives each steered request its course in the tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from clairai.steer.course import Course
from clairai.tap.outlet import Inputs
from clairai.tap.rows import Batch
from clairai.tap.station import NewRequest
from clairai.tap.steering import Steering


class Helm:
    """Beside the Station, and on every rank: all ranks steer alike."""

    def __init__(self, steering: Steering) -> None:
        self.steering = steering

    def begin(self, new: Sequence[NewRequest], finished: Sequence[str]) -> None:
        for req_id in finished:
            self.steering.close(req_id)
        for request in new:
            if request.course is not None:
                self.steering.open(request.req_id, request.course)

    def amend(self, req_id: str, course: Course | None) -> None:
        """Its gates begin anew: those that acted before act no more."""
        self.steering.close(req_id)
        if course is not None:
            self.steering.open(req_id, course)

    def place(self, batch: Batch) -> None:
        self.steering.place(batch)

    def end(self, inputs: Callable[[], Inputs]) -> None:
        del inputs  # what was steered shows in the rows themselves

    def rests(self) -> bool:
        return not len(self.steering) and not self.steering.num_mapped

    def blank(self) -> None:
        self.steering.blank()

    def blanked(self) -> None:
        """Nothing of it is left."""
