"""Plants every fault of the fault matrix in a real engine, and writes docs/faults.md.

Run by `make faults`. What a cell has shown is kept in a file of its own: a run that was cut short
goes on where it was, and `--state`, `--role` and `--fault` run some cells again. Needs Linux, the
right to mount, and the demo model.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from clairai.probe.files import save
from clairai.weights import Sender
from tests.engine import models, weighed
from tests.engine import server as parts
from tests.process.fault_cell import (
    ANSWER_TOKENS,
    NUM_COMPLETION,
    FaultRun,
    References,
    Seen,
    check_impossible,
    planting,
    which_weights,
)
from tests.process.fault_load import Answer, Ask, stream_answer
from tests.process.fault_matrix import (
    CELLS,
    MATRIX,
    Back,
    Cell,
    Fault,
    Impossible,
    Role,
    State,
)
from tests.process.faulted_service import ROOT, Disks, FaultedService, small_disks

RESULTS: Final = ROOT / "build" / "faults"
PAGE: Final = ROOT / "docs" / "faults.md"
MODEL: Final = "cut"
NUM_LAYERS: Final = 4
BUFFER_BYTES: Final = 32 << 20
LEAVES, RESTARTS, ENDS = range(3)  # a fault leaves the engine, has it started again, or ends all
MAX_RESTARTS: Final = 3  # launch/supervisor.py gives up after so many in a row
SERVE: Final = (
    *("--on-death", "restart", "--log-format", "json", "--"),
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "8192", "--max-num-seqs", "8"),
    *("--weight-transfer-config", '{"backend": "clairai_ipc"}'),
)
INTRODUCTION: Final = """\
# Faults

What happens when a process is killed or suspended, a disk is full, descriptors run out or a socket
is closed, in each process and in each state of the service; and when a completion process hangs.
`make faults` plants every fault in a real engine (vLLM on a CPU, one rank, four layers of the demo
model, `--on-death restart`; two completion processes where the fault is planted in one of them) and
writes this page. {summary}

