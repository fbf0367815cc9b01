"""The forms in which ring events are shown: JSON lines, a live table, plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol, Self

from rich.console import Console
from rich.live import Live

from clairai.errors import RingError
from clairai.ring.attach import RingReader
from clairai.ring.follow import EngineAttached, EngineDetached, FollowEvent, NoEngine, RecordBatch
from clairai.ring.reader import ReaderStatistics
from clairai.sidecar import json_lines, live_table
from clairai.sidecar.live_state import LiveState
from clairai.sidecar.pipe_writer import PipeWriter
from clairai.wire import ring_messages

FRAME_S: Final = 0.2
LINE_S: Final = 1.0
STOPPED: Final = "stopped"  # the reason that follow() gives when it was told to stop
Say = Callable[[str], None]


class SidecarView(Protocol):
    """Shows ring events; `tick` is called several times a second, also when nothing happens."""

    def show(self, event: FollowEvent) -> None: ...
    def tick(self) -> None: ...


def waiting_line(folder: Path, reason: str) -> str:
    plain = f"no engine in {folder}"
    return f"waiting for an engine in {folder}" + ("" if reason == plain else f" ({reason})")


def last_line(statistics: ReaderStatistics, reason: str) -> str:
    line = f"{reason}; {statistics.delivered} records delivered, {statistics.lost} lost"
    return line if reason == STOPPED else f"{line}; waiting"


class LossReport:
    """Reports lost records of an engine, each once."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._num_reported = self._num_unnamed = 0

    def begin(self) -> None:
        self._num_reported = self._num_unnamed = 0

    def add_unnamed(self) -> None:
        """Count a record whose probes are not known any more: as good as lost."""
        self._num_unnamed += 1

    def correct(self, statistics: ReaderStatistics) -> ReaderStatistics:
        """The statistics with unnamed records counted as lost."""
        return replace(
            statistics,
            delivered=statistics.delivered - self._num_unnamed,
            lost=statistics.lost + self._num_unnamed,
        )

    def report(self, statistics: ReaderStatistics) -> int:
        """Records lost since the last report; they are always reported on stderr too."""
        total = self.correct(statistics).lost
        num_new, self._num_reported = total - self._num_reported, total
        if num_new:
            noun = "record" if num_new == 1 else "records"
            self._say(f"lost {num_new} {noun}; this engine has lost {total} in all")
        return num_new


def find_banks(batch: RecordBatch) -> dict[int, ring_messages.Bank | None]:
    """The banks by version; None if the engine died, or forgot, before it could be asked.

    Each is asked once a batch, because an engine that hangs delays every question.
    """
    versions = {record.bank_version for record in batch.records}
    return {version: _find_bank(batch.reader, version) for version in versions}


def _find_bank(reader: RingReader, version: int) -> ring_messages.Bank | None:
    try:
        return reader.bank(version)
    except RingError:
        return None


class JsonView:
    """One JSON object per scored row on stdout; messages for people on stderr."""

    def __init__(self, out: PipeWriter, *, folder: Path, with_events: bool, say: Say) -> None:
        self._out = out
        self._folder = folder
        self._with_events = with_events
        self._say = say
        self._loss = LossReport(say)
        self._last_line = ""

    def show(self, event: FollowEvent) -> None:
        match event:
            case NoEngine(reason):
                self._say_once(waiting_line(self._folder, reason))
            case EngineAttached(welcome):
                self._loss.begin()
                self._say_once(f"attached to {live_table.engine_line(welcome)}")
                self._write_event(json_lines.AttachedLine.from_welcome(welcome))
            case RecordBatch():
                self._write_rows(event)
            case EngineDetached(statistics, reason):
                self._report_loss(statistics)
                counted = self._loss.correct(statistics)
                self._say_once(last_line(counted, reason))
                self._write_event(json_lines.DetachedLine.from_statistics(counted, reason))

    def tick(self) -> None:
        pass

    def _write_rows(self, batch: RecordBatch) -> None:
        found: list[json_lines.JsonLine] = []
        banks = find_banks(batch)
        for record in batch.records:
            bank = banks[record.bank_version]
            if bank is None:
                self._loss.add_unnamed()
                continue
            found += json_lines.record_lines(record, bank, with_events=self._with_events)
        # Before the rows: lost records are older than all that were read with them.
        self._report_loss(batch.statistics)
        self._out.write(json_lines.encode_lines(found))

    def _report_loss(self, statistics: ReaderStatistics) -> None:
        if num_lost := self._loss.report(statistics):
            self._write_event(json_lines.LostLine(num_lost))

    def _write_event(self, line: json_lines.JsonLine) -> None:
        if self._with_events:
            self._out.write(json_lines.encode_lines([line]))

    def _say_once(self, line: str) -> None:
        if line != self._last_line:
            self._say(line)
            self._last_line = line


class _LiveView:
    """Keeps a LiveState up to date, for the table and for plain lines."""

    def __init__(self, *, folder: Path, say: Say) -> None:
        self.state = LiveState()
        self.status = ""
        self._folder = folder
        self._loss = LossReport(say)

    def show(self, event: FollowEvent) -> None:
        match event:
            case NoEngine(reason):
                if self.state.num_attached == 0:
                    self.status = waiting_line(self._folder, reason)
            case EngineAttached(welcome):
                self._loss.begin()
                self.state.attach(welcome)
                self.status = live_table.engine_line(welcome)
            case RecordBatch():
                self._add_batch(event)
            case EngineDetached(statistics, reason):
                self._loss.report(statistics)
                counted = self._loss.correct(statistics)
                self.state.set_statistics(counted)
                if reason != STOPPED:
                    self.state.detach()
                self.status = last_line(counted, reason)

    def _add_batch(self, batch: RecordBatch) -> None:
        banks = find_banks(batch)
        for record in batch.records:
            bank = banks[record.bank_version]
            if bank is None:
                self._loss.add_unnamed()
            else:
                self.state.add(record, bank)
        statistics = batch.statistics
        self._loss.report(statistics)
        self.state.set_statistics(self._loss.correct(statistics))


class TableView(_LiveView):
    """A table that stays in place; a context manager, because it must restore the terminal."""

    def __init__(
        self, console: Console, *, folder: Path, say: Say, num_lines_kept: int = 0
    ) -> None:
        super().__init__(folder=folder, say=say)
        self._console = console
        self._num_lines_kept = num_lines_kept
        self._due_s = 0.0
        self._live = Live(console=console, auto_refresh=False)

    def tick(self) -> None:
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + FRAME_S
            size = self._console.size
            height = size.height - self._num_lines_kept
            drawn = live_table.draw_table(
                self.state, status=self.status, width=size.width, height=height
            )
            self._live.update(drawn, refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._due_s = 0.0
        self.tick()
        self._live.stop()


class PlainView(_LiveView):
    """Lines for a log: one when something has changed, at most one a second."""

    def __init__(self, say: Say, *, folder: Path, say_loss: Say) -> None:
        super().__init__(folder=folder, say=say_loss)
        self._say = say
        self._last_status = self._last_counts = ""
        self._due_s = 0.0

    def show(self, event: FollowEvent) -> None:
        super().show(event)
        if self.status != self._last_status:
            self._last_status = self.status
            self._say(self.status)

    def tick(self) -> None:
        if time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + LINE_S
        line = live_table.counts_line(self.state)
        if self.state.num_rows and line != self._last_counts:
            self._last_counts = line
            self._say(line)
