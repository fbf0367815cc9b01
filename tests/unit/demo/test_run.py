"""What `clairai demo` prints: an answer with its scores, and the banner."""

from __future__ import annotations

import io

import numpy as np
from rich.console import Console

from clairai.demo.run import print_answer
from clairai.demo.scored_answer import ScoredAnswer
from clairai.launch.engine_command import ListenAddress
from clairai.launch.serve import make_banner
from clairai.match.align import Scores
from clairai.wire import ring_messages


def _console() -> Console:
    return Console(file=io.StringIO(), record=True, width=60)


def test_an_answer_is_printed_token_by_token_with_marks_and_a_dash_for_the_last() -> None:
    scores_NP = np.array([[0.5], [0.25], [0.75], [np.nan]], np.float32)
    phase = np.full(4, ring_messages.DECODE, np.uint8)
    scores = Scores(("kind",), np.arange(4, dtype=np.int32), scores_NP, phase, 1, 0)
    console = _console()
    print_answer(
        console, ScoredAnswer(("a", " b", "\n"), scores, ({"name": "kind", "threshold": 0.7},))
    )
    printed = [line.split() for line in console.export_text().splitlines() if line.strip()]
    assert printed[-4:] == [
        ["token", "kind"],
        ["'a'", "0.250"],
        ["'", "b'", "▲", "0.750"],
        ["'\\n'", "–"],  # noqa: RUF001
    ]


def test_the_banner_names_the_address_and_not_the_key() -> None:
    for address in (ListenAddress(), ListenAddress("0.0.0.0", 7000, "secret")):  # noqa: S104
        said = make_banner("m", address)
        assert said[0] == f"m is served on {address.url}"
        assert "secret" not in " ".join(said)
        assert ("ask for the key" in said[1]) == (address.api_key is not None)
