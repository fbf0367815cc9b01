"""Takes a running engine; gives what happens where a branch of the graph would join. Runs in it.

A CPU has no branch, so the engine's attentions are not joined: they are here, for a few tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from clairai.compat import model_ops, model_sites
from tests.engine.watching import logprobs


class CountingBranch:
    def __init__(self) -> None:
        self.num_joins = 0

    def fork(self) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self) -> None:
        self.num_joins += 1


def joined(llm: Any, prompts: list[list[int]]) -> tuple[int, list[Any]]:
    """How often the forward waited for its branch, and what it said with every attention joined."""
    branch = CountingBranch()
    with _joined(llm, branch):
        said = logprobs(llm, prompts)
    return branch.num_joins, said


@contextmanager
def _joined(llm: Any, branch: CountingBranch) -> Iterator[None]:
    (undo,) = llm.collective_rpc(_join_all, args=(branch,))
    try:
        yield
    finally:
        for attention, kind, named, before in undo:
            attention.__class__ = kind
            named[model_ops.SIDE_STREAM_NAME] = before


def _join_all(worker: Any, branch: CountingBranch) -> list[Any]:
    config = worker.vllm_config
    sites = model_sites.find_sites(
        worker.model_runner.get_model(),
        num_layers=config.model_config.hf_text_config.num_hidden_layers,
        width=config.model_config.get_hidden_size(),
    )
    named = config.compilation_config.static_forward_context
    before, named[model_ops.SIDE_STREAM_NAME] = named[model_ops.SIDE_STREAM_NAME], branch
    undo = []
    for block in sites.blocks.values():
        attention = model_ops.find_attention(block)
        assert attention is not None
        undo.append((attention, type(attention), named, before))
        model_ops.attach_join(attention, worker.clairai_tables.ran_S.new_zeros(1))
    return undo
