"""Takes a machine; gives the page's tools, and what became of every journey, walked once."""

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
from tests.web.served import served

KEY: Final = "a-key-for-journeys"
NOBODY: Final = "http://127.0.0.1:1"  # no upstream listens there
WALK_DEADLINE_S: Final = 540.0


@dataclass(frozen=True)
class Walk:
    """What became of every journey: its file, its sentence, its failures."""

    journeys: tuple[tuple[str, str, tuple[str, ...]], ...]
    said: str

    def of(self, file: str) -> dict[str, tuple[str, ...]]:
        return {title: faults for name, title, faults in self.journeys if name == file}


@pytest.fixture(scope="session")
def tools() -> Tools:
    try:
        return prepare()
    except ToolsMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def walk(tools: Tools) -> Iterator[Walk]:
    """Every journey, in one browser, against one engine."""
    folder = Path(tempfile.mkdtemp(prefix="clairai-"))  # short enough for a socket's path
    key = folder / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    waits = ("proxy", "--upstream", NOBODY, "--api-key-file", str(key))
    try:
        with (
            served(folder, *waits, is_up=lambda status: status == 503) as waiting,
            served(folder, "demo", is_up=lambda status: status == 200) as demo,
        ):
            yield _walked(tools, folder, demo=demo, waiting=waiting)
    finally:
        shutil.rmtree(folder)


def _walked(tools: Tools, folder: Path, *, demo: str, waiting: str) -> Walk:
    report = folder / "journeys.json"
    done = tools.run(
        *("npx", "vitest", "run", "--config", "vitest.journeys.config.ts"),
        *("--reporter=default", "--reporter=json", f"--outputFile.json={report}"),
        timeout_s=WALK_DEADLINE_S,
        CLAIRAI_URL=demo,
        CLAIRAI_WAITING_URL=waiting,
        CLAIRAI_WAITING_KEY=KEY,
        CLAIRAI_PYTHON=sys.executable,
    )
    assert report.exists(), done.stdout[-8000:]
    return Walk(tuple(_journeys(json.loads(report.read_text()))), done.stdout)


def _journeys(report: dict[str, Any]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    for file in report["testResults"]:
        name = Path(file["name"]).relative_to(WEB / "journeys").name
        for journey in file["assertionResults"]:
            is_good = journey["status"] == "passed"
            faults = () if is_good else tuple(journey["failureMessages"]) or (journey["status"],)
            yield name, journey["fullName"], faults
