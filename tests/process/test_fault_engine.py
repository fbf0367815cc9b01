"""Some cells of the fault matrix with a real engine; `make faults` runs all of them.

Its worker is a process of its own, so that it can die alone. A core that is killed: test_serve_demo
in tests/engine. Suspended ones: test_liveness.py with a toy, and `make faults`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.process.fault_cell import References
from tests.process.fault_load import PROMPT
from tests.process.fault_matrix import Cell, Fault, Role, State
from tests.process.run_faults import Kind, Life, site
from tests.process.test_fault_matrix import patient as patient

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

BUSY = (State.STREAMING, State.CAPTURING, State.SWAPPING)
LONG_TOKENS = 900  # of each prompt


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Life, References]]:
    with site() as place:
        if not place.disks.runtime.is_mounted:
            pytest.skip("needs the right to mount")
        life = Life(place, Kind.OWN_WORKER)
        try:
            yield life, life.learn()
        finally:
            life.kill()


def test_an_engine_that_works_hard_makes_progress_all_the_time(
    served: tuple[Life, References],
) -> None:
    """Long prompts, several at once: nothing is taken for a hang, or for a broken connection."""
    service, epoch = served[0].service, served[0].service.epoch()
    words = LONG_TOKENS // len(PROMPT.split()) * f"{PROMPT} "
    body = {"model": service.model, "prompt": [words] * 4, "max_tokens": 8}
    with service.client(120.0) as client:
        assert client.post("/v1/completions", json=body).status_code == 200
    assert service.health.last().status == "ready"
    assert service.epoch() == epoch


@pytest.mark.attack(440)
@pytest.mark.parametrize(
    ("role", "fault"),
    [
        (Role.SIDECAR, Fault.SIGKILL),
        (Role.API_SERVER, Fault.NO_FDS),
        (Role.PROXY, Fault.SOCKET_CLOSED),
        (Role.CORE, Fault.SOCKET_CLOSED),
        (Role.WORKER, Fault.SIGKILL),
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
