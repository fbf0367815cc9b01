"""Joins the attentions of a running engine and counts the joins; runs in the engine's process.

A CPU has no side stream, so its engine joins nothing by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from clairai.compat import model_ops, model_sites
from tests.engine.watching import logprobs


class CountingSideStream:
    def __init__(self) -> None:
        self.num_joins = 0

    def fork(self) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self) -> None:
        self.num_joins += 1


def joined(llm: Any, prompts: list[list[int]]) -> tuple[int, list[Any]]:
    """How often the forward joined the side stream, and the logprobs it then gave."""
    side_stream = CountingSideStream()
    with _joined(llm, side_stream):
        found = logprobs(llm, prompts)
    return side_stream.num_joins, found


@contextmanager
def _joined(llm: Any, side_stream: CountingSideStream) -> Iterator[None]:
    (undo,) = llm.collective_rpc(_join_all, args=(side_stream,))
    try:
        yield
    finally:
        for attention, kind, named, before in undo:
            attention.__class__ = kind
            named[model_ops.SIDE_STREAM_NAME] = before


def _join_all(worker: Any, side_stream: CountingSideStream) -> list[Any]:
    config = worker.vllm_config
    sites = model_sites.find_sites(
        worker.model_runner.get_model(),
        num_layers=config.model_config.hf_text_config.num_hidden_layers,
        width=config.model_config.get_hidden_size(),
    )
    named = config.compilation_config.static_forward_context
    before, named[model_ops.SIDE_STREAM_NAME] = named[model_ops.SIDE_STREAM_NAME], side_stream
    undo = []
    for block in sites.blocks.values():
        attention = model_ops.find_attention(block)
        assert attention is not None
        undo.append((attention, type(attention), named, before))
        model_ops.attach_join(attention, worker.clairai_tables.ran_S.new_zeros(1))
    return undo
