"""Aligns the rows of a request that has ended with its tokens: one score per token and probe.

The rules are those of `choice_scores.py`. Runs in: any reader.

N = tokens of prompt and output together, P = probes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from clairai.errors import ClairaiError, ProbeError, quote
from clairai.match.row_collector import RowIndex, RowsByPosition
from clairai.wire import ring_messages


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of one answer: a row for each token, taken where that token was the input.

    A row is NaN for the last sampled token, which is never an input; for a token that the prefix
    cache served (phase CACHED); and for a token counted in `missing`.
    """

    names: tuple[str, ...]
    token_ids: NDArray[np.int32]
    scores_NP: NDArray[np.float32]
    phase: NDArray[np.uint8]  # PREFILL, DECODE or CACHED of wire/ring_messages.py
    num_prompt: int
    missing: int  # forwarded tokens whose rows were lost
    # Versions of the model's weights that the rows are of, in the order of tokens: one if the
    # weights did not change during the request, none if the engine takes no new weights.
    weights: tuple[int, ...] = ()
    # What each token stands for: TEXT, or IMAGE, AUDIO, VIDEO, OTHER_MEDIA of wire/ring_messages.py
    # where the model was given an embedding of that, and the token id is only a placeholder.
    media: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))

    def __post_init__(self) -> None:
        if not len(self.media):  # made without: text alone
            object.__setattr__(self, "media", np.zeros(len(self.token_ids), np.uint8))

    @property
    def num_rows(self) -> int:
        """Tokens that have a row; cached ones, lost ones and the last sampled one have none."""
        is_last_sampled = self.num_prompt < len(self.token_ids)
        num_forwarded = int((self.phase != ring_messages.CACHED).sum()) - is_last_sampled
        return num_forwarded - self.missing

    @property
    def is_text(self) -> NDArray[np.bool_]:
        """False for each token that is the placeholder of an image, a sound or a video."""
        return np.equal(self.media, ring_messages.TEXT)

    @property
    def prompt(self) -> NDArray[np.float32]:
        """Row j scores prompt token j."""
        return self.scores_NP[: self.num_prompt]

    @property
    def generated(self) -> NDArray[np.float32]:
        """Row j scores generated token j."""
        return self.scores_NP[self.num_prompt :]

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        """One probe's score of every token."""
        if name not in self.names:
            held = quote(", ".join(self.names), limit=200)
            raise ProbeError(f"no scores of a probe named {quote(name)}; there are {held}")
        return self.scores_NP[:, self.names.index(name)]


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the rows of an answer go."""

    token_ids: NDArray[np.int32]
    is_kept: NDArray[np.bool_]  # of each row; the others score no token that can have a score
    positions: NDArray[np.int64]  # of the rows that are kept
    phase: NDArray[np.uint8]
    media: NDArray[np.uint8]
    num_prompt: int
    missing: int
    weights: tuple[int, ...]


def align(
    rows: RowsByPosition, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
) -> Scores:
    """Put each row at its token; raise if a row carries another token than the request has."""
    placed = place_rows(rows, prompt_token_ids, output_token_ids)
    scores_NP = np.full((len(placed.token_ids), len(rows.names)), np.nan, np.float32)
    scores_NP[placed.positions] = rows.scores_NP[placed.is_kept]
    return Scores(
        rows.names,
        placed.token_ids,
        scores_NP,
        placed.phase,
        placed.num_prompt,
        placed.missing,
        placed.weights,
        placed.media,
    )


def align_nothing(prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> Scores:
    """The scores of an answer of which no row is left: all are missing, and no probe is known."""
    no_rows = RowsByPosition(
        names=(),
        positions=np.empty(0, np.int64),
        token_ids=np.empty(0, np.int32),
        phases=np.empty(0, np.uint8),
        media=np.empty(0, np.uint8),
        weights_N=np.empty(0, np.int64),
        cached=(),
        finished=False,
        scores_NP=np.empty((0, 0), np.float32),
    )
    return align(no_rows, prompt_token_ids, output_token_ids)


def place_rows(
    rows: RowIndex, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
) -> Placement:
    """Find the token of each row; raise if a row carries another token than the request has."""
    token_ids = np.array([*prompt_token_ids, *output_token_ids], np.int32)
    num_prompt, num_tokens = len(prompt_token_ids), len(token_ids)
    # An engine that schedules ahead may forward the last sampled token too. Whether it does
    # depends on timing, so that row is never used.
    num_forwarded = num_tokens - 1 if len(output_token_ids) else num_tokens
    is_kept = rows.positions < num_forwarded
    positions = rows.positions[is_kept]
    _check_tokens(positions, rows.token_ids[is_kept], token_ids)

    phase = _default_phases(rows, num_prompt, num_tokens)
    phase[positions] = rows.phases[is_kept]
    media = _cached_media(rows, num_tokens)
    media[positions] = rows.media[is_kept]
    has_row = np.zeros(num_tokens, bool)
    has_row[positions] = True
    is_missing = ~has_row & (phase != ring_messages.CACHED)
    missing = int(is_missing[:num_forwarded].sum())
    weights = _weights_versions(rows.weights_N[is_kept])
    return Placement(token_ids, is_kept, positions, phase, media, num_prompt, missing, weights)


def _check_tokens(
    positions: NDArray[np.int64], carried: NDArray[np.int32], token_ids: NDArray[np.int32]
) -> None:
    wrong = np.flatnonzero(carried != token_ids[positions])
    if len(wrong):
        position = positions[wrong[0]]
        raise ClairaiError(
            f"row for position {position} carries token {carried[wrong[0]]}, "
            f"request has token {token_ids[position]}: please report"
        )


def _weights_versions(weights_N: NDArray[np.int64]) -> tuple[int, ...]:
    known = weights_N[weights_N >= 0]
    if len(known) and (known == known[0]).all():  # as a rule, and much faster
        return (int(known[0]),)
    return tuple(dict.fromkeys(known.tolist()))


def _default_phases(rows: RowIndex, num_prompt: int, num_tokens: int) -> NDArray[np.uint8]:
    """The phase of each token that has no row."""
    phase = np.full(num_tokens, ring_messages.DECODE, np.uint8)
    phase[:num_prompt] = ring_messages.PREFILL
    for first, span, _ in rows.cached:
        phase[first : first + span] = ring_messages.CACHED
    return phase


def _cached_media(rows: RowIndex, num_tokens: int) -> NDArray[np.uint8]:
    """What each token stands for that has no row; of a lost one that is not known."""
    media = np.zeros(num_tokens, np.uint8)
    for first, span, kind in rows.cached:
        media[first : first + span] = kind
    return media
