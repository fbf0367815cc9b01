"""A proxy without file descriptors says so to new requests, and does not blame its engine."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clairai.proxy.proxy_settings import ProxySettings
from clairai.proxy.upstream import OutOfDescriptors, Upstream


@pytest.mark.attack(260)
def test_a_proxy_without_descriptors_says_so_and_counts_no_outage(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        upstream = Upstream(ProxySettings(f"unix:{path}"))
        refusal = asyncio.run(_ask_without_descriptors(upstream))
    assert (refusal.status, refusal.code) == (503, "overloaded")
    assert "Retry-After" in refusal.headers
    assert upstream.num_outages == 0


async def _ask_without_descriptors(upstream: Upstream) -> OutOfDescriptors:
    await upstream.open()
    try:
        with no_descriptors(), pytest.raises(OutOfDescriptors) as refused:
            async with upstream.ask("GET", "/health"):
                pytest.fail("a connection was opened")
    finally:
        await upstream.close()
    return refused.value


@contextmanager
def no_descriptors() -> Iterator[None]:
    """The limit is the lowest unused number, so that every smaller one is taken."""
    lowest = os.dup(0)
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
