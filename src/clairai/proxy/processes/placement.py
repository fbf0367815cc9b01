"""Says from the head of a request which process of the proxy answers it.

A wrong guess costs nothing but time: every process answers every route with all checks. Only named
runs and kept scores are where they were made.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import unquote

from clairai.proxy.caller import Caller, authorize
from clairai.proxy.completions.named_runs import process_of_run
from clairai.proxy.proxy_settings import ProxySettings
from clairai.proxy.request_head import END
from clairai.proxy.responses import HttpRefusal
from clairai.proxy.routes import ROUTES, VLLM_ROUTES

_COMPLETIONS: Final = frozenset(
    ("POST", route.path)
    for route in ROUTES
    if route.handler in ("chat", "completions", "responses")
    or (route in VLLM_ROUTES and route.body != "none" and route.right == "read")
)
_RUN: Final = re.compile(r"/v1/runs/([^/]+)(?:/steering)?")
_SCORES: Final = re.compile(r"/v1/scores/([^/]+)")
_AUTHORIZATION: Final = re.compile(rb"\r\nauthorization:[ \t]*([^\r]*)", re.IGNORECASE)


@dataclass(frozen=True)
class Place:
    """Where a request is answered.

    `completion`: by any completion process; `run`: by process `number`; `scores`: by the one that
    has them for this caller; `first`: by the first process.
    """

    kind: Literal["completion", "run", "scores", "first"]
    number: int = 0
    id: str = ""
    caller: Caller | None = None


FIRST: Final = Place("first")
COMPLETION: Final = Place("completion")


def place_request(received: bytes, settings: ProxySettings) -> Place:
    """`received` begins with a whole head, which has been checked."""
    head = received[: received.find(END)]
    method, target, _ = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
    path = unquote(target.partition("?")[0])
    if (method, path) in _COMPLETIONS:
        return COMPLETION
    if found := _RUN.fullmatch(path):
        number = process_of_run(found[1])
        return FIRST if number is None else Place("run", number)
    if method == "GET" and (found := _SCORES.fullmatch(path)):
        caller = _caller_of(head, settings)
        return FIRST if caller is None else Place("scores", id=found[1], caller=caller)
    return FIRST


def _caller_of(head: bytes, settings: ProxySettings) -> Caller | None:
    """None if the caller is refused, by whoever answers."""
    found = _AUTHORIZATION.search(head)
    try:
        given = "" if found is None else found[1].decode("latin-1").rstrip(" \t")
        return authorize(given, "read", settings.access_keys)
    except HttpRefusal:
        return None
