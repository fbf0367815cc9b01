"""An engine that captures a share of its requests, and of those the ones a probe selects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest

import clairai
from clairai.engine.capture.capture_resolver import is_sampled
from tests.engine import capturing
from tests.engine.capturing import Ask
from tests.engine.process import EngineProcess

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

MARKED: Final = 4242  # the token that the probe looks for
SHARE: Final = 0.5


def _probe(folder: Path) -> clairai.Probe:
    """At pre_attn.0 a row is the token's embedding, so this probe scores one token high."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "np") as file:
        table_VD = file.get_tensor("model.embed_tokens.weight").astype(np.float32)
    direction_D = table_VD[MARKED] / np.square(table_VD[MARKED]).sum()
    point = clairai.Point.parse("pre_attn.0")
    return clairai.Probe("marked", point, direction_D, threshold=0.99)


@pytest.fixture(scope="module")
def ruled(
    cut_model: Path, runtime: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("ruled")
    clairai.save(folder / "marked.safetensors", _probe(cut_model))
    with EngineProcess(
        runtime=runtime,
        model=str(cut_model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=16,
        block_size=32,
        additional_config=clairai.config(
            probes=folder / "marked.safetensors",
            capture={
                "folder": str(folder / "store"),
                "positions": "generated",
                "sample": SHARE,
                "when": {"probe": "marked"},
            },
        ),
    ) as running:
        yield running


def _ask(stream: int, *, is_marked: bool) -> Ask:
    prompt = np.random.default_rng(stream).integers(5000, 30000, 20).tolist()
    if is_marked:
        prompt[7] = MARKED
    return Ask(tuple(prompt), None, num_new=4, fields={"stream": stream})


def test_sampled_requests_are_kept_if_they_have_the_score(ruled: EngineProcess) -> None:
    asked = [_ask(stream, is_marked=stream % 2 == 0) for stream in range(1, 25)]
    found = [one for (one,) in ruled.call(capturing.capture, asked)]
    states = [one.state for one in found]
    assert states == [
        ("kept" if stream % 2 == 0 else "discarded") if is_sampled(stream, SHARE) else ""
        for stream in range(1, 25)
    ]
    assert {"kept", "discarded", ""} == set(states)
    for one in found:
        if one.state == "kept":
            assert one.positions == (20, 21, 22)
            assert one.tokens == one.token_ids[:3]
            assert one.discarded == 0
        if one.state == "discarded":
            assert (one.told, one.discarded, one.lost) == (0, 3, 0)
            assert one.reason == "probe marked stayed below 0.99"


def test_a_prompt_that_the_cache_could_serve_is_scored_again(ruled: EngineProcess) -> None:
    first, second, third = [s for s in range(300, 400) if is_sampled(s, SHARE)][:3]
    prompt = (*range(6000, 6007), MARKED, *range(6010, 6060))
    asked = [Ask(prompt, None, num_new=4, fields={"stream": s}) for s in (first, second)]
    for ask in asked:
        ((found,),) = ruled.call(capturing.capture, [ask])
        assert (found.state, found.num_cached) == ("kept", 0)
    declined = Ask(prompt, False, num_new=4, fields={"stream": third})
    ((found,),) = ruled.call(capturing.capture, [declined])
    assert found.num_cached == 32  # it was there


def test_a_request_that_asks_is_captured_and_one_that_declines_is_not(ruled: EngineProcess) -> None:
    left_out = next(s for s in range(100, 200) if not is_sampled(s, SHARE))
    chosen = next(s for s in range(100, 200) if is_sampled(s, SHARE))
    asks = [
        replace(_ask(left_out, is_marked=False), capture=True),
        replace(_ask(chosen, is_marked=True), capture=False),
    ]
    (asked,), (declined,) = ruled.call(capturing.capture, asks)
    assert (asked.state, asked.told) == ("kept", 3)
    assert declined.state == ""