Streaming, capturing and swapping weights go on at the same time where the same must hold in them:
the fault is planted once, and seen in each. In every cell a request afterwards has the right tokens
and scores and its rows are kept, and rows committed before are readable. When the service ends, no
process, socket, folder or shared memory is left. A line stays until its cell is run again.
"""


class Kind(StrEnum):
    """Services that differ in their processes; a fault is planted in one that has the process."""

    USUAL = "usual"
    OWN_WORKER = "own worker"  # core and worker are two processes although there is one rank
    SEVERAL = "several completion processes"


OWN_WORKER: Final = ("--distributed-executor-backend", "mp")
SEVERAL: Final = ("--completion-processes", f"{NUM_COMPLETION}")


@dataclass(frozen=True)
class Record:
    """One line of the page."""

    state: str
    role: str
    fault: str
    problems: list[str]
    notes: list[str]
    noticed_s: float | None
    back_s: float | None
    at: str

    @classmethod
    def of(cls, cell: Cell, seen: Seen) -> Record:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(*cell, seen.problems, seen.notes, seen.noticed_s, seen.back_s, now)


@dataclass(frozen=True)
class Site:
    """A model, another one like it, probes, and the disks of the service."""

    model: Path
    other: Path
    probes: Path
    disks: Disks

    def command(self, port: int, kind: Kind) -> list[str]:
        program = [sys.executable, "-m", "clairai.cli", "serve", str(self.model)]
        program += ["--probes", str(self.probes), "--capture", str(self.disks.store)]
        program += ["--port", str(port), *(SEVERAL if kind is Kind.SEVERAL else ()), *SERVE]
        return [*program, *(OWN_WORKER if kind is Kind.OWN_WORKER else ())]


@contextmanager
def site() -> Iterator[Site]:
    scratch = Path(tempfile.mkdtemp(prefix="faulted-"))
    try:
        model = models.cut(models.real(), NUM_LAYERS, scratch / "model" / MODEL)
        other = weighed.perturb(model, scratch / "other" / MODEL)
        probes = scratch / "probes"
        probes.mkdir()
        for seed, name in enumerate(("first", "second")):
            save(probes / f"{name}.safetensors", parts.probe(name, seed=seed))
        with small_disks() as disks:
            yield Site(model, other, probes, disks)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class Life:
    """One command, from its start until its end or a fault that ends it."""

    def __init__(self, place: Site, kind: Kind) -> None:
        self._place = place
        self.service = FaultedService.start(
            place.disks,
            lambda port: place.command(port, kind),
            {**os.environ, **parts.CPU},
            MODEL,
        )
        self.sender = Sender(
            self.service.url,
            runtime_dir=str(place.disks.runtime.folder),
            buffer_bytes=BUFFER_BYTES,
        )
        self.num_restarts = 0
        self.is_over = False

    def learn(self) -> References:
        """The right answers, with each set of weights, when nothing is wrong."""
        old = self._answer()
        self.sender.send(self._place.other)
        new = self._answer()
        self.sender.send(self._place.model)
        made = References(old, new)
        assert old.tokens != new.tokens
        assert which_weights(self._answer(), made) == "old"
        return made

    def _answer(self) -> Answer:
        answer = Answer()
        with self.service.client() as client:
            body = Ask(ANSWER_TOKENS).body(MODEL)
            stream_answer(client, body, answer, is_over=threading.Event())
        assert not answer.error, answer.error
        return answer

    def run(self, cells: tuple[Cell, ...], references: References) -> dict[Cell, Seen]:
        self.service.trim_output()
        expected = MATRIX[cells[0]]
        if isinstance(expected, Impossible):
            return {cell: check_impossible(self.service, cell, expected) for cell in cells}
        places = (self.sender, self._place.model, self._place.other)
        run = FaultRun(self.service, cells, *places, references)
        found = run.run()
        self.num_restarts += run.has_new_engine
        self.is_over = run.is_service_over
        if self.is_over and self.service.process.poll() is not None:
            left = self.service.leftovers()
            for seen in found.values():
                seen.problems += left
        elif self.is_over or not self._can_go_on(found, references):
            self.service.kill()
            self.is_over = True
        return found

    def _can_go_on(self, found: dict[Cell, Seen], references: References) -> bool:
        return not any(seen.problems for seen in found.values()) or self._is_well(references)

    def _is_well(self, references: References) -> bool:
        """True if the next cell can be trusted although this one failed."""
        if self.service.health.last().status != "ready":
            return False
        try:
            return which_weights(self._answer(), references) == "old"
        except AssertionError:
            return False

    def can_run(self, cell: Cell) -> bool:
        is_over_limit = rank(cell) == RESTARTS and self.num_restarts >= MAX_RESTARTS
        return not self.is_over and not is_over_limit

    def end(self) -> list[str]:
        """What it leaves behind."""
        if self.is_over:
            return []
        self.is_over = True
        return self.service.end()

    def kill(self) -> None:
        if not self.is_over:
            self.service.kill()


def kind_of(cell: Cell) -> Kind:
    if cell.role is Role.COMPLETION:
        return Kind.SEVERAL
    return Kind.OWN_WORKER if cell.role in (Role.CORE, Role.WORKER) else Kind.USUAL


def rank(cell: Cell) -> int:
    """What it does to the engine."""
    expected = MATRIX[cell]
    if isinstance(expected, Impossible):
        return LEAVES
    return {Back.RESTARTED: RESTARTS, Back.COMMAND: ENDS}.get(expected.back, LEAVES)


def in_groups(cells: Iterable[Cell]) -> list[tuple[Cell, ...]]:
    """Cells that are seen in one planted fault; those that end the command come last."""
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        is_impossible = isinstance(MATRIX[cell], Impossible)
        key = (cell.role, cell.fault) if is_impossible else planting(cell)
        groups.setdefault(key, []).append(cell)
    return sorted(map(tuple, groups.values()), key=lambda group: rank(group[0]))


class Run:
    """All chosen cells, over as many lives as they take."""

    def __init__(self, place: Site, cells: Sequence[Cell], deadline_s: float) -> None:
        self._place, self._deadline_s = place, deadline_s
        self._pending = in_groups(cells)
        self._references: References | None = None

    def run(self) -> None:
        for kind in Kind:
            while self._next_groups(kind) and not self._is_late():
                self._live(kind)

    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline_s

    def _next_groups(self, kind: Kind) -> list[tuple[Cell, ...]]:
        return [one for one in self._pending if kind_of(one[0]) is kind]

    def _live(self, kind: Kind) -> None:
        life = Life(self._place, kind)
        last: dict[Cell, Seen] = {}
        try:
            self._references = self._references or life.learn()
            for group in self._next_groups(kind):
                if self._is_late() or not life.can_run(group[0]):
                    continue
                last = life.run(group, self._references)
                self._pending.remove(group)
                write_records(last)
        finally:
            left = life.end()
        if left and last:
            for seen in last.values():
                seen.problems += left
            write_records(last)


def write_records(found: dict[Cell, Seen]) -> None:
    for cell, seen in found.items():
        write_record(cell, seen)


def write_record(cell: Cell, seen: Seen) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    record = Record.of(cell, seen)
    record_file(cell).write_text(json.dumps(asdict(record), indent=1))
    noticed = "" if seen.noticed_s is None else f", noticed {seen.noticed_s:.1f} s"
    back = "" if seen.back_s is None else f", back {seen.back_s:.1f} s"
    say(f"{'FAILED' if seen.problems else 'held  '} {cell}{noticed}{back}")
    for problem in seen.problems:
        say(f"       {problem}")


def record_file(cell: Cell) -> Path:
    return RESULTS / ("_".join(part.replace(" ", "-") for part in cell) + ".json")


def read_record(cell: Cell) -> Record | None:
    if not record_file(cell).is_file():
        return None
    found: dict[str, Any] = json.loads(record_file(cell).read_text())
    return Record(**found)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def page(lines: dict[Cell, str]) -> str:
    """docs/faults.md, of these lines."""
    held = sum(is_held(line) for line in lines.values())
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    summary = f"{datetime.now(UTC):%Y-%m-%d}, {machine}: {held} of {len(CELLS)} cells hold."
    made = [INTRODUCTION.format(summary=summary)]
    for state in State:
        made += [f"## {state.value.capitalize()}", "", *_TABLE_HEAD]
        made += [lines.get(cell) or _line(cell, None) for cell in CELLS if cell.state is state]
        made.append("")
    return "\n".join(made)


_TABLE_HEAD: Final = (
    "| process | fault | must hold | seen | noticed, s | back, s |",
    "|---|---|---|---|---|---|",
)


def _line(cell: Cell, record: Record | None) -> str:
    seen, noticed, back = _seen(record)
    return f"{_beginning(cell)} {seen} | {noticed} | {back} |"


def _beginning(cell: Cell) -> str:
    return f"| {cell.role} | {cell.fault} | {MATRIX[cell].sentence()} |"


def is_held(line: str) -> bool:
    return line.split(" | ")[3].startswith("held")


def read_page(text: str) -> dict[Cell, str]:
    """What was seen in earlier runs, of cells that must hold the same now."""
    found: dict[Cell, str] = {}
    for state in State:
        part = text.partition(f"## {state.value.capitalize()}\n")[2].partition("\n## ")[0]
        for cell in (cell for cell in CELLS if cell.state is state):
            begin = _beginning(cell)
            line = next((one for one in part.splitlines() if one.startswith(begin)), "")
            if line and not line.startswith(f"{begin} not run |"):
                found[cell] = line
    return found


def _seen(record: Record | None) -> tuple[str, str, str]:
    if record is None:
        return "not run", "", ""
    words = "; ".join(record.problems if record.problems else record.notes)
    text = ("**not held:** " if record.problems else "held") + (f"; {words}" if words else "")
    return text.replace("|", "/"), _seconds(record.noticed_s), _seconds(record.back_s)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def choose(arguments: argparse.Namespace) -> list[Cell]:
    """The cells asked for, without those that were run before unless some were named."""
    chosen = [
        cell
        for cell in CELLS
        if arguments.state in (None, cell.state)
        and arguments.role in (None, cell.role)
        and arguments.fault in (None, cell.fault)
    ]
    is_named = any((arguments.state, arguments.role, arguments.fault))
    if is_named and not arguments.resume:
        return chosen
    return [cell for cell in chosen if not _is_settled(cell, again=arguments.failed)]


def _is_settled(cell: Cell, *, again: bool) -> bool:
    record = read_record(cell)
    return record is not None and not (again and record.problems)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=State, choices=list(State))
    parser.add_argument("--role", type=Role, choices=list(Role))
    parser.add_argument("--fault", type=Fault, choices=list(Fault))
    parser.add_argument("--resume", action="store_true", help="leave out cells that were run")
    parser.add_argument("--failed", action="store_true", help="run again what did not hold")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument("--page", action="store_true", help="write the page and run nothing")
    arguments = parser.parse_args(argv)
    deadline_s = time.monotonic() + arguments.budget_s
    cells = [] if arguments.page else choose(arguments)
    if cells:
        with site() as place:
            Run(place, cells, deadline_s).run()
    records = {cell: record for cell in CELLS if (record := read_record(cell)) is not None}
    lines = read_page(PAGE.read_text()) | {cell: _line(cell, records[cell]) for cell in records}
    PAGE.write_text(page(lines))
    failed = [cell for cell, line in lines.items() if not is_held(line)]
    say(f"{len(lines) - len(failed)} of {len(CELLS)} cells hold, {len(failed)} do not; {PAGE}")
    return 1 if failed or len(lines) < len(CELLS) else 0


if __name__ == "__main__":
    sys.exit(main())
