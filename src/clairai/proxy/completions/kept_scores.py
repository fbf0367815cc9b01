"""Keeps the scores of answers for a while, for clients that fetch them by the answer's id.

Memory is bounded in number and in bytes, running answers included; the oldest are dropped first.
Nothing is formatted until somebody asks. Runs in: the proxy, on the event loop.

T = tokens, P = probes
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import groupby
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from clairai.errors import NoScoresError
from clairai.match.choice_scores import MediaSpan
from clairai.proxy.caller import Caller
from clairai.proxy.completions.completion_request import MAX_ID
from clairai.proxy.completions.request_scores import (
    ChoiceEnd,
    RequestScores,
    ScoreSlice,
    describe_media,
)
from clairai.proxy.completions.token_text import TokenTexts
from clairai.proxy.observe.observer import Outcome
from clairai.proxy.proxy_settings import ProxySettings
from clairai.proxy.responses import HttpRefusal
from clairai.proxy.ring_feed import to_json_numbers
from clairai.proxy.schema import AnswerScores, KeptChoice, ProbeScores, PromptScores

# Rows of slices are Python numbers, 32 bytes each; so many are packed to four bytes each at once.
_PACKED_ROWS: Final = 64
_ROW_BYTES: Final = 32
_TOKEN_BYTES: Final = 8
_ANSWER_BYTES: Final = 1024  # of an answer without a token

_Key = tuple[str | None, str]  # owner and id of an answer
_Status = Literal["running"] | Outcome


class _Block(NamedTuple):
    """Scores of consecutive tokens in one set of columns."""

    names: tuple[str, ...]
    scores_TP: NDArray[np.float32]
    lost: int
    weights: tuple[int, ...]
    media: tuple[MediaSpan, ...]


class _KeptRows:
    """The scores of one choice, or of the prompt, in order from token 0 on."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._blocks: list[_Block] = []
        self._slices: list[ScoreSlice] = []  # not packed yet
        self._num_rows = 0  # of these slices

    def add(self, made: ScoreSlice) -> None:
        self._slices.append(made)
        self._num_rows += len(made.scores)
        self.nbytes += _slice_bytes(made)
        if self._num_rows >= _PACKED_ROWS:
            self.pack()

    def pack(self) -> None:
        blocks = _make_blocks(self._slices)
        self.nbytes += sum(block.scores_TP.nbytes for block in blocks)
        self.nbytes -= sum(map(_slice_bytes, self._slices))
        self._blocks += blocks
        self._slices, self._num_rows = [], 0

    def blocks(self) -> list[_Block]:
        """All scores so far."""
        return [*self._blocks, *_make_blocks(self._slices)]


def _slice_bytes(made: ScoreSlice) -> int:
    return _ROW_BYTES * len(made.scores) * (1 + len(made.names))


def _make_blocks(slices: Sequence[ScoreSlice]) -> list[_Block]:
    blocks = []
    for names, group in groupby(slices, key=lambda one: one.names):
        parts = list(group)
        rows = [row for part in parts for row in part.scores]
        scores_TP = np.array(rows, np.float32).reshape(len(rows), len(names))  # null becomes NaN
        weights = dict.fromkeys(version for part in parts for version in part.weights)
        lost = sum(len(part.lost) for part in parts)
        media = tuple(span for part in parts for span in part.media)
        blocks.append(_Block(names, scores_TP, lost, tuple(weights), media))
    return blocks


def _fields(blocks: Sequence[_Block]) -> dict[str, Any]:
    """The JSON fields of all of these scores, as one slice has them."""
    names = tuple(dict.fromkeys(name for block in blocks for name in block.names))
    scores = [row for block in blocks for row in _rows_of(block, names)]
    lost = sum(block.lost for block in blocks)
    weights = tuple(dict.fromkeys(one for block in blocks for one in block.weights))
    fields: dict[str, Any] = {"names": names, "start": 0, "scores": scores}
    fields |= {"lost": lost} if lost else {}
    if weights:
        fields["weights"] = weights[0] if len(weights) == 1 else None
    if media := [span for block in blocks for span in block.media]:
        fields["media"] = describe_media(media)
    return fields


