"""Some cells of the fault matrix with a real engine; `make faults` runs all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.process.fault_cell import References
from tests.process.fault_matrix import Cell, Fault, Role, State
from tests.process.run_faults import Life, site

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

BUSY = (State.STREAMING, State.CAPTURING, State.SWAPPING)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Life, References]]:
    with site() as place:
        if not place.disks.runtime.is_mounted:
            pytest.skip("needs the right to mount")
        life = Life(place, has_own_worker=False)
        try:
            yield life, life.learn()
        finally:
            life.kill()


@pytest.mark.parametrize(
    ("role", "fault"),
    [
        (Role.SIDECAR, Fault.SIGKILL),
        (Role.API_SERVER, Fault.NO_FDS),
        (Role.PROXY, Fault.SOCKET_CLOSED),
        (Role.CORE, Fault.SIGKILL),  # the worker's process too: there is one rank
    ],
)
def test_a_fault_in_a_busy_service_is_noticed_and_the_service_comes_back(
    served: tuple[Life, References], role: Role, fault: Fault
) -> None:
    life, references = served
    found = life.run(tuple(Cell(state, role, fault) for state in BUSY), references)
    assert {str(cell): seen.problems for cell, seen in found.items() if seen.problems} == {}


def test_nothing_is_left_when_it_ends(served: tuple[Life, References]) -> None:
    life, _ = served
    assert life.end() == []
