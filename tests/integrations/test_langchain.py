"""LangChain's own models and callbacks, with a real proxy behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clairai.errors import NoScoresError
from tests.http.answers import expected
from tests.http.fake import answering
from tests.http.world import World, world

pytest.importorskip("langchain_openai", reason="langchain-openai: `make integrations` has it")

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

from clairai.integrations.langchain import (
    MAX_HELD,
    AsyncScoresCallback,
    ChatClairai,
    ScoresCallback,
)

HELLO, BYE = [72, 101, 108, 108, 111], [66, 121, 101]
ALL = {"X-Clairai-Scores": "all"}


@pytest.fixture
def w(tmp_path: Path) -> Iterator[World]:
    """Of each test its own: every answer of the fake engine has the same id."""
    with world(tmp_path, script=answering(HELLO)) as made:
        yield made


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Any], Any]]:
    """Run a coroutine; LangChain keeps connections, so all share one event loop."""
    with asyncio.Runner() as runner:
        yield runner.run


def chat(w: World, kind: Any = ChatClairai, **more: Any) -> Any:
    settings: dict[str, Any] = {"base_url": f"{w.url}/v1", "api_key": "none", "model": "toy"}
    return kind(**settings, **more)


def rows(scores: Any) -> list[dict[str, float | None]]:
    found = scores["probe_scores"]
    return [dict(zip(found["names"], row, strict=True)) for row in found["scores"]]


def scores_of(message: BaseMessage) -> Any:
    return message.response_metadata["clairai"]


@pytest.mark.parametrize("kind", [ChatClairai, ChatOpenAI])
def test_an_answer_has_its_scores_in_its_metadata(w: World, kind: Any) -> None:
    callback = ScoresCallback(f"{w.url}/v1")
    model = chat(w, kind, callbacks=[callback], default_headers=ALL)
    message = model.invoke("Hi")
    assert message.content == "Hello"
    assert rows(scores_of(message)) == expected(HELLO)
    assert scores_of(message)["tokens"] == list("Hello")
    assert callback.of(message) == scores_of(message)
    assert callback.failures == {}


@pytest.mark.parametrize("kind", [ScoresCallback, AsyncScoresCallback])
def test_an_awaited_answer_has_its_scores_in_its_metadata(
    w: World, run: Callable[[Any], Any], kind: Any
) -> None:
    callback = kind(f"{w.url}/v1")
    message = run(chat(w, callbacks=[callback]).ainvoke("Hi"))
    assert rows(scores_of(message)) == expected(HELLO)


def test_the_scores_of_a_stream_are_found_by_any_of_its_chunks(w: World) -> None:
    callback = ScoresCallback(f"{w.url}/v1")
    chunks = list(chat(w, callbacks=[callback]).stream("Hi"))
    assert "".join(chunk.content for chunk in chunks) == "Hello"
    whole = sum(chunks[1:], chunks[0])
    assert whole.response_metadata["id"] == "chatcmpl-1"
    for chunk in (chunks[0], chunks[-1], whole):
        assert rows(callback.of(chunk)) == expected(HELLO)


def test_the_scores_of_an_awaited_stream_are_found_by_its_chunks(
    w: World, run: Callable[[Any], Any]
) -> None:
    callback = AsyncScoresCallback(f"{w.url}/v1")

    async def stream() -> list[Any]:
        return [chunk async for chunk in chat(w, callbacks=[callback]).astream("Hi")]

    assert rows(callback.of(run(stream())[0])) == expected(HELLO)


def test_a_batch_has_the_scores_of_each_answer(w: World) -> None:
    """vLLM's ids differ; those of the fake engine do not, so each answer is asked for in turn."""
    model = chat(w, callbacks=[ScoresCallback(f"{w.url}/v1")])
    for ids in (HELLO, BYE):
        w.upstream.script = answering(ids)
        (message,) = model.batch(["Hi"])
        assert rows(scores_of(message)) == expected(ids)


def test_each_of_several_choices_has_its_own_scores(w: World) -> None:
    w.upstream.script = answering(HELLO, BYE)
    model = chat(w, n=2, callbacks=[ScoresCallback(f"{w.url}/v1")])
    generations = model.generate([[HumanMessage("Hi")]]).generations[0]
    assert [rows(scores_of(one.message)) for one in generations] == [expected(HELLO), expected(BYE)]


def test_probes_can_be_chosen(w: World) -> None:
    model = chat(w, probes="position", callbacks=[ScoresCallback(f"{w.url}/v1")])
    assert scores_of(model.invoke("Hi"))["probe_scores"]["names"] == ["position"]


def test_a_chain_goes_on_when_scores_are_missing_and_says_why(
    w: World, caplog: pytest.LogCaptureFixture
) -> None:
    callback = ScoresCallback(f"{w.url}/v1")
    chain = ChatPromptTemplate.from_messages([("user", "{text}")]) | chat(w, ChatOpenAI)
    message = chain.invoke({"text": "Hi"}, config={"callbacks": [callback]})  # asks for no scores
    assert message.content == "Hello"
    assert scores_of(message)["error"] == "no-scores"
    assert "X-Clairai-Scores" in scores_of(message)["reason"]
    assert callback.failures == {"no-scores": 1}
    assert "has no scores" in caplog.text


@pytest.mark.parametrize(
    ("address", "failure"), [("upstream_url", "not-clairai"), (None, "unreachable")]
)
def test_a_chain_goes_on_with_any_server(w: World, address: str | None, failure: str) -> None:
    url = "http://127.0.0.1:9" if address is None else getattr(w, address)
    callback = ScoresCallback(f"{url}/v1")
    message = chat(w, callbacks=[callback]).invoke("Hi")
    assert (message.content, scores_of(message)["error"]) == ("Hello", failure)


@pytest.mark.parametrize("kind", [ScoresCallback, AsyncScoresCallback])
def test_a_strict_callback_ends_the_chain(w: World, run: Callable[[Any], Any], kind: Any) -> None:
    model = chat(w, ChatOpenAI, callbacks=[kind(f"{w.url}/v1", strict=True)])
    with pytest.raises(NoScoresError):
        run(model.ainvoke("Hi"))


def test_models_that_drop_the_id_are_told_as_such(w: World) -> None:
    """ChatOpenAI drops it from streams, OpenAI always; if that changes, so do the docs."""
    callback = ScoresCallback(f"{w.url}/v1")
    chunks = list(chat(w, ChatOpenAI, default_headers=ALL, callbacks=[callback]).stream("Hi"))
    assert callback.of(chunks[0]) is not None
    assert callback.failures == {"no-id": 1}
    assert chat(w, OpenAI, default_headers=ALL, callbacks=[callback]).invoke("Hi") == "Hello"
    assert callback.failures == {"no-id": 2}


def test_the_scores_that_a_callback_holds_are_bounded(w: World) -> None:
    callback = ScoresCallback(f"{w.url}/v1")
    model = chat(w, callbacks=[callback])
    first, *_ = model.stream("Hi")
    assert callback.of(first) is not None
    for at in range(MAX_HELD):
        callback._held[str(at)] = {}
    list(model.stream("Hi"))
    assert callback.of(first) is None
    assert len(callback._held) == MAX_HELD


def test_a_message_of_somebody_else_has_no_scores(w: World) -> None:
    assert ScoresCallback(f"{w.url}/v1").of(AIMessage("Hello")) is None
