"""Joins vLLM's own Prometheus series to those of the proxy, so that one scrape has both.

Runs in: the proxy, on the event loop.
"""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from typing import Final

from clairai.proxy.responses import HttpRefusal
from clairai.proxy.upstream import Upstream, UpstreamGone

TIMEOUT_S: Final = 3.0  # a scrape has ten seconds by default
_MISSING: Final = b"# vLLM's own series are missing: it does not answer\n"
_TYPE: Final = re.compile(rb"^# TYPE (\S+)", re.MULTILINE)
_FAMILY: Final = re.compile(rb"(?:# HELP (\S+)|# TYPE (\S+))")


async def fetch_metrics(upstream: Upstream) -> bytes | None:
    """The text of upstream's GET /metrics; None if it does not answer, or has none."""
    try:
        async with asyncio.timeout(TIMEOUT_S), upstream.ask("GET", "/metrics") as response:
            body = await upstream.read_body(response)
            return body if response.status == HTTPStatus.OK else None
    except (UpstreamGone, HttpRefusal, TimeoutError):
        return None


def join_metrics(own: bytes, others: bytes | None) -> bytes:
    """Both texts; families that both have, such as those of the process, are our own."""
    if others is None:
        return own + _MISSING
    names = frozenset(_TYPE.findall(own))
    kept, is_kept = [], True
    for line in others.splitlines(keepends=True):
        if found := _FAMILY.match(line):
            is_kept = (found[1] or found[2]) not in names
        if is_kept:
            kept.append(line)
    return own + b"".join(kept)
