"""vLLM's command line and environment, and the options that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clairai.errors import ConfigError, RingError
from clairai.launch.engine_command import (
    EngineCommand,
    ListenAddress,
    PrivateSocket,
    count_api_servers,
    is_loopback,
    upstream_idle_s,
)
from clairai.launch.serve import _name_arguments, parse_capture_option
from clairai.proxy.proxy_settings import Timeouts

IDLE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
PRIVATE = PrivateSocket(Path("/run/me/s-1/api.sock"))


def test_the_engine_listens_on_a_private_socket_and_gets_our_settings() -> None:
    command = EngineCommand(
        "m", {"clairai": {"points": ["all"]}}, PRIVATE, ("--max-model-len", "9")
    )
    argv = command.argv()
    assert argv[argv.index("--uds") + 1] == "/run/me/s-1/api.sock"
    assert not {"--host", "--port"} & {*argv}
    config = json.loads(argv[argv.index("--additional-config") + 1])
    assert config == {"clairai": {"points": ["all"]}}
    assert command.private_folder == Path("/run/me/s-1")
    assert command.address.url == "unix:/run/me/s-1/api.sock"


def test_a_key_is_never_on_the_command_line_and_the_engine_does_not_get_the_proxys() -> None:
    base = {"PATH": "p", "CLAIRAI_API_KEY": "ours", "VLLM_API_KEY": "ours"}
    assert not [
        *filter(lambda text: "ours" in text, EngineCommand("m", {}, PRIVATE).environ(base).values())
    ]
    own = EngineCommand("m", {}, ListenAddress("0.0.0.0", 7000, "secret"))  # noqa: S104
    assert "secret" not in " ".join(own.argv())
    assert own.environ(base)["VLLM_API_KEY"] == "secret"
    assert own.environ(base)["PATH"] == "p"


def test_vllms_own_sockets_go_into_the_private_folder_where_they_fit() -> None:
    assert EngineCommand("m", {}, PRIVATE).environ({})["VLLM_RPC_BASE_PATH"] == "/run/me/s-1"
    chosen = EngineCommand("m", {}, PRIVATE).environ({"VLLM_RPC_BASE_PATH": "/mine"})
    assert chosen["VLLM_RPC_BASE_PATH"] == "/mine"
    for length, fits in ((107 - 37, True), (107 - 36, False)):
        folder = Path("/" + "x" * (length - 1))
        environ = EngineCommand("m", {}, PrivateSocket(folder / "api.sock")).environ({})
        assert ("VLLM_RPC_BASE_PATH" in environ) == fits


def test_the_proxy_closes_idle_connections_to_a_private_socket_before_vllm_does() -> None:
    def vllm_idle_s(address: ListenAddress | PrivateSocket) -> float:
        return float(EngineCommand("m", {}, address).environ({}).get(IDLE, 5.0))

    assert upstream_idle_s(()) < vllm_idle_s(PRIVATE)
    assert Timeouts.upstream_idle < vllm_idle_s(ListenAddress()) < upstream_idle_s(())


def test_connections_to_several_api_servers_spread_anew_after_a_moment() -> None:
    assert upstream_idle_s(("--api-server-count", "4")) == Timeouts.upstream_idle


def test_a_runtime_folder_with_a_path_too_long_for_sockets_is_refused_at_once(
    tmp_path: Path,
) -> None:
    assert PrivateSocket.within(tmp_path).path.parent.parent == tmp_path
    with pytest.raises(RingError, match="set CLAIRAI_RUNTIME_DIR to a shorter path"):
        PrivateSocket.within(Path("/" + "x" * 80))


def test_every_run_has_its_own_socket(tmp_path: Path) -> None:
    assert PrivateSocket.within(tmp_path) != PrivateSocket.within(tmp_path)


def test_naming_our_plugin_leaves_the_others_on() -> None:
    command = EngineCommand("m", {}, PRIVATE)
    usual = command.environ({})["VLLM_PLUGINS"].split(",")
    assert {"clairai", "lora_filesystem_resolver", "lora_hf_hub_resolver"} <= {*usual}
    assert command.environ({"VLLM_PLUGINS": "mine"})["VLLM_PLUGINS"] == "clairai,mine"
    assert command.environ({"VLLM_PLUGINS": ""})["VLLM_PLUGINS"] == "clairai"


@pytest.mark.parametrize(
    "argument",
    [
        *("--host", "--hos=1.2.3.4", "--port=1", "--api_key", "--uds", "--grpc-port=1"),
        *("--additional-config.clairai.points=x", "--ssl_keyfile=k", "--ssl-c"),
    ],
)
def test_vllm_options_that_are_ours_are_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match="which clairai sets itself"):
        EngineCommand("m", {}, PRIVATE, (argument,))


@pytest.mark.parametrize("argument", ["--max-model-len", "-tp", "2", "--model-impl=auto", "--"])
def test_other_vllm_options_pass(argument: str) -> None:
    assert argument in EngineCommand("m", {}, PRIVATE, (argument,)).argv()


def test_a_folder_is_served_under_its_own_name_and_not_under_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "SmolLM2"
    folder.mkdir()
    assert _name_arguments(str(folder), []) == ("--served-model-name", "SmolLM2")
    assert _name_arguments(f"{folder}/", ["--dtype", "float32"]) == (
        "--served-model-name",
        "SmolLM2",
    )
    for given in ("--served-model-name", "--served_model_name=x", "--served"):
        assert _name_arguments(str(folder), [given]) == ()
    assert _name_arguments("org/name", []) == ()


def test_loopback_is_decided_by_address_and_not_by_prefix() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.9.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "127.0.0.1.example.org", "10.0.0.1", "")))  # noqa: S104


def test_an_empty_key_is_no_key() -> None:
    with pytest.raises(ConfigError, match="empty"):
        ListenAddress(api_key="")


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("captures", {"folder": "captures"}),
        ('{"folder": "a", "sample": 1}', {"folder": "a", "sample": 1}),
    ],
)
def test_a_capture_is_a_folder_or_a_setting(text: str, setting: dict[str, Any]) -> None:
    assert parse_capture_option(text) == setting


@pytest.mark.parametrize("text", ["{", '{"a": }'])
def test_a_capture_that_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="give a folder, or a JSON object"):
        parse_capture_option(text)


@pytest.mark.parametrize(
    "given", [("--api-server-count", "4"), ("--api_server_count=4",), ("--api-s", "4")]
)
def test_several_api_servers_are_started_by_the_command_that_starts_several(
    given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clairai.launch.engine_command._version", lambda _: "0.32.0")
    argv = EngineCommand("m", {}, PRIVATE, given).argv()
    assert argv[2:5] == ["vllm.entrypoints.cli.main", "serve", "m"]
    assert "--model" not in argv
    assert EngineCommand("m", {}, PRIVATE).argv()[2] == "vllm.entrypoints.openai.api_server"


def test_several_api_servers_without_vllms_own_command_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("clairai.launch.engine_command._version", lambda _: "")
    with pytest.raises(ConfigError, match="leave the option out"):
        EngineCommand("m", {}, PRIVATE, ("--api-server-count=2",))


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ((), 1),
        (("--max-model-len", "4096"), 1),
        (("--api-server-count", "4"), 4),
        (("--api-server-count=4",), 4),
        (("--api_server_count", "4"), 4),
        (("--api-server", "4"), 4),
        (("--api-server-count", "2", "--api-server-count", "3"), 3),
        (("--api-server-count",), 1),
        (("--api-server-count", "many"), 1),
        (("--api-server-count", "0"), 1),
    ],
)
def test_the_number_of_api_servers_is_read_as_vllm_reads_it(
    arguments: tuple[str, ...], count: int
) -> None:
    assert count_api_servers(arguments) == count