def _rows_of(block: _Block, names: tuple[str, ...]) -> Iterator[list[float | None]]:
    """The block's rows in these columns, which it may not all have."""
    rows = to_json_numbers(block.scores_TP)
    if block.names == names:
        yield from rows
        return
    index_of = {name: at for at, name in enumerate(block.names)}
    columns = [index_of.get(name) for name in names]
    for row in rows:
        yield [None if at is None else row[at] for at in columns]


class _ChoiceCopy(NamedTuple):
    choice: int
    end: ChoiceEnd
    token_ids: list[int]
    blocks: list[_Block]


@dataclass(frozen=True)
class AnswerCopy:
    """An answer at one moment, which does not change: it may be described in a thread."""

    id: str
    model: str | None
    created_s: float
    status: _Status
    expires: float | None
    choices: tuple[_ChoiceCopy, ...]
    prompt: tuple[list[int], list[_Block]] | None

    def describe(self, texts: TokenTexts | None) -> AnswerScores:
        return AnswerScores(
            id=self.id,
            model=self.model,
            created=int(self.created_s),
            status=self.status,
            is_final=self.status != "running",
            expires=self.expires,
            choices=[self._describe_choice(choice, texts) for choice in self.choices],
        )

    def _describe_choice(self, one: _ChoiceCopy, texts: TokenTexts | None) -> KeptChoice:
        return KeptChoice(
            index=one.choice,
            finish_reason=one.end.finish_reason,
            stop_reason=one.end.stop_reason,
            token_ids=one.token_ids,
            tokens=None if texts is None else texts.decode(one.token_ids),
            probe_scores=ProbeScores(**_fields(one.blocks)),
            prompt_scores=self._describe_prompt(texts) if one.choice == 0 else UNSET,
        )

    def _describe_prompt(self, texts: TokenTexts | None) -> PromptScores | UnsetType:
        if self.prompt is None:
            return UNSET
        token_ids, blocks = self.prompt
        tokens = [] if texts is None else texts.decode(token_ids)
        return PromptScores(token_ids=token_ids, tokens=tokens, **_fields(blocks))


