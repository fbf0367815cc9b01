"""What compat.block_norms reads in decoder blocks of the installed vLLM.

A program of its own, because importing vLLM warns, logs and takes seconds. No model is built: the
blocks are empty, and every child their forward calls is a stand-in of the right kind.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from torch import nn

from clairai.compat.block_norms import list_calls, read_block_norms
from tests.support.decoder_blocks import ToyNorm


def read_by_name(name: str) -> list[object]:
    """`module.Class`, or `module.Class+flag` with that attribute set."""
    path, _, flag = name.partition("+")
    module, _, kind = path.rpartition(".")
    block = _empty(getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), kind))
    if flag:
        setattr(block, flag, True)
    found = read_block_norms(block)
    return [found.pre_attn, found.post_attn, found.is_fused]


def _empty(kind: type[Any]) -> Any:
    block: Any = object.__new__(kind)
    nn.Module.__init__(block)
    for call in list_calls(kind):
        if not hasattr(block, call.name):
            is_norm = "norm" in call.name or call.name.startswith("ln_")
            setattr(block, call.name, ToyNorm() if is_norm else nn.Identity())
    return block


if __name__ == "__main__":
    print(json.dumps({name: read_by_name(name) for name in sys.argv[1:]}))
