"""One proxy with a fake engine, shared by all tests that need no other settings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.http.world import World, world


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("w")) as made:
        yield made


@pytest.fixture
def w(shared: World) -> World:
    """What the fake engine was asked before is forgotten; set `w.upstream.script` to your own."""
    shared.upstream.forget()
    return shared
