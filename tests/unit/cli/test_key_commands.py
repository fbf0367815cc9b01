"""`clairai keys new` prints entries that the server reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clairai.cli.commands import app
from clairai.errors import ConfigError
from clairai.launch.api_key import access_keys
from clairai.proxy.access_keys import find_key


def _entry(*options: str) -> tuple[dict[str, object], str]:
    result = CliRunner().invoke(app, ["keys", "new", *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), result.stderr


@pytest.mark.parametrize("more", [(), ("--digest",)])
def test_a_new_key_is_one_that_the_server_knows(tmp_path: Path, more: tuple[str, ...]) -> None:
    entry, said = _entry("--name", "ci", "--rights", "read, steer", *more)
    file = tmp_path / "keys"
    file.write_text(json.dumps([entry]))
    file.chmod(0o600)
    secret = str(entry.get("key") or said.rsplit(maxsplit=1)[-1])
    key = find_key(secret, access_keys(file))
    assert key is not None
    assert (key.name, sorted(key.rights)) == ("ci", ["read", "steer"])
    assert (secret in file.read_text()) == (not more)


def test_every_key_is_a_new_one() -> None:
    assert _entry("--name", "a")[0]["key"] != _entry("--name", "a")[0]["key"]


@pytest.mark.parametrize(
    "options", [("--name", "Not A Name"), ("--name", "a", "--rights", "root"), ("--name", "")]
)
def test_a_wrong_name_or_right_is_refused(options: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["keys", "new", *options])
    assert isinstance(result.exception, ConfigError)
    assert result.stdout == ""
