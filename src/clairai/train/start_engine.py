"""Start a vLLM engine in this process, tapped at some points, to read residual rows from."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from clairai.compat import offline_llm
from clairai.errors import ClairaiError, ConfigError, UnsupportedError, quote
from clairai.launch.engine_command import is_cpu_build
from clairai.library.config import config as build_config
from clairai.points import Point, expand
from clairai.train.row_source import BATCH_TOKENS, MAX_CAPACITY, RowSource

MAX_LEN: Final = 2048
NUM_DEFAULT_POINTS: Final = 6
DEPTHS: Final = (0.3, 0.9)  # shares of the model's layers: concepts are readable between them
RING_MIB: Final = 256  # a token takes at most 8 KiB, so a batch takes an eighth of it


def demo_arguments() -> dict[str, Any]:
    """vLLM's arguments for the demo model, as `clairai demo` serves it."""
    return {"dtype": "float32" if is_cpu_build() else "bfloat16"}


def choose_model(model: str | None, arguments: str) -> tuple[str, dict[str, Any]]:
    """Return the model to start, by default the demo's, and vLLM's arguments, parsed from JSON."""
    given = _parse_arguments(arguments)
    if model is not None:
        return model, given
    from clairai.demo.model import smollm2

    return str(smollm2()), demo_arguments() | given


def model_name(model: str) -> str:
    """The name that engines and probes use for a model."""
    return model.rstrip("/").rpartition("/")[2]


def _parse_arguments(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise ConfigError(
            f'--engine is {quote(text)}; give a JSON object, such as {{"dtype": "auto"}}'
        )
    return given


@contextmanager
def run_engine(
    model: str, patterns: Sequence[str], arguments: Mapping[str, Any]
) -> Iterator[RowSource]:
    """Run an engine tapped at `patterns`, or at a spread of points, until the block ends."""
    prepare_environment()
    with explain_start_errors(model):
        about = offline_llm.read_model_shape(model, arguments)
    max_len = arguments.get("max_model_len", min(about.max_len, MAX_LEN))
    if not isinstance(max_len, int) or not 1 < max_len <= BATCH_TOKENS:
        raise ConfigError(f"max_model_len is {quote(max_len)}; give 2 to {BATCH_TOKENS}")
    chosen = expand(patterns, about.num_layers) if patterns else default_points(about.num_layers)
    points = distinct_points(chosen)
    # in a folder where no reader looks for rings
    with tempfile.TemporaryDirectory(prefix="clairai-") as folder:
        config = build_config(
            points=[str(point) for point in points],
            capacity=min(about.width, MAX_CAPACITY),
            ring_mib=RING_MIB,
            scores=False,  # the ring has room for each batch, which is read at once
            runtime_dir=folder,
        )
        with explain_start_errors(model):
            started = offline_llm.start_llm(model, config, {**arguments, "max_model_len": max_len})
        try:
            yield RowSource(started, points, about.width, max_len)
        finally:
            offline_llm.stop_llm(started)


@contextmanager
def explain_start_errors(model: str) -> Iterator[None]:
    """Turn whatever vLLM raises at start into an UnsupportedError."""
    try:
        yield
    except ClairaiError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"vLLM cannot start {quote(model)}: {type(error).__name__}: {error}; `vllm serve` "
            "with the same arguments would fail in the same way"
        ) from error


def default_points(num_layers: int) -> tuple[Point, ...]:
    layers = dict.fromkeys(
        int(depth * num_layers) for depth in np.linspace(*DEPTHS, NUM_DEFAULT_POINTS)
    )
    return tuple(Point("post_block", layer) for layer in layers)


def distinct_points(points: Sequence[Point]) -> tuple[Point, ...]:
    """Drop points that are the same tensor as another: pre_attn.5 is post_block.4."""
    after = {point.layer + 1 for point in points if point.kind == "post_block"}
    return tuple(p for p in points if p.kind != "pre_attn" or p.layer not in after)


def prepare_environment() -> None:
    """Set what vLLM reads when it is imported; what the user has set stays."""
    defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if is_cpu_build():
        # By default vLLM reserves a core for an API server, which is not there, and most memory.
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        defaults |= {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
