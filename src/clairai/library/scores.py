"""Reads the scores of finished requests, aligned to their tokens.

Runs in: the user's process. The rows come from the engine's spool, which has read them while the
engine worked; without a spool, from the ring. Imports no vllm.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

from clairai.errors import EngineGoneError, RequestError, RowsLostError
from clairai.library.engine_control import ask_engine
from clairai.match.align import Scores, align
from clairai.match.row_collector import RowCollector
from clairai.match.stored_rows import StoredBlock, StoredColumns, align_stored, find_answers
from clairai.ring.attach import RingReader
from clairai.spool.client import Segments, SpoolClient, SpoolContents
from clairai.wire import control_messages
from clairai.wire.spool_messages import SpoolLosses

START_S: Final = 30.0  # for a spool that has just been started
START_PAUSE_S: Final = 0.02
_SEGMENTS: Final = "_clairai_segments"
_OVERWRITTEN: Final = (
    "were overwritten before they were read; keep them with scores=True in clairai.config(), "
    "raise ring_mib, or call clairai.scores() after fewer requests"
)


def scores(llm: Any, outputs: Sequence[Any]) -> list[list[Scores]]:
    """The scores of finished requests: for each RequestOutput, one Scores per choice.

    All of them, however many: they lie on disk, and are read when you look at them. Raises
    RowsLostError if any row of these requests was lost.
    """
    described = ask_engine(llm, control_messages.Describe(), control_messages.Description)
    found = ask_engine(llm, _question(outputs), control_messages.Streams)
    requests = _Requests(outputs, _known_streams(found, outputs), found.since, described.published)
    if described.keeps_scores:
        with _connect(described, _mapped_segments(llm)) as client:
            return _read_spool(client, requests)
    return _read_ring(Path(described.socket), requests)


@dataclass(frozen=True)
class _Requests:
    """Requests whose scores are wanted, and the records that their rows are in."""

    outputs: Sequence[Any]
    streams: Sequence[int]
    since: int
    until: int


def _question(outputs: Sequence[Any]) -> control_messages.FindStreams:
    return control_messages.FindStreams(tuple(output.request_id for output in outputs))


def _known_streams(found: control_messages.Streams, outputs: Sequence[Any]) -> list[int]:
    known = [stream for stream in found.streams if stream is not None]
    if len(known) < len(outputs):
        raise RequestError(
            f"{len(outputs) - len(known)} of {len(outputs)} requests are not known to this engine; "
            f"pass the outputs of this LLM's own generate(), soon after it"
        )
    return known


def _mapped_segments(llm: Any) -> Segments:
    """Kept on the LLM object, so that all scores of an engine share what they map."""
    found: Segments | None = vars(llm).get(_SEGMENTS)
    return vars(llm).setdefault(_SEGMENTS, WeakValueDictionary()) if found is None else found


def _connect(described: control_messages.Description, segments: Segments) -> SpoolClient:
    """A spool that died was started again when the engine was asked: wait for it."""
    folder, deadline_s = Path(described.socket).parent, time.monotonic() + START_S
    while True:
        try:
            return SpoolClient.connect(folder, described.epoch, segments)
        except EngineGoneError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(START_PAUSE_S)


def _read_spool(client: SpoolClient, requests: _Requests) -> list[list[Scores]]:
    contents = client.read(requests.since, requests.until)
    blocks = _blocks(contents)
    answers = find_answers(blocks, requests.streams)

    @functools.cache
    def columns_of(version: int) -> StoredColumns:
        bank = client.bank(version)
        return StoredColumns(bank.names, bank.weights)

    def align_answer(stream: int, output: Any, answer: Any) -> Scores | None:
        rows = answers.get((stream, answer.index))
        if rows is None:
            return None
        return align_stored(rows, blocks, columns_of, output.prompt_token_ids, answer.token_ids)

    return [
        [
            _require_whole(align_answer(stream, output, answer), output, contents.losses)
            for answer in output.outputs
        ]
        for stream, output in zip(requests.streams, requests.outputs, strict=True)
    ]


def _blocks(contents: SpoolContents) -> list[StoredBlock]:
    return [
        StoredBlock(one.index["row"], one.index["bank"], one.view.scores_RC[one.first_row :])
        for one in contents.found
    ]


def _read_ring(socket: Path, requests: _Requests) -> list[list[Scores]]:
    # The ring bounds it: what it holds fits in memory.
    streams = set(requests.streams)
    collector = RowCollector(only=streams, max_streams=len(streams) + 1, max_rows=sys.maxsize)
    with RingReader.attach(socket, start=requests.since) as reader:
        while records := reader.poll():
            for record in records:
                collector.add(record, reader.bank(record.bank_version))
    return [
        [
            _require_whole(_align_answer(collector, stream, output, answer), output, None)
            for answer in output.outputs
        ]
        for stream, output in zip(requests.streams, requests.outputs, strict=True)
    ]


def _align_answer(collector: RowCollector, stream: int, output: Any, answer: Any) -> Scores | None:
    rows = collector.rows(stream, answer.index)
    return None if rows is None else align(rows, output.prompt_token_ids, answer.token_ids)


def _require_whole(aligned: Scores | None, output: Any, losses: SpoolLosses | None) -> Scores:
    """`losses` are those of the spool; None if the rows come from the ring."""
    if aligned is not None and not aligned.missing:
        return aligned
    lost = "all" if aligned is None else f"{aligned.missing} of {len(aligned.token_ids)}"
    why = _OVERWRITTEN if losses is None else _say_losses(losses)
    raise RowsLostError(f"{lost} rows of request {output.request_id!r} {why}")


def _say_losses(losses: SpoolLosses) -> str:
    reason = losses.reason or "the process that keeps scores was too slow, or was started again"
    return (
        f"were lost: {losses.records} records were overwritten before they were read, "
        f"{losses.rows} rows were not written, {losses.dropped} made room for newer ones; {reason}"
    )
