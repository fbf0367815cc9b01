"""The engine of a batch run: forwards prompts and captures their rows.

Runs in: the process of `clairai capture run`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from clairai.batch.prompts import Prompt
from clairai.compat import offline_llm as vllm
from clairai.errors import ConfigError, RequestError, StoreStoppedError
from clairai.fields.positions import MessagePosition, Positions, PositionSpan, positions_to_json
from clairai.fields.request_fields import request
from clairai.library.captures import captures
from clairai.library.config import config as build_config
from clairai.library.message_range import message_range
from clairai.points import Point
from clairai.store.codecs.registry import named
from clairai.train.start_engine import explain_start_errors, prepare_environment
from clairai.wire.ring_messages import ROW

COMMIT_S: Final = 600.0
TAGS_MIB: Final = 32  # at least run_job.MAX_BATCH_PROMPTS times row_block.MAX_TAGS_NBYTES


@dataclass(frozen=True)
class BatchCapture:
    """What is captured of every prompt."""

    points: tuple[Point, ...]
    positions: Positions
    encoder: Mapping[str, Any]
    max_tokens: int
    batch_mib: int

    def settings(self, folder: Path) -> dict[str, Any]:
        """The engine's capture setting: rows are never dropped, and committed only by a flush."""
        consumer = {
            "folder": str(folder),
            "policy": "block",
            "commits": "on_flush",
            # Rows that are computed again after a preemption are stored again.
            "shard_mib": min(8 * self.batch_mib + TAGS_MIB, 1 << 20),
        }
        return {
            "consumers": {"fs": consumer},
            "points": [str(point) for point in self.points],
            "positions": "all" if self.names_messages else positions_to_json(self.positions),
            "encoder": dict(self.encoder),
        }

    @property
    def names_messages(self) -> bool:
        """True if the positions differ from prompt to prompt."""
        return any(isinstance(part, MessagePosition) for part in self.positions)

    def nbytes_per_token(self, width: int) -> int:
        """An upper bound: raw rows have at most 4 bytes a value."""
        parameters = {key: value for key, value in self.encoder.items() if key != "name"}
        if self.encoder["name"] == "raw":
            parameters = {"dtype": "float32"}
        encoder = named(self.encoder["name"], parameters)
        return len(self.points) * (encoder.nbytes_per_row(width) + ROW.itemsize)


@dataclass(frozen=True)
class CapturingEngine:
    """One engine and its tokenizer."""

    llm: Any
    tokenizer: Any
    capture: BatchCapture
    max_len: int
    nbytes_per_token: int

    @property
    def batch_nbytes(self) -> int:
        return self.capture.batch_mib << 20

    def num_tokens(self, prompt: Prompt) -> int:
        """ConfigError if the positions cannot be found in the prompt."""
        self._positions(prompt)
        return len(self._ids(prompt))

    def forward(self, prompts: Sequence[Prompt], tags: Sequence[dict[str, Any]]) -> None:
        ids = [self._ids(prompt) for prompt in prompts]
        wanted = [
            {"tags": tags_, **self._positions(prompt)}
            for prompt, tags_ in zip(prompts, tags, strict=True)
        ]
        extra = [request(capture=one) for one in wanted]
        outputs = vllm.generate_answers(self.llm, ids, self.capture.max_tokens, extra)
        for prompt, found in zip(
            prompts, captures(self.llm, outputs, timeout_s=COMMIT_S), strict=True
        ):
            bad = next((one for one in found if one.state != "kept" or one.lost), None)
            if bad is not None:
                why = f"{bad.lost} are lost" if bad.lost else f"{bad.state}, {bad.reason}"
                raise StoreStoppedError(f"rows of line {prompt.number} are not safe: {why}")
            if not sum(one.report.rows for one in found):
                raise ConfigError(
                    f"line {prompt.number} has no token at these positions; leave the line out, or "
                    "name others"
                )

    def _positions(self, prompt: Prompt) -> dict[str, Any]:
        """The `positions` of the request, where they differ from prompt to prompt."""
        if not self.capture.names_messages:
            return {}
        chat = msgspec.to_builtins(prompt.content.messages)
        try:
            found = [
                PositionSpan(*message_range(self.tokenizer, chat, part.index))
                if isinstance(part, MessagePosition)
                else part
                for part in self.capture.positions
            ]
        except RequestError as error:
            raise ConfigError(f"line {prompt.number}: {error.reason}") from None
        return {"positions": positions_to_json(tuple(found))}

    def _ids(self, prompt: Prompt) -> list[int]:
        line = prompt.content
        if line.prompt_token_ids:
            return list(line.prompt_token_ids)
        if line.prompt is not None:
            return list(self.tokenizer.encode(line.prompt))
        chat = msgspec.to_builtins(line.messages)
        encoded = self.tokenizer.apply_chat_template(
            chat, tokenize=True, add_generation_prompt=True, return_dict=True
        )
        return list(encoded["input_ids"])


@contextmanager
def start_engine(
    model: str, folder: Path, capture: BatchCapture, arguments: Mapping[str, Any]
) -> Iterator[CapturingEngine]:
    """An engine that captures into the folder, for the `with` block."""
    with explain_start_errors(model):
        about = vllm.read_model_shape(model, arguments)
    with tempfile.TemporaryDirectory(prefix="clairai-") as runtime:  # no reader finds it there
        config = build_config(
            points=[str(point) for point in capture.points],
            capture=capture.settings(folder),
            capacity=1,
            ring_mib=1,
            scores=False,
            runtime_dir=runtime,
        )
        # As fast as it goes: compiled, with the prefix cache for positions that are not captured.
        chosen = {"enforce_eager": False, "enable_prefix_caching": True} | dict(arguments)
        with explain_start_errors(model):
            started = vllm.start_llm(model, config, chosen)
        try:
            nbytes = capture.nbytes_per_token(about.width)
            tokenizer = started.get_tokenizer()
            yield CapturingEngine(started, tokenizer, capture, about.max_len, nbytes)
        finally:
            vllm.stop_llm(started)


def describe_model(model: str, arguments: Mapping[str, Any]) -> vllm.ModelShape:
    """What is known without the weights. Sets the environment that vLLM reads on import."""
    prepare_environment()
    with explain_start_errors(model):
        return vllm.read_model_shape(model, arguments)
