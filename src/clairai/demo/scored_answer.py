"""Asks a running server one question and reads the scores of its answer from the ring.

Runs in: the process of `clairai demo --prompt`, on the engine's machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clairai.errors import RowsLostError
from clairai.fields.request_fields import KEY, new_stream_id, request
from clairai.library.http_client import ServerClient
from clairai.local.private_socket import socket_path
from clairai.match.align import Scores, align
from clairai.match.row_collector import RowCollector
from clairai.ring.attach import RingReader

READ_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True, eq=False)
class ScoredAnswer:
    """One answer: `texts[j]` is generated token j, `scores.generated[j]` its row."""

    texts: tuple[str, ...]
    scores: Scores
    probes: tuple[Mapping[str, Any], ...]  # as GET /v1/probes lists them


def ask_with_scores(
    client: ServerClient, folder: Path, prompt: str, *, max_tokens: int
) -> ScoredAnswer:
    """One greedy chat completion; RowsLostError if a row is missing."""
    engine = client.describe()
    stream = new_stream_id()
    with RingReader.attach(socket_path(folder, int(engine["epoch"], 16)), start="newest") as reader:
        answer = client.chat(_request(engine["model"], prompt, stream, max_tokens))
        choice = answer["choices"][0]
        scores = _read_scores(reader, stream, answer["prompt_token_ids"], choice["token_ids"])
    texts = tuple(token["token"] for token in choice["logprobs"]["content"])
    return ScoredAnswer(texts, scores, tuple(client.probes()["data"]))


def _request(model: str, prompt: str, stream: int, max_tokens: int) -> dict[str, Any]:
    fields = json.dumps(request(stream=stream)[KEY])
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": True,  # gives each token's text
        "return_token_ids": True,
        "vllm_xargs": {KEY: fields},
    }


def _read_scores(
    reader: RingReader, stream: int, prompt_ids: list[int], output_ids: list[int]
) -> Scores:
    """Rows and answer arrive separately: wait for the rows that are still on their way."""
    collector = RowCollector(only=[stream])
    deadline_s = time.monotonic() + READ_TIMEOUT_S
    while time.monotonic() < deadline_s:
        for record in reader.poll():
            collector.add(record, reader.bank(record.bank_version))
        rows = collector.rows(stream)
        if rows is not None:
            scores = align(rows, prompt_ids, output_ids)
            if not scores.missing:
                return scores
        reader.wait(0.1)
    raise RowsLostError(
        f"rows of the answer did not come within {READ_TIMEOUT_S:.0f} s; raise ring_mib, "
        f"or see the engine's log"
    )
