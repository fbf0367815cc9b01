"""Which weights made an answer: what its scores, its chunks and its events say of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clairai.proxy import schema
from clairai.wire import ring_messages
from tests.http.answers import CHAT, asking, chunks, events
from tests.http.fake import PROMPT, Exchange, Script
from tests.http.world import HURRIED, World, world

TOKENS = [72, 101, 108]
STEER = [{"vector": "calm"}]


@pytest.fixture
def w(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as made:
        yield made


def weighed(*banks: int, echo: dict[str, Any] | None = None) -> Script:
    """Three tokens; the rows of the first two are of these banks."""

    async def script(exchange: Exchange) -> None:
        exchange.echo = echo
        exchange.rows(0, PROMPT, phase=ring_messages.PREFILL, bank=banks[0])
        await exchange.begin()
        for at, bank in enumerate(banks):
            exchange.rows(len(PROMPT) + at, [TOKENS[at]], bank=bank)
        await exchange.tokens(TOKENS, finish="stop", first=True)
        await exchange.end()

    return script


def scores(w: World, **fields: Any) -> dict[str, Any]:
    with w.client() as client:
        found = chunks(client.post(CHAT, json=asking(**fields)).content)
    (made,) = [c["probe_scores"] for one in found for c in one["choices"] if "probe_scores" in c]
    msgspec.convert(made, schema.ProbeScores)
    return dict(made)


@pytest.mark.parametrize(("banks", "told"), [((3, 3), 0), ((4, 4), 1), ((3, 4), None)])
def test_scores_say_which_weights_they_are_of(
    w: World, banks: tuple[int, int], told: int | None
) -> None:
    """An answer that goes on with other weights, as vLLM's own way allows, has no one version."""
    w.upstream.script = weighed(*banks)
    made = scores(w)
    assert "weights" in made
    assert made["weights"] == told


def test_an_engine_that_takes_no_weights_reports_no_version(w: World) -> None:
    w.upstream.script = weighed(1, 1)
    assert "weights" not in scores(w)


def test_rows_of_a_prompt_say_it_too(w: World) -> None:
    w.upstream.script = weighed(4, 4)
    with w.client() as client:
        found = chunks(client.post(CHAT, json=asking(prompt_scores=True)).content)
    prompts = [c["prompt_scores"] for one in found for c in one["choices"] if "prompt_scores" in c]
    assert [one["weights"] for one in prompts] == [1]
    msgspec.convert(prompts[0], schema.PromptScores)


def test_the_first_chunk_has_the_version_of_the_weights(w: World) -> None:
    w.upstream.script = weighed(4, 4, echo={"weights": 1})
    with w.client() as client:
        found = chunks(client.post(CHAT, json=asking()).content)
    assert [one.get("clairai") for one in found] == [{"weights": 1}, *[None] * len(found[1:])]


def test_named_events_say_it_with_the_scores_and_at_the_end(w: World) -> None:
    w.upstream.script = weighed(4, 4, echo={"weights": 1})
    with w.client() as client:
        found = events(client.post(CHAT, json=asking(events="named")).content)
    assert "steering" not in {one.name for one in found}, "nothing steers it"
    updates = [one.data for one in found if one.name == "probe_update"]
    assert {one["weights"] for one in updates} == {1}
    msgspec.convert(updates[0], schema.ProbeUpdateEvent)
    assert found[-1].data["weights"] == 1
    msgspec.convert(found[-1].data, schema.DoneEvent)


def test_an_echo_of_weights_alone_does_not_confirm_steering(tmp_path: Path) -> None:
    script = weighed(4, 4, echo={"weights": 1})
    with world(tmp_path, script=script, timeouts=HURRIED) as w, w.client() as client:
        raw = client.post(CHAT, json=asking(steer=STEER)).content
    assert b"does not say that it steers" in raw
    assert b"probe_scores" not in raw
