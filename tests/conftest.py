"""Fixtures that every test may use, and skips with a reason."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support import idle_workers

# The same examples every time, however slow the machine is today.
settings.register_profile("clairai", derandomize=True, deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("clairai")
    packages = Path(tempfile.mkdtemp(prefix="packages-"))
    config.add_cleanup(lambda: shutil.rmtree(packages, ignore_errors=True))
    idle_workers.install(packages)
    # A shell starts what it puts into the background with SIGINT ignored, and programs pass that
    # on: the commands whose Ctrl-C is tested would not hear it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder of the test's own: short, for a socket's path, and without our name in it."""
    folder = Path(tempfile.mkdtemp(prefix="test-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def runtime() -> Iterator[Path]:
    """A private runtime folder with a path short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="clairai-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def report() -> Callable[..., None]:
    """Write a measured number where CLAIRAI_NUMBERS says; docs/matrix.md is made from those."""

    def write(**numbers: object) -> None:
        target = os.environ.get("CLAIRAI_NUMBERS")
        if target:
            with Path(target).open("a") as file:
                file.write(json.dumps(numbers) + "\n")

    return write
