"""Draws a LiveState: a table for a terminal, or one line of text for a log."""

from __future__ import annotations

import math
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from clairai.sidecar.live_state import Cell, LiveRequest, LiveState, ProbeColumns
from clairai.wire import ring_messages

ABOVE: Final = "▲"  # can be told apart without colour
WAS_ABOVE: Final = "△"
UNKNOWN: Final = "–"  # noqa: RUF001  # a dash, as in a printed table
_FRAME_LINES: Final = 8  # header, column titles, footer, and the line the cursor is on
_FIXED_WIDTH: Final = 37  # the columns that are always there
_GAP: Final = 2
_SCORE_WIDTH: Final = 8
_MAX_PROBE_WIDTH: Final = 16
_MAX_STREAM_DIGITS: Final = 9
_LARGEST_PLAIN: Final = 1000.0


def draw_table(state: LiveState, *, status: str, width: int, height: int) -> RenderableType:
    """The table for a screen of this size, and how many probes do not fit."""
    names = state.columns.names if state.columns is not None else ()
    shown = names[: _num_fitting(names, width)]
    requests = state.newest(max(1, height - _FRAME_LINES))
    return Group(
        _one_line(status, style="bold"),
        _one_line(counts_line(state)),
        "",
        _request_table(requests, shown) if requests else Text("no requests yet", style="dim"),
        "",
        _one_line(_engine_footer(state, num_hidden=len(names) - len(shown)), style="dim"),
        _one_line(_legend(state.columns), style="dim"),
    )


def engine_line(welcome: ring_messages.Welcome) -> str:
    return f"{welcome.model} on vLLM {welcome.vllm}"


def counts_line(state: LiveState) -> str:
    """The counts in one line, for the table and for a log."""
    statistics = state.statistics
    return (
        f"{state.rows_per_s():.0f} rows/s"
        f" · {state.num_live} live, {state.num_finished} finished"
        f" · {state.num_rows} rows"
        f" · {statistics.delivered} records, {statistics.lost} lost, {statistics.torn} torn"
        f" · lag {statistics.lag}"
    )


def short_stream_id(stream: int, choice: int) -> str:
    digits = str(stream)
    if len(digits) > _MAX_STREAM_DIGITS:
        digits = f"…{digits[-(_MAX_STREAM_DIGITS - 1) :]}"
    return f"{digits}.{choice}" if choice else digits


def format_score(score: float) -> str:
    if not math.isfinite(score):
        return UNKNOWN if math.isnan(score) else f"{score:+}"
    return f"{score:.3f}" if abs(score) < _LARGEST_PLAIN else f"{score:.2e}"


def format_cell(cell: Cell | None) -> Text:
    """A score after its mark; the colour only repeats the mark."""
    if cell is None:
        return Text(UNKNOWN, style="dim")
    if cell.is_above:
        return Text(f"{ABOVE} {format_score(cell.score)}", style="bold red")
    if cell.was_above:
        return Text(f"{WAS_ABOVE} {format_score(cell.score)}", style="yellow")
    return Text(format_score(cell.score))


def _num_fitting(names: tuple[str, ...], width: int) -> int:
    left = width - _FIXED_WIDTH
    for index, name in enumerate(names):
        left -= _GAP + min(max(len(name), _SCORE_WIDTH), _MAX_PROBE_WIDTH)
        if left < 0:
            return max(1, index)
    return len(names)


def _one_line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _request_table(requests: list[LiveRequest], names: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
    for title in ("stream", "phase"):
        table.add_column(title, no_wrap=True)
    for title in ("tokens", "position"):
        table.add_column(title, justify="right", no_wrap=True)
    for name in names:
        title_text = Text(name, overflow="ellipsis")
        table.add_column(title_text, justify="right", no_wrap=True, max_width=_MAX_PROBE_WIDTH)
    for request in requests:
        table.add_row(*_cells(request, names), style=_style(request))
    return table


def _cells(request: LiveRequest, names: tuple[str, ...]) -> list[Text | str]:
    return [
        short_stream_id(request.stream, request.choice),
        "cut off" if request.is_cut_off else ring_messages.PHASE_NAMES[request.phase],
        str(request.num_scored + request.num_cached),
        str(request.position) if request.num_scored else UNKNOWN,
        *(format_cell(request.cell(name)) for name in names),
    ]


def _style(request: LiveRequest) -> str:
    return "dim" if request.is_over else ""


def _engine_footer(state: LiveState, *, num_hidden: int) -> str:
    epoch = f"{state.welcome.epoch:016x}" if state.welcome is not None else "none"
    line = f"epoch {epoch} · attached {_format_times(state.num_attached)}"
    return line if num_hidden == 0 else f"{line} · {num_hidden} more probes in a wider terminal"


def _legend(columns: ProbeColumns | None) -> str:
    if columns is None or not (columns.thresholds_C < math.inf).any():
        return ""
    return f"{ABOVE} at or above its threshold, {WAS_ABOVE} was at an earlier token"


def _format_times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")
