"""The commands `clairai keys`: make API keys with names and rights."""

from __future__ import annotations

import json
import secrets
from typing import Annotated

import typer

keys = typer.Typer(help="API keys with names and rights.", no_args_is_help=True)


@keys.command("new")
def new_key(
    name: Annotated[str, typer.Option(help="Of the key: a-z, 0-9, dot, underscore, hyphen.")],
    rights: Annotated[
        str, typer.Option(help="Of read, steer, capture, weights, admin; with commas.")
    ] = "read",
    as_digest: Annotated[
        bool, typer.Option("--digest", help="The entry has the key's SHA-256, and no secret.")
    ] = False,
) -> None:
    """Print a new key's entry for the list in --api-key-file; with --digest the key on stderr."""
    from clairai.proxy.access_keys import AccessKey

    secret = secrets.token_hex(32)
    listed = [right.strip() for right in rights.split(",") if right.strip()]
    key = AccessKey.of(secret, name=name, rights=listed)  # type: ignore[arg-type]  # it checks them
    shown = {"sha256": key.digest.hex()} if as_digest else {"key": secret}
    typer.echo(json.dumps({"name": name, "rights": listed, **shown}))
    if as_digest:
        typer.echo(f"the key, which is shown only once: {secret}", err=True)
