"""Plants a fault in a running service and judges what is seen, cell by cell."""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final

import httpx

from clairai.errors import ClairaiError
from tests.process import fault_injection as injection
from tests.process.fault_injection import End
from tests.process.fault_load import (
    Answer,
    Ask,
    Load,
    Sends,
    expected_rows,
    stored_fault,
    stream_answer,
)
from tests.process.fault_matrix import (
    MATRIX,
    NOTICE_S,
    Back,
    Cell,
    Expectation,
    Fault,
    Impossible,
    Notice,
    Role,
    Rows,
    State,
    Streams,
    Weights,
)
from tests.process.faulted_service import (
    END_S,
    READY_S,
    FaultedService,
    Sample,
    TooLate,
    wait_for,
)

STREAM_END_S: Final = NOTICE_S + 5.0  # after the fault, for the error to reach the client
GO_ON_S: Final = 20.0
RECOVER_S: Final = 30.0
TRANSFER_S: Final = 60.0
RELEASED_S: Final = 2.0  # in which a transfer meets the fault
SINCE_SLACK_S: Final = 2.0  # health gives whole seconds
ANSWER_TOKENS: Final = 24
TOLERANCE: Final = 1e-3
NUM_COMPLETION: Final = 2  # processes, if the fault is planted in one of them
SERVING: Final[dict[Weights, tuple[str, ...]]] = {
    Weights.SAME: ("old",),
    Weights.OLD: ("old",),
    Weights.NEW: ("new",),
    Weights.EITHER: ("old", "new"),
}
# Names of the sockets at which a role serves others: its own connections to others are not closed.
SERVED_AT: Final[dict[Role, tuple[str, ...]]] = {
    Role.API_SERVER: ("api.sock",),
    Role.WORKER: ("engine-", "weights-"),
}
_CLEAN: Final = ("ready", "degraded")


@dataclass(frozen=True)
class References:
    """What the model answers with its own weights and with the others, when nothing is wrong."""

    old: Answer
    new: Answer


