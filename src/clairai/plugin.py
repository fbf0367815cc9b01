"""vLLM's two entry points into clairai: `register` in every process, `Endpoint` in its API server.

If this module fails to import, vLLM logs it and serves without the plugin. So nothing of ours is
imported at the top: a failure inside `register` stops the engine instead.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI
    from starlette.datastructures import State


def register() -> None:
    """Entry point of the group vllm.general_plugins; vLLM may call it any number of times.

    Unless the engine that is being built asks for clairai, it installs nothing and imports neither
    torch nor vllm.
    """
    from clairai.compat.find_config import is_requested

    if not is_requested(sys.argv, os.environ):
        return
    from clairai.settings import is_disabled

    if is_disabled():
        return
    from clairai.compat.install import install_hooks

    install_hooks()


class Endpoint:
    """Entry point of the group vllm.endpoint_plugins; loaded only if VLLM_PLUGINS names clairai.

    The protocol is plugins/endpoint_plugins/interface.py of vLLM, the same in 0.26 and 0.32.
    """

    name = "clairai"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        from clairai.server.install_routes import attach

        attach(app)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:  # noqa: ARG002
        from clairai.compat.api_server import keep_environment
        from clairai.compat.install import is_enabled_for
        from clairai.compat.stream_chunks import write_chunks_plainly
        from clairai.settings import is_disabled

        if engine_client is None or is_disabled():
            return  # the routes then answer that there is no engine with taps
        from clairai.server.install_routes import (
            connect,
            connect_tokens,
            start_beating,
            start_link_watch,
        )

        if (heartbeat := start_beating(state)) is not None:
            start_link_watch(engine_client, state, heartbeat)
        connect_tokens(engine_client, state)
        if is_enabled_for(engine_client.vllm_config):
            connect(engine_client, state)
            keep_environment()
            write_chunks_plainly()
