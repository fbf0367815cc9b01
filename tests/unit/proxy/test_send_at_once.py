"""What the proxy writes leaves at once, also where the event loop would hold it back."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.server import ServerState

from clairai.proxy.app import create_app, create_server
from clairai.proxy.proxy_settings import ProxySettings
from clairai.proxy.upstream_connection import Address, Connection, ConnectionPool


class RoundTransport(asyncio.Transport):
    """As uvloop 0.22's: holds back what is not over the high-water mark until a round ends."""

    def __init__(self) -> None:
        super().__init__(extra={"peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", 6)})
        self.sent = b""
        self._held, self._high = b"", 1 << 16

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        del low
        self._high = 1 << 16 if high is None else high

    def write(self, data: Any) -> None:
        self._held += data
        if len(self._held) > self._high:
            self.sent, self._held = self.sent + self._held, b""

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return len(self._held)

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


def test_the_double_holds_back_what_is_small() -> None:
    transport = RoundTransport()
    transport.write(b"x")
    assert transport.sent == b""


def test_a_request_reaches_upstream_before_others_of_its_round_are_read() -> None:
    async def run() -> bytes:
        address = Address.of("http://127.0.0.1:1", None)
        assert address is not None
        connection = Connection(ConnectionPool(address, connect_s=1.0, keep_s=1.0))
        transport = RoundTransport()
        connection.connection_made(transport)
        asking = asyncio.ensure_future(connection.ask(b"POST", 60.0))
        asyncio.get_running_loop().call_soon(asking.cancel)
        await asyncio.gather(asking, return_exceptions=True)
        return transport.sent

    assert asyncio.run(run()) == b"POST"


def test_an_answer_leaves_before_others_of_its_round_are_written() -> None:
    async def run() -> bytes:
        settings = ProxySettings("http://127.0.0.1:1")
        config = create_server(create_app(settings), settings).config
        config.load()
        make = cast(Any, config.http_protocol_class)
        protocol = make(config, ServerState(), {}, asyncio.get_running_loop())
        transport = RoundTransport()
        protocol.connection_made(transport)
        protocol.data_received(b"no request\r\n\r\n")  # which is refused
        protocol.connection_lost(None)
        return transport.sent

    assert asyncio.run(run()).startswith(b"HTTP/1.1 400 ")