@dataclass
class Seen:
    """What was seen in a cell; `problems` is empty if all of it held."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    noticed_s: float | None = None
    back_s: float | None = None


@dataclass
class FaultRun:
    """One planted fault, step by step: what is seen of it in each cell.

    `cells` differ in their state alone, and those states go on at the same time.
    """

    service: FaultedService
    cells: tuple[Cell, ...]
    sender: Sends
    old_weights: Path
    new_weights: Path
    references: References
    is_service_over: bool = False
    has_new_engine: bool = False

    def __post_init__(self) -> None:
        assert len({planting(cell) for cell in self.cells}) == 1
        self.role, self.fault = self.cells[0].role, self.cells[0].fault
        self.expected = {cell.state: possible(cell) for cell in self.cells}
        self.shared = self.expected[self.cells[0].state]  # notice and back are the same in all
        self.seen = {cell.state: Seen() for cell in self.cells}

    def run(self) -> dict[Cell, Seen]:
        service = self.service
        self._epoch, self._pids = service.epoch(), service.pids()
        may_be_refused = self.role is Role.CAPTURE or self.shared.notice is Notice.REFUSALS
        loads = {
            state: Load.begin(
                service,
                state,
                self.sender,
                self.new_weights,
                may_be_refused=may_be_refused,
            )
            for state in self.seen
        }
        with service.client(NOTICE_S) as self._prober:
            self._prober.get("/health")  # connected before the fault
            self._before = service.health.last()
            self._fault_s, self._fault_at = time.monotonic(), time.time()
            end_fault = self._inject()
            try:
                self._check(loads, end_fault)
            finally:
                end_fault()
                for load in loads.values():
                    load.hang_up()
        for seen in self.seen.values():
            seen.notes = list(dict.fromkeys(seen.notes))
        return {cell: self.seen[cell.state] for cell in self.cells}

    def _check(self, loads: dict[State, Load], end_fault: End) -> None:
        """In the order in which a user would notice; a step that fails does not hide the next."""
        self._try(self.check_notice)
        for state, load in loads.items():
            self._try(partial(self.check_streams, state, load), state)
            if load.transfer is not None:
                load.transfer.release(RELEASED_S)
        if self.shared.back not in (Back.RESTARTED, Back.PROCESS_RESTARTED):
            self._try(end_fault)  # else nobody wakes it: it has to be replaced
        if self.is_service_over:
            return
        for state, load in loads.items():  # long answers first
            if self.expected[state].streams is Streams.WAIT:
                self._try(partial(self._check_progress, load), state)
            if state is State.STREAMING:
                # Or a commit would wait for them, and everybody else for the commit.
                load.hang_up()
        self._try(self.check_back)
        if self.is_service_over:
            return
        for state, load in loads.items():
            self._try(partial(self._check_load, state, load), state)
        self._try(self._check_answer)
        self._try(self._check_sidecar)
        if State.SWAPPING in loads:
            # Also shows that another transfer is possible.
            self._try(partial(self.sender.send, self.old_weights), State.SWAPPING)

    def _try(self, step: Callable[[], object], state: State | None = None) -> None:
        """Run a step; what is wrong is a problem of the cell of that state, or of all."""
        try:
            step()
        except (AssertionError, httpx.HTTPError, OSError, ValueError, KeyError) as error:
            self._add_problem(str(error), state)
        except ClairaiError as error:
            self._add_problem(error.reason, state)

    def _add_problem(self, problem: str, state: State | None) -> None:
        for one, seen in self.seen.items():
            if state in (None, one):
                seen.problems.append(problem)

    def _note(self, text: str, state: State | None = None) -> None:
        for one, seen in self.seen.items():
            if state in (None, one):
                seen.notes.append(text)

    # the fault

    def _inject(self) -> End:
        role, pid = self.role, self._pids[self.role]
        match self.fault:
            case Fault.SIGKILL:
                return injection.kill(pid)
            case Fault.SIGSTOP:
                return injection.stop(pid)
            case Fault.HANG:
                return injection.spin(pid)
            case Fault.NO_FDS:
                return injection.exhaust_fds(pid)
            case Fault.DISK_FULL:
                disks = self.service.disks
                outputs = dict.fromkeys((Role.PROXY, Role.COMPLETION), disks.output)
                outputs[Role.SIDECAR] = disks.sidecar
                return (outputs | {Role.CAPTURE: disks.captures}).get(role, disks.runtime).fill()
        if role is Role.API_SERVER and State.IDLE in self.seen:
            return injection.close_listeners(pid, at=SERVED_AT[role])
        return injection.close_connections(pid, at=SERVED_AT.get(role, ()))

    # noticing

    def check_notice(self) -> None:
        checks: dict[Notice, Callable[[], float | None]] = {
            Notice.HEALTH: self._notice_in_health,
            Notice.REFUSALS: self._notice_in_answers,
            Notice.ENGINE_LOG: self._notice_in_log,
            Notice.EVERYTHING_ENDS: self._notice_end,
            Notice.WOKEN: self._notice_waking,
            Notice.NOTHING: self._notice_nothing,
        }
        noticed_s = checks[self.shared.notice]()
        for seen in self.seen.values():
            seen.noticed_s = noticed_s

    def _notice_in_health(self) -> float:
        """Of what was wrong before the fault nothing counts: health remembers a loss for long."""
        wait_for(self._new_trouble, NOTICE_S, "GET /health says that something is wrong")
        first = self._new_trouble()[0]
        self._note(f"{first.status}: {first.reason}")
        assert first.reason, f"health is {first.status} and does not say why"
        if self._before.status == "ready":
            self._check_since(first.since)
        return first.at_s - self._fault_s

    def _new_trouble(self) -> list[Sample]:
        known = ("ready", "silent")
        found = [s for s in self.service.health.since(self._fault_s) if s.status not in known]
        before = (self._before.status, self._before.reason)
        return [one for one in found if (one.status, one.reason) != before]

    def _check_since(self, since: str | float | None) -> None:
        assert since, "health does not say since when"
        at = datetime.fromisoformat(since).timestamp() if isinstance(since, str) else since
        is_right = self._fault_at - SINCE_SLACK_S <= at <= time.time() + SINCE_SLACK_S
        assert is_right, f"health says since {since}, {at - self._fault_at:+.1f} s from the fault"

    def _notice_in_answers(self) -> float:
        """A client that is connected already is answered, or told why not."""
        began_s = time.monotonic()
        answer = self._ask(self._prober, Ask(ANSWER_TOKENS))
        if answer.was_broken:  # its own connection was shut down: it connects again
            answer = self._ask(self._prober, Ask(ANSWER_TOKENS))
        assert not answer.was_broken, f"a request has no answer: {answer.error}"
        self._note(f"refused, {answer.error}" if answer.error else "answered")
        return time.monotonic() - began_s

    def _notice_in_log(self) -> float:
        return wait_for(
            lambda: "is suspended" in self.service.engine_log(), NOTICE_S, "the guard writes it"
        )

    def _notice_end(self) -> float:
        if self.role is Role.GUARD:
            self.service.process.send_signal(signal.SIGTERM)
        self.is_service_over = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.service.process.wait(END_S)
        took_s = wait_for(lambda: not self.service.processes(), END_S, "every process ends")
        self._note(f"all ended {time.monotonic() - self._fault_s:.1f} s later")
        return took_s

    def _notice_waking(self) -> float:
        pid = self._pids[self.role]
        return wait_for(lambda: not injection.is_stopped(pid), NOTICE_S, "it is woken")

    def _notice_nothing(self) -> None:
        """Long enough for a supervisor to be wrong about it."""
        answer = self._ask(self._prober, Ask(ANSWER_TOKENS))
        if State.SWAPPING not in self.seen:  # a commit may hold requests back
            assert not answer.error, f"a request fails: {answer.error}"
        bad = [one for one in self.service.health.since(self._fault_s) if one.status not in _CLEAN]
        assert not bad, f"health was {bad[0].status}: {bad[0].reason}"

    # streams

    def check_streams(self, state: State, load: Load) -> None:
        match self.expected[state].streams:
            case Streams.GO_ON:
                self._check_progress(load)
            case Streams.END | Streams.BREAK:
                self._check_ends(state, load)
            case Streams.END_OR_GO_ON:
                self._check_ends_or_progress(state, load)
            case Streams.OWN_END | Streams.OWN_BREAK:
                self._check_own_end(state, load)
            case Streams.NONE | Streams.WAIT:
                pass  # WAIT is checked when the fault is over

    def _check_progress(self, load: Load) -> None:
        before = [client.num_tokens for client in load.clients]

        def has_all_gone_on() -> bool:
            for client in load.clients:
                assert client.failed is None, f"a stream failed: {client.failed.error}"
            pairs = zip(load.clients, before, strict=True)
            return all(client.num_tokens > count for client, count in pairs)

        wait_for(has_all_gone_on, GO_ON_S, "streams go on")

    def _check_ends(self, state: State, load: Load) -> None:
        deadline_s = max(self._fault_s + STREAM_END_S - time.monotonic(), 0.1)
        wait_for(
            lambda: all(client.failed for client in load.clients), deadline_s, "every stream ends"
        )
        for client in load.clients:
            assert client.failed is not None
            if self.expected[state].streams in (Streams.END, Streams.OWN_END):
                text = client.failed.error
                assert not client.failed.was_broken, f"a stream broke off without an error: {text}"
        ends = [(client.answers[-1].ended_s or 0.0) - self._fault_s for client in load.clients]
        if not ends:
            return
        self._note(f"streams ended after {max(ends):.1f} s", state)

    def _check_ends_or_progress(self, state: State, load: Load) -> None:
        running = Load([client for client in load.clients if client.failed is None])
        with contextlib.suppress(AssertionError):
            self._check_progress(running)
            return
        self._check_ends(state, load)

    def _check_own_end(self, state: State, load: Load) -> None:
        """Of two clients one is with either process."""
        if len(load.clients) > 1:
            deadline_s = max(self._fault_s + STREAM_END_S - time.monotonic(), 0.1)
            wait_for(
                lambda: any(client.failed for client in load.clients), deadline_s, "a stream ends"
            )
        own = [client for client in load.clients if client.failed is not None]
        assert len(own) < max(len(load.clients), 2), "streams of the other process ended, too"
        self._check_ends(state, Load(own))
        self._check_progress(Load([client for client in load.clients if client.failed is None]))

    # being whole again

    def check_back(self) -> None:
        match self.shared.back:
            case Back.RESTARTED:
                self._await_new_engine()
            case Back.WRITER_RESTARTED:
                self._await_new_writer()
            case Back.PROCESS_RESTARTED:
                self._await_new_process()
            case Back.RECOVERS | Back.UNHARMED:
                self._await_same_engine()
                if self.role is Role.CAPTURE:
                    self._await_kept_rows()
            case Back.COMMAND:
                raise AssertionError("the service should be over")

    def _set_back(self) -> None:
        for seen in self.seen.values():
            seen.back_s = time.monotonic() - self._fault_s

    def _await_new_engine(self) -> None:
        self.has_new_engine = True
        try:
            wait_for(self._is_new_engine, READY_S, "a new engine serves")
        except TooLate:
            self.is_service_over = True
            raise
        self._set_back()

    def _is_new_engine(self) -> bool:
        code = self.service.process.poll()
        if code is not None:
            raise TooLate(f"the command ended with {code} instead: {self.service.said()[-300:]}")
        if self.service.health.last().status not in _CLEAN:
            return False
        with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
            return self.service.epoch() != self._epoch
        return False

    def _await_new_writer(self) -> None:
        old = self._pids[Role.CAPTURE]
        wait_for(
            lambda: self.service.pids().get(Role.CAPTURE, old) != old,
            RECOVER_S,
            "a new capture process is there",
        )
        self._await_same_engine()
        self._await_kept_rows()

    def _await_new_process(self) -> None:
        """As many as before, without the one in which the fault was planted."""

        def is_replaced() -> bool:
            pids = self.service.completion_pids()
            has_old = self._pids[Role.COMPLETION] in pids
            return len(pids) == NUM_COMPLETION and not has_old

        wait_for(is_replaced, RECOVER_S, "a new completion process is there")
        wait_for(
            lambda: "completion process" not in (self.service.health.last().reason or ""),
            RECOVER_S,
            "the new completion process answers",
        )
        self._await_same_engine()

    def _await_kept_rows(self) -> None:
        """Captures are whole again when the rows of a new answer are kept."""

        def is_kept() -> bool:
            with self.service.client() as client:
                answer = self._ask(client, Ask(2, captures=True))
            return answer.capture.get("state") == "kept"

        wait_for(is_kept, RECOVER_S, "rows of a new answer are kept")
        if self.shared.back is not Back.UNHARMED:
            self._set_back()

    def _await_same_engine(self) -> None:
        wait_for(
            lambda: self.service.health.last().status in _CLEAN, RECOVER_S, "health is good again"
        )
        if self.shared.back is not Back.UNHARMED:
            self._set_back()
        assert self.service.epoch() == self._epoch, "the engine was started again"

    # afterwards

    def _check_load(self, state: State, load: Load) -> None:
        """What became of what the service was busy with."""
        if load.transfer is not None:
            load.transfer.go_on(TRANSFER_S)
            self._note(load.transfer.error or "the transfer succeeded", state)
        load.leave()
        if self.expected[state].rows is not Rows.NONE:
            for answer in (one for one in load.answers() if one.capture):
                self._check_rows(answer, self.expected[state].rows)

    def _check_rows(self, answer: Answer, expected: Rows) -> None:
        self._await_settled(answer)
        is_kept = answer.is_whole and answer.capture.get("state") == "kept"
        is_kept = is_kept and not answer.capture.get("lost")
        fault = stored_fault(self.service.disks.store, answer, must_be_whole=is_kept)
        assert not fault, fault
        if is_kept or expected is Rows.PREFIX:
            return
        assert expected is Rows.SAID, f"rows are not kept: {answer.capture}"
        if answer.is_whole:
            self._check_loss_is_said(answer)

    def _await_settled(self, answer: Answer) -> None:
        """An answer that could not wait for its rows said so: they come later."""
        if not answer.is_whole or answer.capture.get("state") not in ("open", "writing"):
            return
        folder = self.service.disks.store
        wait_for(
            lambda: not stored_fault(folder, answer, must_be_whole=True),
            RECOVER_S,
            f"rows on their way are kept: {answer.capture}",
        )
        answer.capture |= {"state": "kept", "lost": 0}

    def _check_loss_is_said(self, answer: Answer) -> None:
        said = answer.capture
        assert said.get("reason"), f"rows are lost without a reason: {said}"
        missing = expected_rows(answer) - said.get("rows", 0) - said.get("lost", 0)
        if missing > 0:
            self._note(f"{missing} rows are in neither count: {said}", State.CAPTURING)
        self._note(f"{said.get('lost', 0)} rows lost: {said['reason']}", State.CAPTURING)

    def _check_answer(self) -> None:
        """One more request: its tokens, scores and rows are right, with whole weights."""
        with self.service.client() as client:
            answer = self._ask(client, Ask(ANSWER_TOKENS, captures=True))
        assert not answer.error, f"a request afterwards fails: {answer.error}"
        found = which_weights(answer, self.references)
        swapping = self.expected.get(State.SWAPPING)
        allowed = SERVING[Weights.SAME if swapping is None else swapping.weights]
        assert found in allowed, f"a request afterwards is answered by {found} weights"
        self._note(f"{found} weights serve", State.SWAPPING)
        assert answer.capture.get("state") == "kept", f"its rows are not kept: {answer.capture}"
        fault = stored_fault(self.service.disks.store, answer, must_be_whole=True)
        assert not fault, fault

    def _check_sidecar(self) -> None:
        if self.role is not Role.SIDECAR:
            return
        if self.service.sidecar.poll() is not None:
            if self.fault is not Fault.SIGKILL:
                said = self.service.sidecar_said().strip()
                assert said, "the sidecar ended and did not say why"
                self._note(f"the sidecar ended: {said.splitlines()[-1][:160]}")
            self.service.restart_sidecar()
        self._check_sidecar_reads()

    def _check_sidecar_reads(self) -> None:
        before = self.service.sidecar_nbytes()

        def is_reading() -> bool:
            with self.service.client() as client:
                self._ask(client, Ask(4))
            return self.service.sidecar_nbytes() > before

        wait_for(is_reading, RECOVER_S, "a sidecar shows rows")

    def _ask(self, client: httpx.Client, ask: Ask) -> Answer:
        answer = Answer()
        body = ask.body(self.service.model)
        stream_answer(client, body, answer, is_over=threading.Event())
        return answer


def which_weights(answer: Answer, references: References) -> str:
    """`old`, `new`, or what is wrong: tokens and scores must both be those of one reference."""
    for name, one in (("old", references.old), ("new", references.new)):
        if answer.tokens == one.tokens:
            return name if are_close(answer.scores, one.scores) else f"{name} but wrongly scored"
    return "neither the old nor the new"


def are_close(found: list[list[float | None]], wanted: list[list[float | None]]) -> bool:
    """The same scores; one that was lost on the way (None) is no wrong score."""
    if len(found) != len(wanted):
        return False
    pairs = [pair for rows in zip(found, wanted, strict=True) for pair in zip(*rows, strict=True)]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return bool(known) and all(math.isclose(a, b, abs_tol=TOLERANCE) for a, b in known)


def check_impossible(service: FaultedService, cell: Cell, expected: Impossible) -> Seen:
    """The fact that makes the cell impossible holds in the running service."""
    found = injection.socket_fds(service.pid(cell.role))
    return Seen([f"it has sockets: {found}"] if found else [], [expected.fact])


def possible(cell: Cell) -> Expectation:
    expected = MATRIX[cell]
    assert isinstance(expected, Expectation)
    return expected


def planting(cell: Cell) -> tuple[object, ...]:
    """Cells with the same one can be seen in one planted fault: only what goes on differs."""
    expected = possible(cell)
    is_idle = cell.state is State.IDLE
    return cell.role, cell.fault, expected.notice, expected.back, is_idle
