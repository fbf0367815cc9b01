"""Reads the scores of finished requests, aligned to their tokens.

Runs in: the user's process. The rows come from the engine's spool, which has read them while the
engine worked; without a spool, from the ring. Imports no vllm.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, overload
from weakref import WeakValueDictionary

from clairai.errors import ConfigError, EngineGoneError, RequestError, RowsLostError, quote
from clairai.library.engine_control import ask_async_engine, ask_engine
from clairai.library.request_outputs import get_request_ids
from clairai.match.align import Scores, align, align_nothing
from clairai.match.reduce import Part, ReducedScores, Reduction, check_reduction, reduce_scores
from clairai.match.row_collector import RowCollector
from clairai.match.stored_rows import (
    StoredBlock,
    StoredColumns,
    align_stored,
    find_answers,
)
from clairai.ring.attach import RingReader
from clairai.spool.client import Segments, SpoolClient, SpoolContents
from clairai.wire import control_messages
from clairai.wire.control_messages import Description, Streams
from clairai.wire.spool_messages import SpoolLosses

OnLoss = Literal["raise", "keep"]

START_S: Final = 30.0  # for a spool that has just been started
START_PAUSE_S: Final = 0.02
TOKENS_AT_ONCE: Final = 1 << 20  # whose index rows are sorted together, in some 100 MB
_SEGMENTS: Final = "_clairai_segments"
_DESCRIPTION: Final = "_clairai_description"
_OVERWRITTEN: Final = (
    "were overwritten before they were read; keep them with scores=True in clairai.config(), "
    "raise ring_mib, or call clairai.scores() after fewer requests"
)


@overload
def scores(
    llm: Any,
    outputs: Sequence[Any],
    *,
    reduce: None = None,
    over: Part = "generated",
    on_loss: OnLoss = "raise",
    progress: bool = False,
) -> list[list[Scores]]: ...
@overload
def scores(
    llm: Any,
    outputs: Sequence[Any],
    *,
    reduce: Reduction,
    over: Part = "generated",
    on_loss: OnLoss = "raise",
    progress: bool = False,
) -> list[list[ReducedScores]]: ...
def scores(
    llm: Any,
    outputs: Sequence[Any],
    *,
    reduce: Reduction | None = None,
    over: Part = "generated",
    on_loss: OnLoss = "raise",
    progress: bool = False,
) -> Any:
    """The scores of finished requests: for each RequestOutput, one Scores per choice.

    All of them, however many: they lie on disk, and are read when you look at them. With `reduce`
    each answer is one number per probe, over its generated tokens or what `over` says. Raises
    RowsLostError if any row of these requests was lost; with on_loss="keep", `missing` says so.
    `progress` shows a bar with the number of rows and losses.
    """
    wish = _Wish(reduce, over, on_loss, progress)
    question = control_messages.FindStreams(get_request_ids(outputs, "scores"))
    described = ask_engine(llm, control_messages.Describe(), Description)
    found = ask_engine(llm, question, Streams)
    requests = _find_requests(found, outputs, until=described.published)
    return _read(llm, described, requests, wish)


@overload
async def async_scores(
    engine: Any,
    outputs: Sequence[Any],
    *,
    reduce: None = None,
    over: Part = "generated",
    on_loss: OnLoss = "raise",
) -> list[list[Scores]]: ...
@overload
async def async_scores(
    engine: Any,
    outputs: Sequence[Any],
    *,
    reduce: Reduction,
    over: Part = "generated",
    on_loss: OnLoss = "raise",
) -> list[list[ReducedScores]]: ...
async def async_scores(
    engine: Any,
    outputs: Sequence[Any],
    *,
    reduce: Reduction | None = None,
    over: Part = "generated",
    on_loss: OnLoss = "raise",
) -> Any:
    """As `scores`, for vLLM's AsyncLLM: the last output of each request, with all its tokens.

    Other requests go on: the engine is asked for the ids of streams, and waits for nothing.
    """
    wish = _Wish(reduce, over, on_loss)
    question = control_messages.FindStreams(get_request_ids(outputs, "scores"))
    described: Description | None = vars(engine).get(_DESCRIPTION)
    if described is None:
        described = await ask_async_engine(engine, control_messages.Describe(), Description)
        vars(engine)[_DESCRIPTION] = described
    found = await ask_async_engine(engine, question, Streams)
    requests = _find_requests(found, outputs, until=found.until)
    early = await asyncio.to_thread(_try_read, engine, described, requests, wish)
    if early is not None:
        return early
    # Now the engine is asked to finish what it publishes, and to replace a spool that has died.
    described = await ask_async_engine(engine, control_messages.Describe(), Description)
    requests = replace(requests, until=described.published)
    return await asyncio.to_thread(_read, engine, described, requests, wish)


@dataclass(frozen=True)
class _Wish:
    """What the caller wants of each answer."""

    reduce: Reduction | None
    over: Part
    on_loss: OnLoss
    has_bar: bool = False

    def __post_init__(self) -> None:
        check_reduction(self.reduce, self.over)
        if self.on_loss not in ("raise", "keep"):
            raise ConfigError(f"on_loss is {quote(self.on_loss)}; use raise or keep")

    def grant(self, aligned: Scores) -> Any:
        return aligned if self.reduce is None else reduce_scores(aligned, self.reduce, self.over)


@dataclass(frozen=True)
class _Requests:
    """Requests whose scores are wanted, and the records that their rows are in."""

    outputs: Sequence[Any]
    streams: Sequence[int]
    since: int
    until: int

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return zip(self.streams, self.outputs, strict=True)

    def split(self) -> Iterator[_Requests]:
        """As many at once as the memory for sorting their rows allows."""
        begin, num_tokens = 0, 0
        for at, output in enumerate(self.outputs):
            answers = [len(answer.token_ids) for answer in output.outputs]
            needed = sum(answers) + len(answers) * len(output.prompt_token_ids)
            if num_tokens + needed > TOKENS_AT_ONCE and at > begin:
                yield self._cut(begin, at)
                begin, num_tokens = at, 0
            num_tokens += needed
        yield self._cut(begin, len(self.outputs))

    def _cut(self, begin: int, end: int) -> _Requests:
        return replace(self, outputs=self.outputs[begin:end], streams=self.streams[begin:end])


Align = Callable[[int, Any, Any], Scores | None]  # of a stream, its output and one of its answers


def _find_requests(found: Streams, outputs: Sequence[Any], *, until: int) -> _Requests:
    known = [stream for stream in found.streams if stream is not None]
    if len(known) < len(outputs):
        raise RequestError(
            f"{len(outputs) - len(known)} of {len(outputs)} requests are not known to this engine; "
            f"pass the outputs of this LLM's own generate(), soon after it"
        )
    return _Requests(outputs, known, found.since, until)


def _read(llm: Any, described: Description, requests: _Requests, wish: _Wish) -> Any:
    if not described.keeps_scores:
        return _read_ring(Path(described.socket), requests, wish)
    with _connect(described, _mapped_segments(llm)) as client:
        contents = client.read(requests.since, requests.until)
        return _align_contents(client, contents, requests, wish)


def _try_read(llm: Any, described: Description, requests: _Requests, wish: _Wish) -> Any:
    """None if the rows are not all there yet, or the spool is not."""
    if not described.keeps_scores:
        return None
    folder = Path(described.socket).parent
    try:
        with SpoolClient.connect(folder, described.epoch, _mapped_segments(llm)) as client:
            contents = client.try_read(requests.since, requests.until)
            if contents is None:
                return None
            return _align_contents(client, contents, requests, replace(wish, on_loss="raise"))
    except (EngineGoneError, RowsLostError):
        return None


def _mapped_segments(llm: Any) -> Segments:
    """Kept on the LLM object, so that all scores of an engine share what they map."""
    found: Segments | None = vars(llm).get(_SEGMENTS)
    return vars(llm).setdefault(_SEGMENTS, WeakValueDictionary()) if found is None else found


def _connect(described: Description, segments: Segments) -> SpoolClient:
    """A spool that died was started again when the engine was asked: wait for it."""
    folder, deadline_s = Path(described.socket).parent, time.monotonic() + START_S
    while True:
        try:
            return SpoolClient.connect(folder, described.epoch, segments)
        except EngineGoneError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(START_PAUSE_S)


def _align_contents(
    client: SpoolClient, contents: SpoolContents, requests: _Requests, wish: _Wish
) -> list[list[Any]]:
    blocks = [
        StoredBlock(one.index["row"], one.index["bank"], one.view.scores_RC[one.first_row :])
        for one in contents.found
    ]

    @functools.cache
    def columns_of(version: int) -> StoredColumns:
        bank = client.bank(version)
        return StoredColumns(bank.names, bank.weights)

    def align_part(part: _Requests) -> Align:
        answers = find_answers(blocks, part.streams)

        def align_answer(stream: int, output: Any, answer: Any) -> Scores | None:
            rows = answers.get((stream, answer.index))
            if rows is None:
                return None
            return align_stored(rows, blocks, columns_of, output.prompt_token_ids, answer.token_ids)

        return align_answer

    with _Progress(requests, wish, contents.losses) as progress:
        return [
            progress.deliver(aligned, stream, output)
            for part in requests.split()
            for aligned in [align_part(part)]
            for stream, output in part
        ]


def _read_ring(socket: Path, requests: _Requests, wish: _Wish) -> list[list[Any]]:
    # The ring bounds it: what it holds fits in memory.
    streams = set(requests.streams)
    collector = RowCollector(only=streams, max_streams=len(streams) + 1, max_rows=sys.maxsize)
    with RingReader.attach(socket, start=requests.since) as reader:
        while records := reader.poll():
            for record in records:
                collector.add(record, reader.bank(record.bank_version))

    def align_answer(stream: int, output: Any, answer: Any) -> Scores | None:
        rows = collector.rows(stream, answer.index)
        return None if rows is None else align(rows, output.prompt_token_ids, answer.token_ids)

    with _Progress(requests, wish, None) as progress:
        return [progress.deliver(align_answer, stream, output) for stream, output in requests]


class _Progress:
    """Delivers answers one after the other, and counts their rows and losses."""

    def __init__(self, requests: _Requests, wish: _Wish, losses: SpoolLosses | None) -> None:
        """`losses` are those of the spool; None if the rows come from the ring."""
        self._wish, self._losses = wish, losses
        self._num_rows = self._num_lost = 0
        self._bar = _open_bar(len(requests.outputs)) if wish.has_bar else None

    def deliver(self, align_answer: Align, stream: int, output: Any) -> list[Any]:
        """What is wanted of each answer to one request."""
        delivered = []
        for answer in output.outputs:
            aligned = align_answer(stream, output, answer)
            if aligned is None:
                aligned = align_nothing(output.prompt_token_ids, answer.token_ids)
            if aligned.missing:
                self._note_loss(aligned, output)
            delivered.append(self._wish.grant(aligned))
            self._num_rows += aligned.num_rows
        if self._bar is not None:
            self._bar.set_postfix(rows=self._num_rows, lost=self._num_lost, refresh=False)
            self._bar.update()
        return delivered

    def _note_loss(self, aligned: Scores, output: Any) -> None:
        self._num_lost += aligned.missing
        if self._wish.on_loss == "keep":
            return
        lost = f"{aligned.missing} of {len(aligned.token_ids)}"
        why = _OVERWRITTEN if self._losses is None else _say_losses(self._losses)
        raise RowsLostError(f"{lost} rows of request {output.request_id!r} {why}")

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _open_bar(total: int) -> Any:
    from tqdm.auto import tqdm  # type: ignore[import-untyped]  # vLLM needs it too

    return tqdm(total=total, desc="Scores", unit="request", dynamic_ncols=True)


def _say_losses(losses: SpoolLosses) -> str:
    reason = losses.reason or "the process that keeps scores was too slow, or was started again"
    return (
        f"were lost: {losses.records} records were overwritten before they were read, "
        f"{losses.rows} rows were not written, {losses.dropped} made room for newer ones; {reason}"
    )
