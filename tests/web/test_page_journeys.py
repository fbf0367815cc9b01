"""The page in a real browser before the real proxy and engine: web/journeys, file by file."""

from __future__ import annotations

import pytest

from scripts.web import WEB
from tests.web.conftest import Walk

# the first of them starts the engine and walks all journeys
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

FILES = sorted(path.name for path in (WEB / "journeys").glob("*.test.ts"))


@pytest.mark.parametrize("file", FILES)
def test_every_journey_of_a_file_comes_to_its_end(file: str, walk: Walk) -> None:
    journeys = walk.of(file)
    assert journeys, walk.said[-4000:]
    assert {title: faults for title, faults in journeys.items() if faults} == {}


def test_there_are_journeys_for_asking_looking_trouble_sharing_access_and_steering() -> None:
    named = {file.removesuffix(".test.ts") for file in FILES}
    assert named >= {"ask", "look", "trouble", "share", "access", "steer"}
