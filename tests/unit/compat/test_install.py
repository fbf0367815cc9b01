"""Which engines keep scores when their settings do not say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.usage.usage_lib import UsageContext

from clairai.compat.check_engine import find_core_number
from clairai.compat.install import wrap_create_engine_config


class EngineArgs:
    """As vLLM's, as far as it matters here."""

    def __init__(self, additional_config: dict[str, Any]) -> None:
        self.additional_config = additional_config

    def create_engine_config(
        self, usage_context: UsageContext | None = None, headless: bool = False
    ) -> SimpleNamespace:
        del usage_context, headless
        return SimpleNamespace(additional_config=self.additional_config)


def scores_of(given: dict[str, Any], *usage: UsageContext) -> object:
    """What the engine's settings say of scores, after vLLM has made its configuration."""
    create = wrap_create_engine_config(EngineArgs.create_engine_config)
    config = create(EngineArgs({"clairai": given}), *usage)
    return config.additional_config["clairai"].get("scores")


@pytest.mark.parametrize("usage", [UsageContext.LLM_CLASS, UsageContext.ENGINE_CONTEXT])
def test_an_engine_in_the_users_own_program_keeps_scores(usage: UsageContext) -> None:
    assert scores_of({}, usage) is True


@pytest.mark.parametrize(
    "usage", [(UsageContext.OPENAI_API_SERVER,), (UsageContext.OPENAI_BATCH_RUNNER,), ()]
)
def test_a_server_keeps_none(usage: tuple[UsageContext, ...]) -> None:
    assert scores_of({}, *usage) is None


@pytest.mark.parametrize("given", [False, True, {"disk_gib": 3}])
def test_settings_that_say_so_outrank_both(given: object) -> None:
    assert scores_of({"scores": given}, UsageContext.LLM_CLASS) == given
    assert scores_of({"scores": given}, UsageContext.OPENAI_API_SERVER) == given


def test_a_ring_in_gpu_memory_is_not_read_unasked() -> None:
    assert scores_of({"ring_home": "device"}, UsageContext.LLM_CLASS) is None


def test_the_users_own_object_is_not_changed() -> None:
    given: dict[str, Any] = {"points": ["all"]}
    assert scores_of(given, UsageContext.LLM_CLASS) is True
    assert given == {"points": ["all"]}


def test_an_engine_without_our_key_is_left_alone() -> None:
    create = wrap_create_engine_config(EngineArgs.create_engine_config)
    assert create(EngineArgs({}), usage_context=UsageContext.LLM_CLASS).additional_config == {}


def test_a_variable_of_the_environment_puts_our_key_into_the_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create = wrap_create_engine_config(EngineArgs.create_engine_config)
    monkeypatch.setenv("TARGET_LAYER", "3")
    assert create(EngineArgs({"other": 1})).additional_config == {"clairai": {}, "other": 1}
    given = {"clairai": {"points": ["all"]}}
    assert create(EngineArgs(given)).additional_config == given


@pytest.mark.parametrize(("num_cores", "number"), [(1, None), (2, 1)])
def test_a_core_is_told_whether_there_are_others(num_cores: int, number: int | None) -> None:
    """As vLLM then reconfigures the config of a core, nothing else of it says so."""
    made = SimpleNamespace(
        additional_config={"clairai": {"points": ["all"]}},
        parallel_config=SimpleNamespace(
            data_parallel_size=num_cores, data_parallel_size_local=num_cores
        ),
    )
    config = wrap_create_engine_config(lambda _: made)(EngineArgs({}))
    config.parallel_config = SimpleNamespace(
        data_parallel_size=1, data_parallel_rank_local=0, data_parallel_index=num_cores - 1
    )
    assert find_core_number(config) == number
