"""Scores fetched for another library: they are there, or there is a reason why not."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from clairai.errors import NoScoresError
from clairai.integrations.fetch_scores import HEADER, ScoreFetcher
from clairai.proxy.proxy_settings import Timeouts
from tests.http.answers import CHAT, expected
from tests.http.fake import answering
from tests.http.world import PATIENT, World, world
from tests.support.ring_engine import until

KEY = "a-key-for-tests"
SCORED = {HEADER: "all"}


def _answer(w: World, **headers: str) -> str:
    with w.client(headers=headers) as client:
        return str(client.post(CHAT, json={"messages": []}).json()["id"])


def _fetcher(w: World, **more: object) -> ScoreFetcher:
    return ScoreFetcher(f"{w.url}/v1", **more)  # type: ignore[arg-type]


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Of a socket that does not listen, and that nobody else can open."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_the_scores_of_every_choice_are_there(w: World) -> None:
    w.upstream.script = answering([72, 105], [66, 121])
    fetcher = _fetcher(w)
    found = fetcher.fetch(_answer(w, **SCORED))
    assert (found.failure, found.status, fetcher.failures) == (None, "done", {})
    for index, ids in enumerate(([72, 105], [66, 121])):
        scores = found.choice(index).metadata()["probe_scores"]
        rows = [dict(zip(scores["names"], row, strict=True)) for row in scores["scores"]]
        assert rows == expected(ids)
    missing = found.choice(2).metadata()
    assert missing == {"error": "no-scores", "reason": f"the scores of {found.id} have no choice 2"}


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_the_address_is_that_of_the_openai_client(w: World, ending: str) -> None:
    found = ScoreFetcher(w.url + ending).fetch(_answer(w, **SCORED))
    assert found.failure is None


def test_an_answer_that_was_not_scored_says_how_to_ask(w: World) -> None:
    found = _fetcher(w).fetch("chatcmpl-of-nobody")
    assert found.failure == "no-scores"
    assert "X-Clairai-Scores" in str(found.reason)


def test_scores_that_have_expired_are_told_as_such(tmp_path: Path) -> None:
    timeouts = Timeouts(finish=PATIENT.finish, scores_kept=0.001)
    with world(tmp_path, timeouts=timeouts) as w:
        answer = _answer(w, **SCORED)
        until(lambda: not len(w.proxy.kept_scores))
        found = _fetcher(w).fetch(answer)
    assert found.failure == "no-scores"
    assert "expired" in str(found.reason)


def test_a_wrong_key_is_told_as_such(tmp_path: Path) -> None:
    with world(tmp_path, api_key=KEY) as w:
        answer = _answer(w, Authorization=f"Bearer {KEY}", **SCORED)
        assert _fetcher(w, api_key="wrong").fetch(answer).failure == "refused"
        assert _fetcher(w, api_key=KEY).fetch(answer).failure is None


def test_a_server_that_is_not_clairai_is_told_as_such(w: World) -> None:
    found = ScoreFetcher(f"{w.upstream_url}/v1").fetch("chatcmpl-1")
    assert found.failure == "not-clairai"
    assert "no proxy of clairai" in str(found.reason)


def test_a_server_that_does_not_answer_is_told_as_such(closed_port: int) -> None:
    found = ScoreFetcher(f"http://127.0.0.1:{closed_port}/v1").fetch("chatcmpl-1")
    assert (found.failure, "does not answer" in str(found.reason)) == ("unreachable", True)


def test_an_engine_that_is_gone_does_not_take_the_scores_along(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        answer = _answer(w, **SCORED)
        w.stop_upstream()
        found = _fetcher(w).fetch(answer)
    assert found.failure is None
    assert found.choice(0).metadata()["token_ids"] == [72, 105]


def test_a_failure_is_a_warning_and_a_count(w: World, caplog: pytest.LogCaptureFixture) -> None:
    fetcher = _fetcher(w)
    with caplog.at_level(logging.WARNING):
        for response_id in ("chatcmpl-of-nobody", None, ""):
            assert fetcher.fetch(response_id).failure is not None
    assert fetcher.failures == {"no-scores": 1, "no-id": 2}
    assert len(caplog.records) == 3
    assert all("has no scores" in record.message for record in caplog.records)


def test_a_failure_is_an_error_for_who_asks_for_that(w: World) -> None:
    fetcher = _fetcher(w, strict=True)
    with pytest.raises(NoScoresError, match="unknown"):
        fetcher.fetch("chatcmpl-of-nobody")
    assert fetcher.failures == {"no-scores": 1}
