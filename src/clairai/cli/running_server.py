"""Options of the commands that talk to a running server, and its client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from clairai.library.http_client import ServerClient

DEFAULT_URL: Final = "http://127.0.0.1:6969"
ONLY_NEW: Final = {"If-None-Match": "*"}
ONLY_KNOWN: Final = {"If-Match": "*"}
SHORT_DIGEST: Final = 12

Url = Annotated[
    str, typer.Option("--url", "--to", metavar="URL", help="Address of the running server.")
]
MaybeUrl = Annotated[
    str | None,
    typer.Option(
        "--url", metavar="URL", help="A running server.", show_default=f"{DEFAULT_URL} without PATH"
    ),
]
Key = Annotated[
    str | None,
    typer.Option(envvar=["CLAIRAI_API_KEY", "VLLM_API_KEY"], help="The server's API key."),
]


def open_client(url: str, api_key: str | None) -> ServerClient:
    """A client of the server at this address; nothing is sent yet."""
    from clairai.library.http_client import ServerClient

    return ServerClient(url, api_key)
