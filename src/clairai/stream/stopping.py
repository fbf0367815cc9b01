"""Takes how an answer ended and the rules it was asked with; gives the probe that stopped it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

# What the engine writes as stop_reason: docs/api.md.
_STOPPED: Final = re.compile(r"clairai: probe (\S+) >= \S+ for \d+ tokens?")


def stopped_by(
    rules: Sequence[Any], finish_reason: str | None, stop_reason: str | int | None
) -> str | None:
    """None if it ended otherwise: a client's own stop text may read like ours, a rule is asked."""
    if finish_reason != "stop" or not isinstance(stop_reason, str):
        return None
    found = _STOPPED.fullmatch(stop_reason)
    names = {rule.get("probe") for rule in rules if isinstance(rule, dict)}
    return found[1] if found is not None and found[1] in names else None
