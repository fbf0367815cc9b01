"""Notes when each request reaches a stage on its way to the first token, in whichever process.

`install` has functions of clairai and of vLLM 0.32 note the id of the request and the time, on the
clock that all processes share, as soon as their modules are imported. A client gives the id as
X-Request-Id, which vLLM makes part of its own. Used by bench.first_token through
bench/tracing/sitecustomize.py.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

VARIABLE: Final = "CLAIRAI_BENCH_TRACE"  # the file to which all processes add lines
_ID: Final = re.compile(r"trace\d+")
HEADER: Final = "X-Request-Id"


class Noted(NamedTuple):
    """A request has reached a stage."""

    stage: str
    request: str
    ns: int


class Stage(NamedTuple):
    """A function whose call means that a request has come so far."""

    name: str
    module: str
    function: str  # with its class, if it is a method
    find: Callable[..., Sequence[str]]  # texts that contain ids, of what is given by position


def _of_http(_: Any, http: Any, *__: Any) -> Sequence[str]:
    return [http.headers.get(HEADER, "")]


def _of_headers(_: Any, __: Any, ___: Any, headers: Any, *____: Any) -> Sequence[str]:
    return [headers.get(HEADER, "")]


def _of_scope(_: Any, scope: Any, *__: Any) -> Sequence[str]:
    return [value.decode("latin-1") for _name, value in scope.get("headers", ())]


def _of_raw(_: Any, __: Any, raw_request: Any) -> Sequence[str]:
    return [raw_request.headers.get(HEADER, "")]


def _of_request(_: Any, request: Any, *__: Any) -> Sequence[str]:
    return [request.request_id]


def _of_step(_: Any, scheduled: Any, *__: Any) -> Sequence[str]:
    return [*scheduled.num_scheduled_tokens]


def _of_outputs(_: Any, outputs: Any, *__: Any) -> Sequence[str]:
    return [one.request_id for one in outputs]


STAGES: Final = (
    Stage("proxy has read it", "clairai.proxy.completions.complete", "complete", _of_http),
    Stage("proxy sends it", "clairai.proxy.upstream", "Upstream._send", _of_headers),
    # Of the proxy too, before it sends the request: the last note of a stage counts.
    Stage(
        "API server begins",
        "starlette.middleware.errors",
        "ServerErrorMiddleware.__call__",
        _of_scope,
    ),
    Stage(
        "API server has read it",
        "vllm.entrypoints.openai.chat_completion.serving",
        "OpenAIServingChat.create_chat_completion",
        _of_raw,
    ),
    Stage("rendered", "vllm.v1.engine.async_llm", "AsyncLLM._add_request", _of_request),
    Stage("core has it", "vllm.v1.engine.core", "EngineCore.preprocess_add_request", _of_request),
    Stage(
        "first step begins",
        "vllm.v1.executor.uniproc_executor",
        "UniProcExecutor.execute_model",
        _of_step,
    ),
    Stage(
        "first token computed",
        "vllm.v1.core.sched.scheduler",
        "Scheduler.update_from_output",
        _of_step,
    ),
    Stage(
        "API server has it",
        "vllm.v1.engine.output_processor",
        "OutputProcessor.process_outputs",
        _of_outputs,
    ),
)


class Notes:
    """Adds a line to the file for the first time that a request reaches a stage."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._seen: set[tuple[str, str]] = set()

    def add(self, stage: str, texts: Sequence[str]) -> None:
        now_ns = time.monotonic_ns()
        for text in texts:
            found = _ID.search(text)
            if found is None or (stage, found[0]) in self._seen:
                continue
            self._seen.add((stage, found[0]))
            os.write(self._fd, f"{stage}\t{found[0]}\t{now_ns}\n".encode())


def read_notes(path: Path) -> list[Noted]:
    lines = (line.split("\t") for line in path.read_text().splitlines())
    return [Noted(stage, request, int(ns)) for stage, request, ns in lines]


def install() -> None:
    """Nothing without the variable."""
    path = os.environ.get(VARIABLE)
    if path:
        sys.meta_path.insert(0, _Finder(Notes(Path(path))))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as all others do; those of stages are changed when they have been run."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._modules = {stage.module for stage in STAGES}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._modules:
            return None
        self._modules.remove(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: self._run(run, module)  # type: ignore[method-assign]
        return spec

    def _run(self, run: Callable[[ModuleType], None], module: ModuleType) -> None:
        run(module)
        for stage in STAGES:
            if stage.module == module.__name__:
                _note_calls(module, stage, self._notes)
        if hasattr(module, "forwarded_headers"):
            module.forwarded_headers = _keep_id(module.forwarded_headers)  # type: ignore[attr-defined]


def _note_calls(module: ModuleType, stage: Stage, notes: Notes) -> None:
    *owners, name = stage.function.split(".")
    owner: Any = functools.reduce(getattr, owners, module)
    original = getattr(owner, name)

    @functools.wraps(original)
    def noting(*args: Any, **kwargs: Any) -> Any:
        notes.add(stage.name, stage.find(*args))
        return original(*args, **kwargs)

    setattr(owner, name, noting)


def _keep_id(original: Callable[..., list[tuple[str, str]]]) -> Callable[..., Any]:
    """The proxy gives a request an id of its own; here it is the client's, so that it is known."""

    @functools.wraps(original)
    def forwarded_headers(proxy: Any, request: Any, **how: Any) -> list[tuple[str, str]]:
        given = request.headers.get(HEADER, "")
        headers = original(proxy, request, **how)
        if not _ID.search(given):
            return headers
        return [(name, given if name == HEADER else value) for name, value in headers]

    return forwarded_headers
