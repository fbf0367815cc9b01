"""vLLM's two doors into clairai: `register` (every vLLM process) and `Endpoint` (its API server).

vLLM logs a plugin module that fails to import and serves on without it, so nothing that could fail
is imported up here: a failure inside `register` stops the engine instead.
"""

from __future__ import annotations

import sys


def register() -> None:
    """Entry point of the group vllm.general_plugins; vLLM may call it any number of times.

    Installs nothing, and imports neither torch nor vllm, unless the engine that is being built was
    asked for taps.
    """
    from clairai.compat.sight import is_asked_for

    if not is_asked_for(sys.argv):
        return
    from clairai.settings import is_disabled

    if is_disabled():
        return
    from clairai.compat.arm import arm

    arm()
