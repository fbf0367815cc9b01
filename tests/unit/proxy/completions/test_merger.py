"""Tokens and rows in every order of arrival: each score once, in order, never wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.proxy.completions.completion_request import ClairaiOptions
from clairai.proxy.completions.merger import Merger
from clairai.proxy.completions.request_scores import RequestScores, RowBatch, ScoreBudget
from clairai.proxy.completions.stream_writers import OpenAIStreamWriter
from clairai.proxy.completions.token_text import TokenTexts
from clairai.wire import ring_messages
from tests.http import vllm_wire
from tests.http.answers import chunks, collect_scores
from tests.http.fake import BANK, TOKEN_BYTES, score

STREAM = 7
MAX_WAIT_S = 1.0


@dataclass(frozen=True)
class Row:
    """What the ring may deliver of one token, and what may happen to it on the way."""

    choice: int
    position: int
    token_id: int
    fate: str  # whole, lost, wrong, twice
    phase: int = ring_messages.DECODE

    def batches(self) -> list[RowBatch]:
        if self.fate == "lost":
            return []
        token_id = self.token_id + (1 if self.fate == "wrong" else 0)
        values: list[Any] = score(token_id, self.position)
        made = RowBatch(
            STREAM, self.choice, BANK, [self.position], [token_id], [self.phase], [1], [values]
        )
        return [made, made] if self.fate == "twice" else [made]


@dataclass
class Story:
    """One request: its answers, how they are cut into chunks, what becomes of each row."""

    prompt: list[int]
    answers: list[list[int]]
    frames: list[bytes]
    rows: list[Row]
    order: list[str]  # frame, row or tick
    keeps_token_ids: bool
    prompt_scores: bool
    known: dict[tuple[int, int], bool] = field(default_factory=dict)


@st.composite
def stories(draw: st.DrawFn) -> Story:
    tokens = st.integers(0, 250)
    prompt = draw(st.lists(tokens, min_size=1, max_size=4))
    answers = draw(st.lists(st.lists(tokens, min_size=1, max_size=6), min_size=1, max_size=3))
    frames = draw(_frames(prompt, answers))
    rows = [
        Row(
            0,
            at,
            token,
            draw(st.sampled_from(("whole", "whole", "lost", "wrong"))),
            ring_messages.PREFILL,
        )
        for at, token in enumerate(prompt)
    ]
    fates = st.sampled_from(("whole", "whole", "whole", "lost", "wrong", "twice"))
    choices = [
        [Row(c, len(prompt) + i, token, draw(fates)) for i, token in enumerate(ids)]
        for c, ids in enumerate(answers)
    ]
    rows += _interleaved(draw, choices)
    events = ["frame"] * len(frames) + ["row"] * len(rows) + ["tick"] * draw(st.integers(0, 3))
    order = draw(st.permutations(events))
    return Story(prompt, answers, frames, rows, order, draw(st.booleans()), draw(st.booleans()))


def _interleaved(draw: st.DrawFn, choices: list[list[Row]]) -> list[Row]:
    """Rows of one choice keep their order; those of different choices mix in any order."""
    turns = draw(
        st.permutations([c for c, rows_of_choice in enumerate(choices) for _ in rows_of_choice])
    )
    left = [iter(rows_of_choice) for rows_of_choice in choices]
    return [next(left[choice]) for choice in turns]


@st.composite
def _frames(draw: st.DrawFn, prompt: list[int], answers: list[list[int]]) -> list[bytes]:
    cut = [_cut(draw, ids) for ids in answers]
    turns = draw(st.permutations([c for c, parts in enumerate(cut) for _ in parts]))
    made = [vllm_wire.frame(vllm_wire.role_chunk(c, prompt)) for c in range(len(answers))]
    done: Counter[int] = Counter()
    for choice in turns:
        part = cut[choice][done[choice]]
        done[choice] += 1
        finish = "length" if done[choice] == len(cut[choice]) else None
        delta = {"content": f"<{choice}:{done[choice]}>"}
        made.append(vllm_wire.frame(vllm_wire.chat_chunk(choice, part, delta, finish=finish)))
    return [*made, vllm_wire.frame(vllm_wire.usage_chunk(1, 1, is_chat=True)), b"data: [DONE]\n\n"]


def _cut(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    ends = sorted({*draw(st.sets(st.integers(1, len(ids)))), len(ids)})
    return [ids[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def played(story: Story) -> bytes:
    """What the client gets."""
    now_s = 0.0
    options = ClairaiOptions(prompt_scores=story.prompt_scores)
    scores = RequestScores(
        STREAM, options, max_scores=1000, budget=ScoreBudget(1000), is_attached=lambda: True
    )
    writer = OpenAIStreamWriter(
        scores, keeps_token_ids=story.keeps_token_ids, texts=TokenTexts(TOKEN_BYTES)
    )
    merger = Merger(scores, writer, max_wait_s=MAX_WAIT_S, clock=lambda: now_s)
    frames, rows = iter(story.frames), iter(story.rows)
    said: list[bytes] = []
    ended: set[int] = set()
    for event in story.order:
        if event == "frame":
            frame = next(frames)
            said += merger.take_token(frame) or merger.add_frame(frame)
            ended |= {c for c in range(3) if b'"index":%d' % c in frame and b'"length"' in frame}
        elif event == "row":
            row = next(rows)
            story.known[row.choice, row.position] = row.choice not in ended
            for batch in row.batches():
                scores.add_rows(batch)
            said += merger.release()
        else:
            now_s += MAX_WAIT_S / 2
            said += merger.release()
    now_s += 2 * MAX_WAIT_S
    return b"".join([*said, *merger.release()])


@given(stories())
@settings(max_examples=400, deadline=None, derandomize=True)
def test_every_token_is_delivered_once_in_order_with_its_own_score_or_none(story: Story) -> None:
    raw = played(story)
    got = chunks(raw)
    found = collect_scores(got)  # asserts order and once
    assert got[-1]["choices"] == []  # usage comes after every choice has ended
    fates = {
        (row.choice, row.position): row.fate
        for row in story.rows
        if row.phase == ring_messages.DECODE
    }
    for choice, ids in enumerate(story.answers):
        one = found[choice]
        assert len(one.scores) == len(ids)
        assert one.finish_reason == "length"
        count = sum(1 for frame in story.frames if b"<%d:" % choice in frame)
        assert one.text == "".join(f"<{choice}:{i + 1}>" for i in range(count))
        missing = 0
        for index, (token, scores) in enumerate(zip(ids, one.scores, strict=True)):
            position = len(story.prompt) + index
            right = {"token": float(token), "position": float(position)}
            is_delivered = scores == right
            assert is_delivered or not any(scores.values()), "a score that is not this token's"
            if index == len(ids) - 1:
                assert not is_delivered
                continue
            missing += not is_delivered
            fate = fates[choice, position]
            assert not (is_delivered and fate in ("lost", "wrong"))
            if fate in ("whole", "twice") and story.known[choice, position]:
                assert is_delivered, "it came before its answer ended, and was not delivered"
        assert one.lost == missing


@given(stories())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_prompt_is_delivered_once_with_its_own_scores_or_none(story: Story) -> None:
    found = collect_scores(chunks(played(story)))
    told_prompts = [one.prompt for one in found.values() if one.prompt is not None]
    assert len(told_prompts) == int(story.prompt_scores)
    for prompt in told_prompts:
        assert prompt["token_ids"] == story.prompt
        assert len(prompt["tokens"]) == len(prompt["scores"]) == len(story.prompt)
        for position, (token, scores) in enumerate(
            zip(story.prompt, prompt["scores"], strict=True)
        ):
            assert scores in ([float(token), float(position)], [None] * len(prompt["names"]))
        nothing = sum(not any(value is not None for value in row) for row in prompt["scores"])
        assert prompt.get("lost", 0) == nothing
