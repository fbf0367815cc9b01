"""The fault matrix is whole, and its faster cells hold with a toy in the place of vLLM.

`make faults` runs all of it with a real engine: docs/faults.md.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process import fault_cell, faulted_service, toy_engine
from tests.process.fault_cell import (
    ANSWER_TOKENS,
    NUM_COMPLETION,
    FaultRun,
    References,
    Seen,
    check_impossible,
)
from tests.process.fault_load import Answer, Ask, stream_answer
from tests.process.fault_matrix import (
    CELLS,
    MATRIX,
    Cell,
    Fault,
    Impossible,
    Role,
    State,
)
from tests.process.faulted_service import Disks, FaultedService, small_disks

pytestmark = pytest.mark.timeout(300)

TOY = "toy"


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """How soon a fault is noticed is what `make faults` says; here the machine may be busy.

    A fault that nobody notices is still caught: an engine that only makes no progress has minutes.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fault_cell, "NOTICE_S", 60.0)
        patch.setattr(fault_cell, "STREAM_END_S", 90.0)
        patch.setattr(fault_cell, "GO_ON_S", 60.0)
        patch.setattr(fault_cell, "RECOVER_S", 90.0)
        patch.setattr(fault_cell, "SINCE_SLACK_S", 5.0)
        patch.setattr(faulted_service, "HEALTH_TIMEOUT_S", 20.0)
        yield


class NoWeights:
    """The toy takes no weights."""

    def send(self, named: Any, *, label: str = "", progress: Any = None) -> Any:
        raise NotImplementedError


def test_every_cell_says_what_must_hold() -> None:
    hangs = (len(Role) - 1) * len(State)  # of other processes: test_liveness.py
    assert len(MATRIX) == len(CELLS) == len(State) * len(Role) * len(Fault) - hangs == 164
    assert all(expected.sentence() for expected in MATRIX.values())
    impossible = [cell for cell, one in MATRIX.items() if isinstance(one, Impossible)]
    assert {(cell.role, cell.fault) for cell in impossible} == {(Role.GUARD, Fault.SOCKET_CLOSED)}


def toy_service(disks: Disks, *options: str) -> FaultedService:
    packages = disks.folder / "packages"
    if not packages.is_dir():
        toy_engine.install(packages)
        (disks.folder / TOY).mkdir()
        config = '{"num_hidden_layers": 4, "hidden_size": 8}'
        (disks.folder / TOY / "config.json").write_text(config)

    def command(port: int) -> list[str]:
        program = [sys.executable, "-m", "clairai.cli", "serve", str(disks.folder / TOY)]
        asked = ["--points", "post_block.1", "--capture", str(disks.store), *options]
        return [*program, *asked, "--port", str(port), "--on-death", "restart"]

    environ = {**os.environ, "PYTHONPATH": str(packages)}
    return FaultedService.start(disks, command, environ, TOY)


class ToyServices:
    """A running service for each cell: the same one as long as it is whole."""

    def __init__(self, disks: Disks, *options: str) -> None:
        self.disks, self._options = disks, options
        self._running: FaultedService | None = None

    def get(self) -> FaultedService:
        if self._running is None:
            self._running = toy_service(self.disks, *self._options)
        return self._running

    def run(self, cell: Cell) -> Seen:
        service = self.get()
        service.trim_output()
        right = Answer()
        with service.client() as client:
            stream_answer(client, Ask(ANSWER_TOKENS).body(TOY), right, is_over=threading.Event())
        assert not right.error, right.error
        expected, references = MATRIX[cell], References(right, right)
        if isinstance(expected, Impossible):
            return check_impossible(service, cell, expected)
        places = (NoWeights(), Path(), Path())
        run = FaultRun(service, (cell,), *places, references)
        seen = run.run()[cell]
        if run.is_service_over:
            seen.problems += service.leftovers()
        if run.is_service_over or seen.problems:
            self.kill()
        return seen

    def kill(self) -> None:
        if self._running is not None:
            self._running.kill()
        self._running = None


