"""Takes a runtime folder; follows the engines in it, one after the other, until told to stop."""

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
    """The command `clairai sidecar`; returns when it was asked to stop or nobody reads it."""
    folder = runtime_dir(explicit_dir)
    with StopSignal() as stop:
        try:
            if as_json:
                _print_json(folder, stop, with_events=with_events, start=start)
            else:
                _draw(folder, stop, start=start)
        except BrokenPipeError:
            return  # `| head` has seen enough


def watch_rings(
    folder: Path, view: SidecarView, *, start: StartAt, stop: Callable[[], bool]
) -> None:
    """Show everything that happens to the rings in `folder` until `stop()`."""

    def turn() -> bool:
        # follow() asks this between any two events and ten times a second when there are none:
        # the view's turn to draw, without a thread of its own.
        view.tick()
        return stop()

    with closing(follow(folder, start=start, stop=turn)) as events:
        for event in events:
            view.show(event)


def print_stderr(line: str) -> None:
    """On stderr: stdout is for what was asked for."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def choose_loss_output(console: Console) -> Say:
    """Where to say what must not be missed while a table is drawn on `console`."""
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
