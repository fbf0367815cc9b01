"""How many processes answer completions, unless somebody says."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

import clairai.launch.serve
from clairai.cli.commands import app
from clairai.proxy.proxy_settings import MAX_PROCESSES


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ([], 1),
        (["--", "--api-server-count", "4"], 4),
        (["--", "--api-server-count", "64"], MAX_PROCESSES),
        (["--completion-processes", "2", "--", "--api-server-count", "4"], 2),
    ],
)
def test_there_are_as_many_as_api_servers(
    arguments: list[str], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def serve(_model: str, options: Any, *_: Any, **__: Any) -> None:
        started.append(options.completion_processes)

    monkeypatch.setattr(clairai.launch.serve, "serve", serve)
    done = CliRunner().invoke(app, ["serve", "MODEL", *arguments], catch_exceptions=False)
    assert (done.exit_code, started) == (0, [count])
