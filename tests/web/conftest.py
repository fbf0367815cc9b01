"""Fixtures of the page's tests: its Node tools, and the results of all journeys, which run once."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from scripts.web import WEB, Tools, ToolsMissing, prepare
from tests.web.server import running_server

KEY: Final = "a-key-for-journeys"
NO_UPSTREAM: Final = "http://127.0.0.1:1"  # nothing listens there
JOURNEYS_DEADLINE_S: Final = 2400.0  # nine minutes were too few on a busy machine


@dataclass(frozen=True)
class JourneyResults:
    """The file, title and failures of every journey, and the output of the runner."""

    journeys: tuple[tuple[str, str, tuple[str, ...]], ...]
    output: str

    def of_file(self, file: str) -> dict[str, tuple[str, ...]]:
        return {title: failures for name, title, failures in self.journeys if name == file}


@pytest.fixture(scope="session")
def tools() -> Tools:
    try:
        return prepare()
    except ToolsMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def journey_results(tools: Tools) -> Iterator[JourneyResults]:
    """Run every journey in one browser against one engine."""
    folder = Path(tempfile.mkdtemp(prefix="clairai-"))  # short enough for a socket's path
    key = folder / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    waiting_proxy = ("proxy", "--upstream", NO_UPSTREAM, "--api-key-file", str(key))
    try:
        with (
            running_server(folder, *waiting_proxy, is_up=lambda status: status == 503) as waiting,
            running_server(folder, "demo", is_up=lambda status: status == 200) as demo,
        ):
            yield _run_journeys(tools, folder, demo=demo, waiting=waiting)
    finally:
        shutil.rmtree(folder)


def _run_journeys(tools: Tools, folder: Path, *, demo: str, waiting: str) -> JourneyResults:
    report = folder / "journeys.json"
    done = tools.run(
        *("npx", "vitest", "run", "--config", "vitest.journeys.config.ts"),
        *("--reporter=default", "--reporter=json", f"--outputFile.json={report}"),
        timeout_s=JOURNEYS_DEADLINE_S,
        CLAIRAI_URL=demo,
        CLAIRAI_WAITING_URL=waiting,
        CLAIRAI_WAITING_KEY=KEY,
        CLAIRAI_PYTHON=sys.executable,
    )
    assert report.exists(), done.stdout[-8000:]
    return JourneyResults(tuple(_journeys(json.loads(report.read_text()))), done.stdout)


def _journeys(report: dict[str, Any]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    for file in report["testResults"]:
        name = Path(file["name"]).relative_to(WEB / "journeys").name
        for journey in file["assertionResults"]:
            is_good = journey["status"] == "passed"
            failures = () if is_good else tuple(journey["failureMessages"]) or (journey["status"],)
            yield name, journey["fullName"], failures
