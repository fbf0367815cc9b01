"""The journeys of web/journeys: the page in a real browser with the real proxy and engine."""

from __future__ import annotations

import pytest

from scripts.web import WEB
from tests.web.conftest import JourneyResults

# the first test starts the engine and runs all journeys
pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

FILES = sorted(path.name for path in (WEB / "journeys").glob("*.test.ts"))


@pytest.mark.parametrize("file", FILES)
def test_every_journey_of_a_file_passes(file: str, journey_results: JourneyResults) -> None:
    journeys = journey_results.of_file(file)
    assert journeys, journey_results.output[-4000:]
    assert {title: failures for title, failures in journeys.items() if failures} == {}


def test_there_are_journeys_for_asking_looking_trouble_sharing_access_and_steering() -> None:
    named = {file.removesuffix(".test.ts") for file in FILES}
    assert named >= {"ask", "look", "trouble", "share", "access", "steer"}
