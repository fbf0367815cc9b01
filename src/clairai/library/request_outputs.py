"""Checks what a caller passes as the outputs of vLLM's `generate`.

Runs in: the user's process. Imports no vllm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clairai.errors import RequestError


def get_request_ids(outputs: Sequence[Any], wanted: str) -> tuple[str, ...]:
    """The ids of finished requests, whose `wanted` are asked for.

    An output of `beam_search` has none: every step of every beam was a request of its own
    (entrypoints/generate/beam_search/offline.py, 0.32).
    """
    for output in outputs:
        if not hasattr(output, "request_id"):
            raise RequestError(
                f"{type(output).__name__} has no {wanted}: it is no RequestOutput, and beams have "
                f"none; pass what generate() or chat() returned"
            )
        if not output.finished:
            raise RequestError(
                f"request {output.request_id!r} is not finished; ask for its {wanted} when it is"
            )
    return tuple(output.request_id for output in outputs)
