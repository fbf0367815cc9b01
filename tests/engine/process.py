"""A process of its own with a real vLLM engine, in which tests run functions.

A process each, because vLLM keeps global state and warns freely: the suite's own process stays
clean, and an engine's death is seen as such. With vLLM's CPU build it is forked from one that has
imported what vLLM needs of others, most of the ten seconds that importing vLLM takes; vLLM and
clairai themselves are imported afresh, so that bugs can be planted before.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext, ForkServerContext, SpawnContext
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pytest

from clairai.launch.engine_command import is_cpu_build

START_DEADLINE_S: Final = 600.0
CALL_DEADLINE_S: Final = 600.0

# Set by `make release-check`, which tries releases that clairai would refuse.
ALLOW_UNTESTED: Final = os.environ.get("CLAIRAI_TESTS_ALLOW_UNTESTED_VLLM") == "1"

ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
}


# Of others, and nothing of vLLM's or ours.
_PRELOADED: Final = (
    *("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.rpc"),
    *("transformers.generation", "transformers.models.auto", "transformers.processing_utils"),
    *("openai.types.chat", "openai.types.responses", "fastapi", "aiohttp", "xgrammar", "zmq"),
    *("pandas", "scipy.signal", "scipy.stats", "sklearn", "sympy", "networkx"),
)


class EngineFailed(Exception):
    """The engine's process raised; the text is its traceback."""


class ChildProcess:
    """A child process in which tests run functions, with what `prepare` gives as first argument.

    `prepare` runs there, and gives a context manager.
    """

    def __init__(
        self,
        context: BaseContext,
        prepare: Callable[[], AbstractContextManager[Any]],
        *,
        is_daemon: bool = True,
        start_s: float = START_DEADLINE_S,
        call_s: float = CALL_DEADLINE_S,
    ) -> None:
        self._call_s = call_s
        self._pipe, child = context.Pipe()
        process: Any = context.Process  # type: ignore[attr-defined]  # of every real context
        self.process = process(target=_serve, args=(child, prepare), daemon=is_daemon)
        self.process.start()
        child.close()
        try:
            self._receive(start_s)
        except EngineFailed:
            self.close()
            raise

    def call(self, scenario: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._pipe.send((scenario, args, kwargs))
        return self._receive(self._call_s)

    def _receive(self, deadline_s: float) -> Any:
        if not self._pipe.poll(deadline_s):
            self.process.kill()
            raise EngineFailed(f"no answer within {deadline_s:.0f} s")
        try:
            is_good, value = self._pipe.recv()
        except EOFError:
            self.process.join(timeout=20)
            raise EngineFailed(f"the process ended, exit code {self.process.exitcode}") from None
        if not is_good:
            raise EngineFailed(value)
        return value

    def close(self) -> None:
        with suppress(BrokenPipeError):  # of a process that is gone
            self._pipe.send(None)  # a forked one holds this end of the pipe, too
        self._pipe.close()
        self.process.join(timeout=20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


class EngineProcess(ChildProcess):
    """A real engine in a child process; `call` runs a function there, the LLM its first argument.

    `plant` runs in the child before the engine starts: bugs are planted there.
    """

    def __init__(
        self,
        *,
        runtime: Path,
        environment: dict[str, str] | None = None,
        plant: Callable[[], None] | None = None,
        start_s: float = START_DEADLINE_S,
        call_s: float = CALL_DEADLINE_S,
        **llm: Any,
    ) -> None:
        variables = ENVIRONMENT | {"CLAIRAI_RUNTIME_DIR": str(runtime)} | (environment or {})
        if ALLOW_UNTESTED and (settings := llm.get("additional_config")):
            llm["additional_config"] = _allow_untested(settings)
        super().__init__(
            choose_context(environment or {}),
            partial(_run_engine, variables, plant, llm),
            # One that has processes of its own cannot be a daemon; close() ends it either way.
            is_daemon=variables["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0",
            start_s=start_s,
            call_s=call_s,
        )


def _allow_untested(additional_config: dict[str, Any]) -> dict[str, Any]:
    """As a user does who takes the risk."""
    ours = additional_config.get("clairai")
    if ours is None:
        return additional_config
    return additional_config | {"clairai": ours | {"allow_untested_vllm": True}}


def choose_context(
    environment: dict[str, str], *, preloaded: tuple[str, ...] = ()
) -> SpawnContext | ForkServerContext:
    """Forked where that can make no difference: without a GPU, and with variables of vLLM alone.

    `preloaded` counts for the first process that is forked: all have the same parent.
    """
    is_alike = all(name.startswith(("VLLM_", "CLAIRAI_")) for name in environment)
    if not is_cpu_build() or not is_alike:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, *preloaded])
    with pytest.MonkeyPatch.context() as patched:  # some read theirs when they are imported
        for name, value in ENVIRONMENT.items():
            patched.setenv(name, value)
        forkserver.ensure_running()
    return context


@contextmanager
def _run_engine(
    variables: dict[str, str], plant: Callable[[], None] | None, llm_arguments: dict[str, Any]
) -> Iterator[Any]:
    os.environ.update(variables)
    if plant is not None:
        plant()
    from vllm import LLM

    llm = LLM(**llm_arguments)
    yield llm
    llm.llm_engine.engine_core.shutdown()


def _serve(pipe: Connection, prepare: Callable[[], AbstractContextManager[Any]]) -> None:
    with ExitStack() as stack:
        try:
            subject = stack.enter_context(prepare())
        except BaseException:
            pipe.send((False, traceback.format_exc()))
            return
        pipe.send((True, None))
        while True:
            try:
                asked = pipe.recv()
            except EOFError:
                break
            if asked is None:
                break
            scenario, args, kwargs = asked
            try:
                pipe.send((True, scenario(subject, *args, **kwargs)))
            except BaseException:
                pipe.send((False, traceback.format_exc()))
