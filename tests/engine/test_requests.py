"""What a request asks for is what it gets, or an error; never another request's rows."""

from __future__ import annotations

import numpy as np
import pytest

import clairai
from clairai.wire import ring_messages
from tests.engine import asks
from tests.engine.process import EngineFailed, EngineProcess

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def test_scores_are_aligned_to_token_ids_and_the_last_sampled_token_has_none(
    engine: EngineProcess,
) -> None:
    ((scores,),) = engine.call(asks.scores, [[11, 12, 13]], ["a", "b"], max_tokens=5)
    assert scores.names == ("a", "b")
    assert scores.token_ids[:3].tolist() == [11, 12, 13]
    assert scores.generated.shape == (5, 2)
    assert np.isfinite(scores.scores_NP[:-1]).all()
    assert np.isnan(scores.scores_NP[-1]).all()


def test_one_sampling_params_for_many_prompts_gives_each_its_own_scores(
    engine: EngineProcess,
) -> None:
    prompts = [[20 + index, 21, 22] for index in range(6)]
    together = engine.call(
        asks.scores, prompts, ["a"], extra=clairai.request(), temperature=0.0, max_tokens=3
    )
    for prompt, (scores,) in zip(prompts, together, strict=True):
        ((alone,),) = engine.call(asks.scores, [prompt], ["a"], temperature=0.0, max_tokens=3)
        np.testing.assert_array_equal(scores.token_ids, alone.token_ids)
        np.testing.assert_allclose(scores["a"], alone["a"], rtol=1e-4, atol=1e-4)


def test_each_of_n_answers_has_scores_of_its_own(engine: EngineProcess) -> None:
    (answers,) = engine.call(asks.scores, [[31, 32, 33]], ["a"], n=4, temperature=1.5, max_tokens=6)
    assert len(answers) == 4
    assert len({tuple(answer.token_ids.tolist()) for answer in answers}) > 1
    for answer in answers:
        # align() has already compared the token id of every row with the answer's own.
        assert np.isfinite(answer["a"][3:-1]).all()


def test_pitfall_04_cached_prompt_tokens_are_reported_as_such(engine: EngineProcess) -> None:
    prompt = list(range(100, 180))
    engine.call(asks.generate_quietly, [prompt], max_tokens=1)
    rows = engine.call(asks.events_of, [prompt], max_tokens=1)
    cached = [
        (position, span) for _, position, span, phase, _ in rows if phase == ring_messages.CACHED
    ]
    forwarded = [position for _, position, _, phase, _ in rows if phase == ring_messages.PREFILL]
    assert cached == [(0, 64)]  # two blocks of 32; the rest was forwarded
    assert forwarded == list(range(64, 80))
    ((scores,),) = engine.call(asks.scores, [prompt], ["a"], max_tokens=2)
    assert np.isnan(scores["a"][:64]).all()
    assert np.isfinite(scores["a"][64:80]).all()
    assert (scores.phase[:64] == ring_messages.CACHED).all()


def test_prompt_scores_forward_the_prompt_again(engine: EngineProcess) -> None:
    prompt = list(range(100, 180))
    engine.call(asks.generate_quietly, [prompt], max_tokens=1)
    ((scores,),) = engine.call(
        asks.scores, [prompt], ["a"], max_tokens=2, extra=clairai.request(prompt_scores=True)
    )
    assert np.isfinite(scores["a"][:80]).all()


def test_pitfall_08_a_chunked_prompt_gives_each_position_once(engine: EngineProcess) -> None:
    prompt = list(range(300, 500))  # 64 tokens a step: four chunks
    rows = engine.call(
        asks.events_of, [prompt], max_tokens=2, extra=clairai.request(prompt_scores=True)
    )
    positions = [position for _, position, _, phase, _ in rows if phase <= ring_messages.DECODE]
    assert positions == list(range(201))
    assert [phase for *_, phase, _ in rows if phase <= ring_messages.DECODE] == [0] * 200 + [1]


def test_a_stream_is_refused_while_it_is_in_use_and_afterwards(engine: EngineProcess) -> None:
    with pytest.raises(EngineFailed, match="stream 77 belongs to a request that is not finished"):
        engine.call(asks.tokens, [[1, 2], [3, 4]], extra=clairai.request(stream=77))
    engine.call(asks.drop_unfinished)
    with pytest.raises(EngineFailed, match="stream 77 was used by a request that has ended"):
        engine.call(asks.tokens, [[1, 2]], extra=clairai.request(stream=77))


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"steam": 1}, "unknown clairai request field 'steam'"),
        ({"stream": 0}, "stream must be a whole number from 1"),
        ({"stream": 2**63, "prompt_scores": 1}, "prompt_scores must be true or false"),
        ("{not json", "not JSON"),
        ([1], "must be an object"),
    ],
)
def test_a_bad_clairai_field_is_refused_never_ignored(
    engine: EngineProcess, field: object, reason: str
) -> None:
    with pytest.raises(EngineFailed, match=reason):
        engine.call(asks.tokens, [[1, 2]], extra={"clairai": field})
    engine.call(asks.drop_unfinished)
