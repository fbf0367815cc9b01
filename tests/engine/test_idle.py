"""A plugin that is not used does nothing; taps that are used change no result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import clairai
from tests.engine import models, watching
from tests.engine.process import EngineProcess

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPTS: Final = models.random_prompts(9, (3, 17, 40, 64, 5, 90), 40_000)


def start(folder: Path, runtime: Path, **changes: Any) -> EngineProcess:
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
    }
    return EngineProcess(runtime=runtime, **(arguments | changes))


@pytest.fixture(scope="module")
def without_plugin(cut_model: Path, runtime: Path) -> Any:
    with start(cut_model, runtime, environment={"VLLM_PLUGINS": ""}) as engine:
        return engine.call(watching.logprobs, PROMPTS)


@pytest.fixture(scope="module")
def tapped(cut_model: Path, runtime: Path) -> Iterator[EngineProcess]:
    config = clairai.config(points=["all"], capacity=8, ring_mib=1)
    with start(cut_model, runtime, additional_config=config) as engine:
        yield engine


def test_pitfall_18_an_idle_plugin_changes_nothing_and_installs_nothing(
    cut_model: Path, runtime: Path, without_plugin: Any
) -> None:
    with start(cut_model, runtime) as engine:
        assert engine.call(watching.was_registered)
        assert engine.call(watching.traces) == []
        assert engine.call(watching.logprobs, PROMPTS) == without_plugin
        assert engine.call(watching.ask_for_scores).startswith(
            "unsupported: this engine has no taps"
        )


def test_a_disabled_plugin_serves_without_taps(
    cut_model: Path, runtime: Path, without_plugin: Any
) -> None:
    with start(
        cut_model,
        runtime,
        environment={"CLAIRAI_DISABLE": "1"},
        additional_config={"clairai": {"points": ["all"]}},
    ) as engine:
        assert engine.call(watching.traces) == []
        assert engine.call(watching.logprobs, PROMPTS) == without_plugin


def test_pitfall_09_taps_everywhere_leave_tokens_and_logprobs_bit_identical(
    tapped: EngineProcess, without_plugin: Any
) -> None:
    assert "WorkerBase.clairai_control" in tapped.call(watching.traces)
    tapped.call(watching.fill_bank)
    assert tapped.call(watching.logprobs, PROMPTS) == without_plugin
    tapped.call(watching.empty_bank)
