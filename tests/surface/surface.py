"""Describes everything that users and other programs rely on, as plain JSON.

`python -m tests.surface.surface` writes surface.json again, after a change in the changelog.
"""

from __future__ import annotations

import inspect
import json
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec
import typer

import clairai
from clairai import errors, settings
from clairai.cli.commands import app
from clairai.proxy.app import create_app
from clairai.proxy.observe.metrics import Metrics
from clairai.proxy.proxy_settings import ProxySettings
from clairai.ring import layout
from clairai.wire import (
    capture_messages,
    control_messages,
    ring_messages,
    steering_messages,
    weights_messages,
)
from tests.unit.proxy.observe.test_metrics import NUMBERS

ROOT: Final = Path(__file__).parents[2]
FILE: Final = Path(__file__).with_name("surface.json")
WIRE: Final = (
    *(ring_messages, control_messages, capture_messages, steering_messages),
    weights_messages,
)


def surface() -> dict[str, Any]:
    """The public surface: what may be added to freely and is changed only on purpose."""
    document = create_app(ProxySettings("http://127.0.0.1:8000")).openapi()
    return {
        "python": {name: _python(clairai, name) for name in sorted(clairai.__all__)},
        "weights": {name: _python(clairai.weights, name) for name in clairai.weights.__all__},
        "cli": dict(_commands("clairai", typer.main.get_command(app))),
        "settings": {field.name: repr(field.default) for field in fields(settings.Settings)},
        "errors": _errors(),
        "routes": sorted(
            f"{m.upper()} {path}" for path, ms in document["paths"].items() for m in ms
        ),
        "schemas": {name: _schema(it) for name, it in document["components"]["schemas"].items()},
        "metrics": _metrics(),
        "ring": _ring(),
        "messages": dict(_messages()),
        "entry_points": _entry_points(),
    }


def _python(module: ModuleType, name: str) -> Any:
    value = getattr(module, name)
    if inspect.isclass(value):
        members = [member for member in dir(value) if not member.startswith("_")]
        return {member: _signature(getattr(value, member)) for member in members}
    return _signature(value)


def _signature(value: object) -> str:
    if not callable(value):
        return "value"
    names = inspect.signature(value).parameters.values()
    return ", ".join(f"{p.kind.name.lower()} {p.name}" for p in names)


def _commands(path: str, command: Any) -> Iterator[tuple[str, list[str]]]:
    yield (
        path,
        sorted(opt for param in command.params for opt in (*param.opts, *param.secondary_opts)),
    )
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(f"{path} {name}", inner)


def _errors() -> dict[str, list[str]]:
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind)]
    return {
        kind.__name__: [kind.code, *(base.__name__ for base in kind.__mro__[1:-2])]
        for kind in kinds
        if issubclass(kind, errors.ClairaiError)
    }


def _schema(schema: dict[str, Any]) -> dict[str, list[str]]:
    return {
        "properties": sorted(schema.get("properties", ())),
        "required": sorted(schema.get("required", ())),
    }


def _metrics() -> list[str]:
    text = Metrics().snapshot(NUMBERS)().decode()
    return sorted(line.split()[2] for line in text.splitlines() if line.startswith("# TYPE"))


def _ring() -> dict[str, Any]:
    numbers = {name: value for name, value in vars(layout).items() if name.isupper()}
    found: dict[str, Any] = {k: v for k, v in numbers.items() if isinstance(v, int)}
    found["HEADER"], found["SLOT_HEADER"] = layout.HEADER.format, layout.SLOT_HEADER.format
    dtypes = {name: ring_messages.ROW.fields[name] for name in ring_messages.ROW.names or ()}  # type: ignore[index]
    found["ROW"] = {name: [dtype.str, offset] for name, (dtype, offset, *_) in dtypes.items()}
    return found


def _messages() -> Iterator[tuple[str, list[str]]]:
    """Fields of each struct that has a tag; the classes' own names may change."""
    kinds = [kind for module in WIRE for kind in vars(module).values() if isinstance(kind, type)]
    for kind in kinds:
        if issubclass(kind, msgspec.Struct) and kind.__struct_config__.tag is not None:
            yield str(kind.__struct_config__.tag), [*kind.__struct_fields__]


def _entry_points() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {name: sorted(entries) for name, entries in project["entry-points"].items()}
    return {**groups, "scripts": sorted(project["scripts"])}


if __name__ == "__main__":
    FILE.write_text(json.dumps(surface(), indent=1, sort_keys=True) + "\n")