class KeptAnswer:
    """The scores of one answer as they are delivered; found by its id once that is known."""

    def __init__(self, kept: KeptScores, scores: RequestScores, owner: str | None) -> None:
        self.owner = owner  # name of the API key that asked
        self.id: str | None = None
        self.status: _Status = "running"
        self.created_s = time.time()
        self.ended_s: float | None = None  # on the store's clock
        self.nbytes = _ANSWER_BYTES
        self.is_dropped = False
        self._kept = kept
        # While it runs; then what is left of it, so that its rows and body are not held.
        self._scores: RequestScores | None = scores
        self._ends: dict[int, ChoiceEnd] = {}
        self._model: str | None = None
        self._prompt_ids: list[int] = []
        self._prompt: _KeptRows | None = None
        self._choices: dict[int, tuple[array[int], _KeptRows]] = {}

    @property
    def key(self) -> _Key:
        return self.owner, self.id or ""

    def identify(self, response_id: str) -> None:
        """The client learns this id now."""
        if len(response_id) > MAX_ID:
            self.drop()
            return
        self.id = response_id
        self._kept.add(self)

    def add_tokens(self, choice: int, token_ids: Sequence[int]) -> None:
        if not self.is_dropped:
            self._choice(choice)[0].extend(token_ids)
            self._grow(_TOKEN_BYTES * len(token_ids))

    def add_scores(self, choice: int, made: ScoreSlice) -> None:
        if not self.is_dropped:
            self._add_rows(self._choice(choice)[1], made)

    def add_prompt(self, token_ids: list[int], made: ScoreSlice) -> None:
        if not self.is_dropped:
            self._prompt, self._prompt_ids = _KeptRows(), token_ids
            self._grow(_TOKEN_BYTES * len(token_ids))
            self._add_rows(self._prompt, made)

    def end(self, outcome: Outcome) -> None:
        """Nothing more is added; no effect on one that has ended."""
        if self._scores is None:
            return
        self.status = outcome
        self._ends, self._model = self._scores.ends(), self._scores.model
        self._scores = None
        for rows in self._all_rows():
            before = rows.nbytes
            rows.pack()
            self._grow(rows.nbytes - before)
        if not self.is_dropped and self.id is not None:
            self._kept.note_end(self)

    def drop(self) -> None:
        """Forget all of it; the request itself goes on."""
        self.is_dropped = True
        self._choices, self._prompt, self._prompt_ids = {}, None, []

    def copy(self, *, expires: float | None) -> AnswerCopy:
        """What it has now."""
        scores, prompt = self._scores, self._prompt
        ends = self._ends if scores is None else scores.ends()
        return AnswerCopy(
            id=self.id or "",
            model=self._model if scores is None else scores.model,
            created_s=self.created_s,
            status=self.status,
            expires=expires,
            choices=tuple(self._copy_choice(at, end) for at, end in ends.items()),
            prompt=None if prompt is None else (self._prompt_ids, prompt.blocks()),
        )

    def _copy_choice(self, choice: int, end: ChoiceEnd) -> _ChoiceCopy:
        token_ids, rows = self._choice(choice)
        return _ChoiceCopy(choice, end, token_ids.tolist(), rows.blocks())

    def _choice(self, choice: int) -> tuple[array[int], _KeptRows]:
        if choice not in self._choices:
            self._choices[choice] = array("q"), _KeptRows()
        return self._choices[choice]

    def _all_rows(self) -> list[_KeptRows]:
        prompt = [] if self._prompt is None else [self._prompt]
        return [*prompt, *(rows for _, rows in self._choices.values())]

    def _add_rows(self, rows: _KeptRows, made: ScoreSlice) -> None:
        before = rows.nbytes
        rows.add(made)
        self._grow(rows.nbytes - before)

    def _grow(self, nbytes: int) -> None:
        self.nbytes += nbytes
        if self.id is not None and not self.is_dropped:
            self._kept.note_growth(nbytes)


CallLater = Callable[[float, Callable[[], None]], asyncio.TimerHandle]


