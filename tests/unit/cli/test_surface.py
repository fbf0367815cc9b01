"""The commands and options of the command line program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from clairai.cli.commands import app
from clairai.errors import ConfigError
from tests.unit.proxy.observe.test_log_lines import logging_restored as logging_restored


def _commands(path: str, command: Any) -> Iterator[str]:
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(f"{path} {name}".strip(), inner)


COMMANDS = [*_commands("", typer.main.get_command(app))]


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_explains_itself(path: str) -> None:
    result = CliRunner().invoke(app, [*path.split(), "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; sys.argv = ['clairai', '--help']\n"
        "try:\n    import clairai.cli; clairai.cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'vllm', 'transformers', 'numpy', 'fastapi'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(
    "command",
    [
        ["demo"],
        ["serve", "m", "--points", "post_block.0"],
        ["proxy", "--upstream", "http://127.0.0.1:1"],
    ],
)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.org"])  # noqa: S104
def test_a_host_that_others_can_reach_needs_a_key(command: list[str], host: str) -> None:
    result = CliRunner(env={"CLAIRAI_API_KEY": "", "VLLM_API_KEY": ""}).invoke(
        app, [*command, "--host", host]
    )
    assert isinstance(result.exception, ConfigError)
    assert "set CLAIRAI_API_KEY or give --api-key-file" in str(result.exception)


def test_an_impossible_log_file_is_reported_before_anything_starts(tmp_path: Path) -> None:
    environ = {"CLAIRAI_RUNTIME_DIR": str(tmp_path / "run"), "HF_HUB_OFFLINE": "0"}
    result = CliRunner(env=environ).invoke(
        app, ["serve", "org/m", "--points", "all", "--vllm-log", str(tmp_path / "no" / "log")]
    )
    assert isinstance(result.exception, ConfigError)
    assert "check --vllm-log" in str(result.exception)


def test_events_need_json() -> None:
    result = CliRunner().invoke(app, ["sidecar", "--events"])
    assert result.exit_code == 2
    assert "--json" in result.output


def test_an_error_is_printed_and_the_exit_code_is_one() -> None:
    command = [sys.executable, "-m", "clairai.cli", "probes", "show", "no-such.safetensors"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr.startswith("error: 'no-such.safetensors': cannot be opened")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("upstream", ["127.0.0.1:8000", "ftp://host", ""])
def test_an_upstream_is_an_address_or_a_socket(upstream: str, tmp_path: Path) -> None:
    runtime = ["--runtime-dir", str(tmp_path / "run")]
    result = CliRunner().invoke(app, ["proxy", "--upstream", upstream, *runtime])
    assert isinstance(result.exception, ConfigError)
    assert "is no upstream" in str(result.exception)


def test_nothing_to_tap_is_reported_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TARGET_LAYER", "PROBE_MODEL"):
        monkeypatch.delenv(variable, raising=False)
    result = CliRunner().invoke(app, ["serve", "m"])
    assert isinstance(result.exception, ConfigError)
    assert "nothing to tap" in str(result.exception)
