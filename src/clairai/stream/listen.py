"""Takes the app and its settings; gives the server that listens for it, with its own bounds."""

from __future__ import annotations

from typing import Final

import uvicorn
from fastapi import FastAPI

from clairai.stream.settings import ProxySettings

KEEP_ALIVE_S: Final = 30
GRACE_S: Final = 2


def server(app: FastAPI, settings: ProxySettings) -> uvicorn.Server:
    """Run it with `.run()`, or in a loop of yours with `await .serve()`.

    h11 and not httptools: the latter takes a header of any length before anybody can look at it.
    """
    return uvicorn.Server(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            http="h11",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=settings.limits.header_bytes,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
    )