def call_later_in_loop(delay_s: float, act: Callable[[], None]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(delay_s, act)


class KeptScores:
    """All answers whose scores are kept; at most `limits.kept_answers`, in `limits.kept_bytes`."""

    def __init__(
        self,
        settings: ProxySettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        call_later: CallLater = call_later_in_loop,
    ) -> None:
        self._call_later = call_later
        self._limits = settings.limits
        self._kept_s = settings.timeouts.scores_kept
        self._clock = clock
        self.nbytes = 0
        self.num_dropped = 0  # for want of room, before their time was over
        self._num_lost = 0  # with other processes of this proxy, which kept them
        self._answers: dict[_Key, KeptAnswer] = {}  # the oldest first
        self._ended: dict[_Key, KeptAnswer] = {}  # in the order of their ends
        self._gone: dict[_Key, str] = {}  # why the last ones that are gone are gone
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._answers)

    def open(self, scores: RequestScores, owner: str | None) -> KeptAnswer:
        """An answer that begins; `scores` tells it what it delivers."""
        answer = scores.kept = KeptAnswer(self, scores, owner)
        return answer

    def copy(self, response_id: str, caller: Caller) -> AnswerCopy:
        """What there is under this id now; HttpRefusal as of `get`."""
        answer = self.get(response_id, caller)
        if answer.ended_s is None:
            return answer.copy(expires=None)
        expires = time.time() + answer.ended_s + self._kept_s - self._clock()
        return answer.copy(expires=round(expires, 3))

    def look_up(self, response_id: str, caller: Caller) -> tuple[int, float]:
        """How well `get` can answer, for comparison with other processes' stores.

        3: with the caller's own scores, and when they were made; 2: with another's, for an admin;
        1: with the reason why they are gone; 0: not at all.
        """
        key = (caller.name, response_id)
        if key in self._answers:
            return 3, self._answers[key].created_s
        try:
            return 2, self.get(response_id, caller).created_s
        except HttpRefusal:
            return int(key in self._gone), 0.0

    def get(self, response_id: str, caller: Caller) -> KeptAnswer:
        """HttpRefusal if nothing is kept under this id, or if it is another's.

        Another's is answered as one that does not exist, so that ids are not confirmed.
        """
        self._drop_expired()
        own = self._answers.get((caller.name, response_id))
        if own is not None:
            return own
        found = [one for one in self._answers.values() if one.id == response_id]
        if found and caller.is_admin:
            return found[-1]
        reason = self._gone.get((caller.name, response_id), self._unknown())
        raise HttpRefusal(HTTPStatus.NOT_FOUND, reason, code=NoScoresError.code, param="id")

    def add(self, answer: KeptAnswer) -> None:
        """It can be found from now on; an older one of the same owner and id is dropped."""
        self._drop_expired()
        if answer.key in self._answers:
            self._forget(self._answers[answer.key])
        self._gone.pop(answer.key, None)
        self._answers[answer.key] = answer
        self.nbytes += answer.nbytes
        self._make_room()

    def note_lost_process(self, num_answers: int) -> None:
        """Another process of this proxy has ended; it kept so many answers."""
        self._num_lost += num_answers

    def note_growth(self, nbytes: int) -> None:
        self.nbytes += nbytes
        if self.nbytes > self._limits.kept_bytes:
            self._make_room()

    def note_end(self, answer: KeptAnswer) -> None:
        answer.ended_s = self._clock()
        self._ended[answer.key] = answer
        self._start_timer()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _make_room(self) -> None:
        limits = self._limits
        while self._answers and (
            len(self._answers) > limits.kept_answers or self.nbytes > limits.kept_bytes
        ):
            self.num_dropped += 1
            self._note_gone(
                next(iter(self._answers.values())),
                f"the scores of this answer made room for newer ones; at most "
                f"{limits.kept_answers} answers in {limits.kept_bytes} bytes are kept",
            )

    def _drop_expired(self) -> None:
        now_s = self._clock()
        while self._ended:
            answer = next(iter(self._ended.values()))
            assert answer.ended_s is not None
            if now_s < answer.ended_s + self._kept_s:
                return
            self._note_gone(
                answer,
                f"the scores of this answer have expired; they are kept {self._kept_s:g} s "
                f"after its end",
            )

    def _start_timer(self) -> None:
        """So that they also go if nobody comes any more."""
        first = next(iter(self._ended.values()), None)
        if self._timer is None and first is not None and first.ended_s is not None:
            left_s = first.ended_s + self._kept_s - self._clock()
            self._timer = self._call_later(max(left_s, 0.0), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._drop_expired()
        self._start_timer()

    def _note_gone(self, answer: KeptAnswer, reason: str) -> None:
        self._forget(answer)
        self._gone[answer.key] = reason
        while len(self._gone) > self._limits.kept_answers:
            del self._gone[next(iter(self._gone))]

    def _forget(self, answer: KeptAnswer) -> None:
        self._answers.pop(answer.key, None)
        self._ended.pop(answer.key, None)
        self.nbytes -= answer.nbytes
        answer.drop()

    def _unknown(self) -> str:
        reason = (
            "no scores are kept under this id: it is unknown, or its request asked for none (the "
            "`clairai` field, or the header X-Clairai-Scores); scores are kept "
            f"{self._kept_s:g} s after the answer's end"
        )
        if not self._num_lost:
            return reason
        return f"{reason}; it may be one of {self._num_lost} that ended with a process of the proxy"
