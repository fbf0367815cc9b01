"""Takes what happens to a ring, event by event; shows it: JSON lines, a live table, plain lines."""

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
STOPPED: Final = "stopped"  # what follow() says when we are the one to leave
Say = Callable[[str], None]


class SidecarView(Protocol):
    """Shows events; `tick` comes several times a second, also when nothing happens."""

    def show(self, event: FollowEvent) -> None: ...
    def tick(self) -> None: ...


def waiting_line(folder: Path, reason: str) -> str:
    plain = f"no engine in {folder}"
    return f"waiting for an engine in {folder}" + ("" if reason == plain else f" ({reason})")


def last_line(statistics: ReaderStatistics, reason: str) -> str:
    said = f"{reason}; {statistics.delivered} records delivered, {statistics.lost} lost"
    return said if reason == STOPPED else f"{said}; waiting"


class LossReport:
    """How much of an engine's loss has not been said yet."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._num_said = self._num_nameless = 0

    def begin(self) -> None:
        self._num_said = self._num_nameless = 0

    def add_unnamed(self) -> None:
        """A record whose columns nobody can name any more: as good as lost."""
        self._num_nameless += 1

    def counted(self, statistics: ReaderStatistics) -> ReaderStatistics:
        add_unnamed = self._num_nameless
        return replace(
            statistics,
            delivered=statistics.delivered - add_unnamed,
            lost=statistics.lost + add_unnamed,
        )

    def news(self, statistics: ReaderStatistics) -> int:
        """Records lost since the last time; said on stderr too, whatever else is shown."""
        total = self.counted(statistics).lost
        fresh, self._num_said = total - self._num_said, total
        if fresh:
            noun = "record" if fresh == 1 else "records"
            self._say(f"lost {fresh} {noun}; this engine has lost {total} in all")
        return fresh


def find_banks(batch: RecordBatch) -> dict[int, ring_messages.Bank | None]:
    """By version; None where the engine died, or forgot, before it could be asked for the names.

    Asked once for a batch: an engine that hangs makes us wait for each question.
    """
    versions = {record.bank_version for record in batch.records}
    return {version: _find_bank(batch.reader, version) for version in versions}


def _find_bank(reader: RingReader, version: int) -> ring_messages.Bank | None:
    try:
        return reader.bank(version)
    except RingError:
        return None


class JsonView:
    """One object per scored row on stdout; everything a person should read on stderr."""

    def __init__(self, out: PipeWriter, *, folder: Path, with_events: bool, say: Say) -> None:
        self._out = out
        self._folder = folder
        self._with_events = with_events
        self._say = say
        self._loss = LossReport(say)
        self._said = ""

    def show(self, event: FollowEvent) -> None:
        match event:
            case NoEngine(reason):
                self._say_once(waiting_line(self._folder, reason))
            case EngineAttached(welcome):
                self._loss.begin()
                self._say_once(f"attached to {live_table.engine_line(welcome)}")
                self._event(json_lines.AttachedLine.to(welcome))
            case RecordBatch():
                self._rows(event)
            case EngineDetached(statistics, reason):
                self._lost(statistics)
                counted = self._loss.counted(statistics)
                self._say_once(last_line(counted, reason))
                self._event(json_lines.DetachedLine.after(counted, reason))

    def tick(self) -> None:
        pass

    def _rows(self, batch: RecordBatch) -> None:
        found: list[json_lines.JsonLine] = []
        banks = find_banks(batch)
        for record in batch.records:
            bank = banks[record.bank_version]
            if bank is None:
                self._loss.add_unnamed()
                continue
            found += json_lines.record_lines(record, bank, with_events=self._with_events)
        # Before the rows: what was lost is older than all that were read with it.
        self._lost(batch.reader.statistics())
        self._out.write(json_lines.encode_lines(found))

    def _lost(self, statistics: ReaderStatistics) -> None:
        if num_lost := self._loss.news(statistics):
            self._event(json_lines.LostLine(num_lost))

    def _event(self, line: json_lines.JsonLine) -> None:
        if self._with_events:
            self._out.write(json_lines.encode_lines([line]))

    def _say_once(self, line: str) -> None:
        if line != self._said:
            self._say(line)
            self._said = line


class _LiveView:
    """What the live table and the plain lines have in common: a board that is kept current."""

    def __init__(self, *, folder: Path, say: Say) -> None:
        self.board = LiveState()
        self.status = ""
        self._folder = folder
        self._loss = LossReport(say)

    def show(self, event: FollowEvent) -> None:
        match event:
            case NoEngine(reason):
                if self.board.num_attached == 0:
                    self.status = waiting_line(self._folder, reason)
            case EngineAttached(welcome):
                self._loss.begin()
                self.board.attach(welcome)
                self.status = live_table.engine_line(welcome)
            case RecordBatch():
                self._feed(event)
            case EngineDetached(statistics, reason):
                self._loss.news(statistics)
                counted = self._loss.counted(statistics)
                self.board.note(counted)
                if reason != STOPPED:
                    self.board.detach()
                self.status = last_line(counted, reason)

    def _feed(self, batch: RecordBatch) -> None:
        banks = find_banks(batch)
        for record in batch.records:
            bank = banks[record.bank_version]
            if bank is None:
                self._loss.add_unnamed()
            else:
                self.board.feed(record, bank)
        statistics = batch.reader.statistics()
        self._loss.news(statistics)
        self.board.note(self._loss.counted(statistics))


class TableView(_LiveView):
    """A table that stays in place; a context manager, because the terminal must be given back."""

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
                self.board, status=self.status, width=size.width, height=height
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
    """For a log: a line when something changed, at most one a second."""

    def __init__(self, say: Say, *, folder: Path, say_loss: Say) -> None:
        super().__init__(folder=folder, say=say_loss)
        self._say = say
        self._said_status = self._said_counts = ""
        self._due_s = 0.0

    def show(self, event: FollowEvent) -> None:
        super().show(event)
        if self.status != self._said_status:
            self._said_status = self.status
            self._say(self.status)

    def tick(self) -> None:
        if time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + LINE_S
        line = live_table.counts_line(self.board)
        if self.board.num_rows and line != self._said_counts:
            self._said_counts = line
            self._say(line)
