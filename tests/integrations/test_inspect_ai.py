"""Inspect's own evaluations, with a real proxy behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from clairai.errors import NoScoresError
from tests.http.answers import expected
from tests.http.fake import answering
from tests.http.world import World, world

pytest.importorskip("inspect_ai", reason="inspect-ai: `make integrations` has it")

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, ModelOutput, get_model
from inspect_ai.scorer import Score, Target, mean, scorer
from inspect_ai.solver import TaskState

HELLO, BYE = [72, 101, 108, 108, 111], [66, 121, 101]


@pytest.fixture
def w(tmp_path: Path) -> Iterator[World]:
    """Of each test its own: every answer of the fake engine has the same id."""
    with world(tmp_path, script=answering(HELLO)) as made:
        yield made


def generate(w: World, config: GenerateConfig | None = None, **arguments: Any) -> ModelOutput:
    url = arguments.pop("base_url", f"{w.url}/v1")

    async def ask() -> ModelOutput:
        async with get_model("clairai/toy", base_url=url, memoize=False, **arguments) as model:
            return await model.generate("Hi", config=config or GenerateConfig())

    return asyncio.run(ask())


def rows(scores: Any) -> list[dict[str, float | None]]:
    found = scores["probe_scores"]
    return [dict(zip(found["names"], row, strict=True)) for row in found["scores"]]


def scores_of(output: ModelOutput) -> list[Any]:
    assert output.metadata is not None
    return list(output.metadata["clairai"])


def test_inspect_finds_the_provider_by_the_entry_point_of_the_package() -> None:
    (found,) = entry_points(group="inspect_ai", name="clairai")
    assert found.load().ClairaiAPI is not None


@pytest.mark.parametrize("stream", [False, True])
def test_an_output_has_the_scores_of_its_tokens(w: World, stream: bool) -> None:
    output = generate(w, stream=stream)
    assert output.completion == "Hello"
    (scores,) = scores_of(output)
    assert rows(scores) == expected(HELLO)
    assert (scores["id"], scores["status"]) == (output.response_id, "done")


def test_each_choice_has_its_scores(w: World) -> None:
    w.upstream.script = answering(HELLO, BYE)
    output = generate(w, GenerateConfig(num_choices=2))
    assert [rows(scores) for scores in scores_of(output)] == [expected(HELLO), expected(BYE)]


@pytest.mark.parametrize("probes", ["position", ["position"]])
def test_probes_can_be_chosen(w: World, probes: Any) -> None:
    (scores,) = scores_of(generate(w, probes=probes))
    assert scores["probe_scores"]["names"] == ["position"]


def test_a_server_that_is_not_clairai_is_said_and_ends_nothing(w: World) -> None:
    output = generate(w, base_url=f"{w.upstream_url}/v1")
    assert output.completion == "Hello"
    assert [one["error"] for one in scores_of(output)] == ["not-clairai"]


def test_a_strict_model_ends_with_the_reason(w: World) -> None:
    with pytest.raises(NoScoresError, match="no proxy of clairai"):
        generate(w, base_url=f"{w.upstream_url}/v1", strict=True)


def test_an_evaluation_can_be_scored_by_a_probe(w: World, tmp_path: Path) -> None:
    @scorer(metrics=[mean()])  # type: ignore[untyped-decorator]
    def highest(probe: str) -> Any:
        async def score(state: TaskState, _: Target) -> Score:
            found = rows(scores_of(state.output)[0])
            return Score(value=max(row[probe] or 0.0 for row in found))

        return score

    task = Task(dataset=[Sample(input="Hi", target="")], scorer=highest("token"))
    (log,) = eval(
        task,
        model="clairai/toy",
        model_base_url=f"{w.url}/v1",
        log_dir=str(tmp_path),
        display="none",
    )
    assert log.status == "success", log.error
    assert log.results is not None
    assert log.results.scores[0].metrics["mean"].value == max(HELLO[:-1])
    assert log.samples is not None
    assert rows(scores_of(log.samples[0].output)[0]) == expected(HELLO)  # and they are logged
