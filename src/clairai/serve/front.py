"""Takes the proxy's server and an address; gives it answering there, in a thread of its own.

A thread, because the main thread answers signals and looks after the engine.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Final, Self

import uvicorn

from clairai.errors import ClairaiError, ConfigError
from clairai.serve.launch import Bind

START_S: Final = 20.0
STOP_S: Final = 4.0  # for answers that are being sent, and for the ring's thread
_LOOK_S: Final = 0.01


def listen(bind: Bind) -> socket.socket:
    """Taken from now on, so that nothing has to be undone later because somebody else has it."""
    family = socket.AF_INET6 if ":" in bind.host else socket.AF_INET
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((bind.host, bind.port))
            listener.listen()
        except OSError as error:
            raise ConfigError(
                f"{bind.host} port {bind.port} cannot be used ({error.strerror}); "
                f"choose another with --port"
            ) from None
        undo.pop_all()
    return listener


class Front:
    """Inside the block the server answers; after it, the port is free again."""

    def __init__(self, server: uvicorn.Server, listener: socket.socket) -> None:
        self._server = server
        self._listener = listener
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="clairai-proxy", daemon=True)

    def check(self) -> None:
        """ClairaiError if it has ended although nobody asked it to."""
        if not self._thread.is_alive():
            raise ClairaiError(f"the proxy has ended ({self._error!r})") from self._error

    def __enter__(self) -> Self:
        self._thread.start()
        deadline_s = time.monotonic() + START_S
        while not self._server.started:
            self.check()
            if time.monotonic() > deadline_s:
                raise ClairaiError(f"the proxy did not start within {START_S:.0f} s")
            time.sleep(_LOOK_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(STOP_S)
        self._server.force_exit = True  # no more waiting for what is left
        self._thread.join(STOP_S)
        self._listener.close()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        except BaseException as error:  # kept for the main thread, which says it
            self._error = error
