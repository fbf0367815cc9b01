"""Follows the engines in a runtime folder, one after the other, and shows their scores."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Literal

from rich.console import Console

from clairai.local.private_socket import runtime_dir
from clairai.local.stop_signal import StopSignal
from clairai.ring.follow import follow
from clairai.sidecar.pipe_writer import PipeWriter
from clairai.sidecar.views import JsonView, PlainView, Say, SidecarView, TableView

StartAt = Literal["oldest", "newest"]


def sidecar(explicit_dir: str | None, *, as_json: bool, with_events: bool, start: StartAt) -> None:
    """Run `clairai sidecar` until it is told to stop, or nobody reads its output."""
    folder = runtime_dir(explicit_dir)
    with StopSignal() as stop:
        try:
            if as_json:
                _print_json(folder, stop, with_events=with_events, start=start)
            else:
                _draw(folder, stop, start=start)
        except BrokenPipeError:
            return  # as in `clairai sidecar | head`


def watch_rings(
    folder: Path, view: SidecarView, *, start: StartAt, stop: Callable[[], bool]
) -> None:
    """Show the events of the rings in `folder` until `stop()`."""

    def tick_and_check() -> bool:
        # follow() calls this between any two events, and ten times a second when there are none:
        # the view draws here, without a thread of its own.
        view.tick()
        return stop()

    with closing(follow(folder, start=start, stop=tick_and_check)) as events:
        for event in events:
            view.show(event)


def print_stderr(line: str) -> None:
    """Messages go to stderr, because stdout has the data."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def choose_loss_output(console: Console) -> Say:
    """Where to report losses while a table is drawn on `console`."""
    if sys.stderr.isatty():
        return lambda line: console.print(line, style="yellow", markup=False)  # above the table
    return print_stderr


def _print_json(folder: Path, stop: StopSignal, *, with_events: bool, start: StartAt) -> None:
    out = PipeWriter(sys.stdout.fileno(), stop=stop)
    view = JsonView(out, folder=folder, with_events=with_events, say=print_stderr)
    watch_rings(folder, view, start=start, stop=lambda: stop() or out.is_reader_gone())


def _draw(folder: Path, stop: StopSignal, *, start: StartAt) -> None:
    console = Console(highlight=False)
    if console.is_terminal:
        with TableView(console, folder=folder, say=choose_loss_output(console)) as live:
            watch_rings(folder, live, start=start, stop=stop)
        return
    out = PipeWriter(sys.stdout.fileno(), stop=stop)
    view = PlainView(
        lambda line: out.write(f"{line}\n".encode()), folder=folder, say_loss=print_stderr
    )
    watch_rings(folder, view, start=start, stop=lambda: stop() or out.is_reader_gone())
