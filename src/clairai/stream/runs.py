"""Takes named runs as they begin; gives them back by their id, and ends those nobody wants."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from clairai.stream.outgoing import EventStream
from clairai.stream.refusal import Refused
from clairai.stream.run import Run
from clairai.stream.settings import ProxySettings


class Runs:
    """Bounded: ended runs go first, and while all are live no more are begun."""

    def __init__(self, settings: ProxySettings) -> None:
        self._limits = settings.limits
        self._timeouts = settings.timeouts
        self._runs: dict[str, Run] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._runs)

    def make_room(self) -> None:
        """Refused if there is none."""
        while len(self._runs) >= self._limits.runs:
            ended = next((run for run in self._runs.values() if run.is_over), None)
            if ended is None:
                raise Refused(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    f"{len(self._runs)} named runs are going on, and no more are taken; try later",
                    code="overloaded",
                    headers={"Retry-After": "1"},
                )
            self._forget(ended)

    def new(self) -> Run:
        self.make_room()
        run = Run(limit_bytes=self._limits.run_bytes, on_alone=self._note_alone)
        self._runs[run.id] = run
        return run

    def start(self, run: Run, work: Coroutine[Any, Any, None]) -> None:
        """Have `work` put the run's events into it."""
        run.task = asyncio.create_task(work)
        run.task.add_done_callback(lambda _: self._note_end(run))

    def get(self, run_id: str) -> Run:
        """Refused if there is none, or no more."""
        run = self._runs.get(run_id)
        if run is None:
            raise Refused(
                HTTPStatus.NOT_FOUND,
                f"no run has this id; it is kept {self._timeouts.run_kept:.0f} s after its end",
            )
        return run

    def answer(self, run: Run, after: int) -> Response:
        """The events after that one, as they come."""
        client = run.attach(after)
        leaving = AsyncExitStack()
        leaving.callback(run.detach, client)
        return EventStream(
            run.follow(client, ping_s=self._timeouts.ping),
            leaving,
            stall_s=self._timeouts.stalled,
            headers={"X-Clairai-Run": run.id},
        )

    def stop(self, run: Run) -> None:
        """At once; a run that has ended stays as it is."""
        if run.task is not None:
            run.task.cancel()

    async def close(self) -> None:
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _note_alone(self, run: Run) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(self._timeouts.run_alone, self._stop_if_alone, run, run.times_alone)

    def _stop_if_alone(self, run: Run, times_alone: int) -> None:
        if run.is_alone and run.times_alone == times_alone:  # nobody came in between
            self.stop(run)

    def _note_end(self, run: Run) -> None:
        run.end()
        loop = asyncio.get_running_loop()
        loop.call_later(self._timeouts.run_kept, self._forget, run)

    def _forget(self, run: Run) -> None:
        self._runs.pop(run.id, None)
