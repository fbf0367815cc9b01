"""A toy of vLLM's `LLM` with a real ring, a real spool process and rows that say whose they are.

Every score follows from stream, position and column, so that a row in a wrong place is noticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from clairai.engine.publish.ring_room import RingRoom
from clairai.local.private_socket import socket_path
from clairai.ring.layout import RingShape
from clairai.settings import SpoolSettings
from clairai.spool.client import SpoolClient
from clairai.spool.launch import SpoolLauncher
from clairai.wire import control_messages, ring_messages
from clairai.wire.control_messages import CONTROL_METHOD
from clairai.wire.spool_messages import SOCKET_KIND
from tests.support.ring_engine import Engine, running_engine, until

PROMPT = 3  # tokens of every prompt
FIRST_STREAM = 1000


def tokens_of(streams: Any, positions: Any) -> Any:
    return (streams * 31 + positions * 7) % 50_000


def scores_of(streams: Any, positions: Any, num_columns: int) -> NDArray[np.float32]:
    """Exact in float32: no two rows of 4096 requests are alike."""
    row = streams % 4096 * 4096 + positions
    return np.asarray(row[:, None] + np.arange(num_columns) / 8192, np.float32)


def output_of(stream: int, num_tokens: int) -> Output:
    tokens = tokens_of(stream, np.arange(PROMPT + num_tokens)).tolist()
    answer = Answer(0, tuple(tokens[PROMPT:]))
    return Output(f"request-{stream}", tuple(tokens[:PROMPT]), (answer,))


def expected_of(output: Output, num_columns: int) -> NDArray[np.float32]:
    """What `clairai.scores` must give: a row for each token but the last."""
    stream = int(output.request_id.split("-")[1])
    positions = np.arange(PROMPT + len(output.outputs[0].token_ids))
    scores_NP = scores_of(np.full(len(positions), stream), positions, num_columns)
    scores_NP[-1] = np.nan
    return scores_NP


@dataclass(frozen=True)
class Answer:
    """As vLLM's CompletionOutput."""

    index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Output:
    """As vLLM's RequestOutput."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Answer, ...]
    finished: bool = True


@dataclass
class SpooledLlm:
    """Requests that decode together, a row each in every step."""

    engine: Engine
    spool: SpoolLauncher
    room: RingRoom
    num_columns: int
    bank_version: int = 1
    num_requests: int = 0
    keeps_scores: bool = True
    _first_records: dict[str, int] = field(default_factory=dict)

    @property
    def published(self) -> int:
        return self.engine.writer.statistics().published

    def generate(self, num_requests: int, num_tokens: int, *, batch: int = 64) -> list[Output]:
        """Answer requests of `num_tokens` tokens, `batch` at a time."""
        outputs: list[Output] = []
        while len(outputs) < num_requests:
            outputs += self._answer(min(batch, num_requests - len(outputs)), num_tokens)
        return outputs

    def _answer(self, batch: int, num_tokens: int) -> list[Output]:
        streams = [FIRST_STREAM + self.num_requests + index for index in range(batch)]
        self.num_requests += batch
        for stream in streams:
            self._first_records[f"request-{stream}"] = self.published
            self.forward([(stream, at) for at in range(PROMPT)])
        for position in range(PROMPT, PROMPT + num_tokens - 1):
            self.forward([(stream, position) for stream in streams])
        return [output_of(stream, num_tokens) for stream in streams]

    def add_request(self, stream: int, num_tokens: int) -> Output:
        """A request whose rows were forwarded by hand."""
        self._first_records[f"request-{stream}"] = 0
        return output_of(stream, num_tokens)

    def forward(self, tokens: Sequence[tuple[int, int]]) -> None:
        """One step with a row of each (stream, position), when the ring has room for it."""
        streams, positions = np.array(tokens, np.int64).T
        rows = np.zeros(len(tokens), ring_messages.ROW)
        rows["stream"], rows["position"], rows["span"] = streams, positions, 1
        is_prompt = positions < PROMPT
        rows["phase"] = np.where(is_prompt, ring_messages.PREFILL, ring_messages.DECODE)
        rows["token_id"] = tokens_of(streams, positions)
        scores_RC = scores_of(streams, positions, self.num_columns)
        num_records = self.engine.writer.count_records(*scores_RC.shape)
        self.room.find_limit(self.published, num_records)
        self.engine.writer.publish(rows, scores_RC, bank_version=self.bank_version, step=0)

    def connect(self) -> SpoolClient:
        """To the spool, once it is there."""
        folder = self.engine.server.path.parent
        path = socket_path(folder, self.engine.epoch, SOCKET_KIND)
        until(path.exists)
        return SpoolClient.connect(folder, self.engine.epoch, WeakValueDictionary())

    def collective_rpc(self, method: str, args: tuple[bytes]) -> list[bytes]:
        """As of a worker with taps."""
        assert method == CONTROL_METHOD
        control = msgspec.msgpack.decode(args[0], type=control_messages.Control)
        if isinstance(control, control_messages.Describe):
            return [msgspec.msgpack.encode(self._describe())]
        assert isinstance(control, control_messages.FindStreams)
        firsts = [self._first_records.get(one) for one in control.request_ids]
        streams = tuple(
            None if first is None else int(request_id.split("-")[1])
            for request_id, first in zip(control.request_ids, firsts, strict=True)
        )
        since = min((first for first in firsts if first is not None), default=0)
        return [msgspec.msgpack.encode(control_messages.Streams(streams, since, self.published))]

    def _describe(self) -> control_messages.Description:
        return control_messages.Description(
            socket=str(self.engine.server.path),
            epoch=self.engine.epoch,
            model="toy",
            width=8,
            points=("post_block.0",),
            capacity=16,
            published=self.published,
            keeps_scores=self.keeps_scores and self.spool.ensure_running(),
        )


@contextmanager
def spooled_llm(
    folder: Path,
    *,
    num_columns: int = 4,
    ring_nbytes: int = 1 << 20,
    settings: SpoolSettings | None = None,
) -> Iterator[SpooledLlm]:
    """An engine with a spool, both of which end with this context."""
    shape = RingShape.for_budget(ring_nbytes, num_columns)

    def bank_of(version: int) -> ring_messages.Bank:
        probes = (ring_messages.ProbeInfo(f"p{at}", "post_block.0") for at in range(num_columns))
        return ring_messages.Bank(version, tuple(probes))

    with ExitStack() as opened:
        engine = opened.enter_context(running_engine(folder, shape=shape, bank_of=bank_of))
        kept = settings or SpoolSettings(folder=str(folder))
        spool = SpoolLauncher(engine.server.path, kept)
        opened.callback(spool.close)
        opened.callback(engine.server.close)  # first: the spool ends when the engine hangs up
        yield SpooledLlm(engine, spool, RingRoom(shape, spool), num_columns)
