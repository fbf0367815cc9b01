"""Reads the scores of finished requests, aligned to their tokens.

Runs in: the user's process, as a reader of the ring. Imports no vllm.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clairai.errors import RequestError, RowsLostError
from clairai.library.engine_control import ask_engine
from clairai.match.align import Scores, align
from clairai.match.row_collector import RowCollector
from clairai.ring.attach import RingReader
from clairai.wire import control_messages


def scores(llm: Any, outputs: Sequence[Any]) -> list[list[Scores]]:
    """The scores of finished requests: for each RequestOutput, one Scores per choice.

    They are read from the ring, which holds the newest records only. Raises RowsLostError if any
    row of these requests was overwritten.
    """
    described = ask_engine(llm, control_messages.Describe(), control_messages.Description)
    question = control_messages.FindStreams(tuple(output.request_id for output in outputs))
    found = ask_engine(llm, question, control_messages.Streams)
    known = [
        (stream, output)
        for stream, output in zip(found.streams, outputs, strict=True)
        if stream is not None
    ]
    if len(known) < len(outputs):
        raise RequestError(
            f"{len(outputs) - len(known)} of {len(outputs)} requests are not known to this engine; "
            f"pass the outputs of this LLM's own generate(), soon after it"
        )
    streams = {stream for stream, _ in known}
    collector = _collect_rows(Path(described.socket), streams, found.since)
    return [
        [_align_answer(collector, stream, output, answer) for answer in output.outputs]
        for stream, output in known
    ]


def _collect_rows(socket: Path, streams: set[int], since: int) -> RowCollector:
    # The ring bounds it: what it holds fits in memory.
    collector = RowCollector(only=streams, max_streams=len(streams) + 1, max_rows=sys.maxsize)
    with RingReader.attach(socket, start=since) as reader:
        while records := reader.poll():
            for record in records:
                collector.add(record, reader.bank(record.bank_version))
    return collector


def _align_answer(collector: RowCollector, stream: int, output: Any, answer: Any) -> Scores:
    rows = collector.rows(stream, answer.index)
    aligned = None if rows is None else align(rows, output.prompt_token_ids, answer.token_ids)
    if aligned is None or aligned.missing:
        lost = "all" if aligned is None else f"{aligned.missing} of {len(aligned.token_ids)}"
        raise RowsLostError(
            f"{lost} rows of request {output.request_id!r} were overwritten before they were read; "
            f"raise ring_mib in clairai.config(), or call clairai.scores() after fewer requests"
        )
    return aligned