@pytest.fixture(scope="module")
def services() -> Iterator[ToyServices]:
    with small_disks() as disks:
        made = ToyServices(disks)
        yield made
        made.kill()


@pytest.fixture(scope="module")
def several() -> Iterator[ToyServices]:
    """With two completion processes."""
    with small_disks() as disks:
        made = ToyServices(disks, "--completion-processes", f"{NUM_COMPLETION}")
        yield made
        made.kill()


def check(services: ToyServices, state: State, role: Role, fault: Fault) -> None:
    if fault is Fault.DISK_FULL and not services.disks.runtime.is_mounted:
        pytest.skip("needs the right to mount")
    assert services.run(Cell(state, role, fault)).problems == []


@pytest.mark.attack(800)
@pytest.mark.parametrize("role", [Role.API_SERVER, Role.PROXY])
def test_streams_go_on_while_a_process_can_open_nothing(services: ToyServices, role: Role) -> None:
    check(services, State.STREAMING, role, Fault.NO_FDS)


@pytest.mark.attack(801)
def test_clients_connect_again_when_all_connections_of_the_proxy_are_closed(
    services: ToyServices,
) -> None:
    check(services, State.STREAMING, Role.PROXY, Fault.SOCKET_CLOSED)


@pytest.mark.attack(802)
@pytest.mark.parametrize("role", [Role.WORKER, Role.SIDECAR])
def test_readers_attach_again_when_their_connection_is_closed(
    services: ToyServices, role: Role
) -> None:
    check(services, State.STREAMING, role, Fault.SOCKET_CLOSED)


@pytest.mark.attack(803)
@pytest.mark.parametrize("role", [Role.PROXY, Role.WORKER, Role.SIDECAR])
def test_streams_go_on_when_a_log_or_an_output_has_no_room(
    services: ToyServices, role: Role
) -> None:
    check(services, State.STREAMING, role, Fault.DISK_FULL)


@pytest.mark.attack(804)
def test_rows_that_a_full_disk_cannot_take_are_said_to_be_lost(services: ToyServices) -> None:
    check(services, State.CAPTURING, Role.CAPTURE, Fault.DISK_FULL)


@pytest.mark.attack(805)
@pytest.mark.parametrize("fault", [Fault.SIGKILL, Fault.SIGSTOP, Fault.NO_FDS])
def test_captures_go_on_after_trouble_of_their_process(services: ToyServices, fault: Fault) -> None:
    check(services, State.CAPTURING, Role.CAPTURE, fault)


@pytest.mark.attack(806)
def test_a_suspended_guard_is_woken(services: ToyServices) -> None:
    check(services, State.STREAMING, Role.GUARD, Fault.SIGSTOP)


def test_the_guard_has_no_socket_that_could_be_closed(services: ToyServices) -> None:
    check(services, State.IDLE, Role.GUARD, Fault.SOCKET_CLOSED)


@pytest.mark.attack(807)
def test_a_new_engine_is_started_when_a_worker_is_killed(services: ToyServices) -> None:
    check(services, State.STREAMING, Role.WORKER, Fault.SIGKILL)


@pytest.mark.attack(808)
def test_a_new_engine_is_started_when_the_core_is_suspended(services: ToyServices) -> None:
    check(services, State.STREAMING, Role.CORE, Fault.SIGSTOP)


@pytest.mark.attack(809)
def test_nothing_is_left_when_the_proxy_is_killed(
    services: ToyServices,
) -> None:
    check(services, State.STREAMING, Role.PROXY, Fault.SIGKILL)


@pytest.mark.attack(829)
@pytest.mark.parametrize("fault", [Fault.NO_FDS, Fault.DISK_FULL, Fault.HANG])
def test_a_completion_process_in_trouble_takes_no_other_with_it(
    several: ToyServices, fault: Fault
) -> None:
    check(several, State.STREAMING, Role.COMPLETION, fault)
