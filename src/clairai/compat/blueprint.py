"""Takes what `vllm serve` would take as model; gives its tap sites without loading a weight.

The model is built on torch's meta device: shapes and modules, no memory, a fraction of a second
for any size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from clairai.compat.layers import Sites, find_sites
from clairai.compat.modes import refused_modes


@dataclass(frozen=True)
class Blueprint:
    """What an engine for this model would look like to clairai."""

    architecture: str
    sites: Sites
    refused_modes: tuple[str, ...]


def draw(model: str) -> Blueprint:
    import torch

    # model_executor/model_loader/utils.py initialize_model: 0.26:42, 0.32:74
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    arguments = EngineArgs(
        model=model, skip_tokenizer_init=True, load_format="dummy", enforce_eager=True
    )
    config = arguments.create_engine_config()
    with _alone_in_the_world(config), torch.device("meta"):
        built = initialize_model(config)
    sites = find_sites(
        built,
        num_layers=config.model_config.hf_text_config.num_hidden_layers,
        width=config.model_config.get_hidden_size(),
    )
    return Blueprint(type(built).__name__, sites, tuple(refused_modes(config)))


@contextmanager
def _alone_in_the_world(config: Any) -> Iterator[None]:
    """Layers ask for their parallel group while they are built: one of one.

    distributed/parallel_state.py, 0.26 and 0.32.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state as groups

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        groups.init_distributed_environment(
            1, 0, distributed_init_method=f"file://{folder}/group", local_rank=0, backend="gloo"
        )
        groups.ensure_model_parallel_initialized(1, 1)
        try:
            yield
        finally:
            groups.destroy_model_parallel()
            groups.destroy_distributed_environment()
