"""Reports which points of a model can be tapped, without loading a weight.

The model is built on torch's meta device: shapes and modules without memory, in a fraction of a
second for any size. Runs in: `clairai doctor`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from clairai.compat.check_engine import check_version, list_refused_modes, vllm_version
from clairai.compat.model_sites import find_sites
from clairai.errors import ClairaiError, UnsupportedError
from clairai.points import Point


@dataclass(frozen=True)
class DoctorReport:
    """Whether each point can be tapped, and what rules out all of them."""

    title: str
    verdicts: tuple[tuple[Point, str], ...]  # the reason is empty where the point is served
    problems: tuple[str, ...]

    def lines(self) -> Iterator[tuple[str, str, str]]:
        """(point, verdict, reason), in path order."""
        for point, reason in self.verdicts:
            yield str(point), "refused" if reason else "served", reason

    @property
    def summary(self) -> str:
        served = sum(not reason for _, reason in self.verdicts)
        return f"{served} of {len(self.verdicts)} points can be tapped"


def diagnose(model: str) -> DoctorReport:
    """Build what `vllm serve` would build of `model`, in this process, and look at every point."""
    version = vllm_version()
    try:
        check_version(version, allow_untested=False)
        return _inspect(model, version)
    except UnsupportedError as error:
        return DoctorReport(f"{model} on vLLM {version}", (), (error.reason,))
    except ClairaiError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"vLLM {version} cannot build {model}: {type(error).__name__}: {error}; "
            f"`vllm serve {model}` would fail in the same way"
        ) from error


def _inspect(model: str, version: str) -> DoctorReport:
    module, config = _build(model)
    sites = find_sites(
        module,
        num_layers=config.model_config.hf_text_config.num_hidden_layers,
        width=config.model_config.get_hidden_size(),
    )
    title = (
        f"{model}: {type(module).__name__}, {sites.num_layers} layers, "
        f"width {sites.width}, vLLM {version}"
    )
    problems = list_refused_modes(config)
    if not sites.site_of:
        problems.append("no point of this architecture can be tapped")
    points = sorted([*sites.site_of, *sites.refused])
    verdicts = tuple((point, sites.refused.get(point, "")) for point in points)
    return DoctorReport(title, verdicts, tuple(problems))


def _build(model: str) -> tuple[Any, Any]:
    """The model's modules without weights, and its VllmConfig."""
    import torch

    # model_executor/model_loader/utils.py initialize_model: 0.26:42, 0.32:74
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    arguments = EngineArgs(
        model=model, skip_tokenizer_init=True, load_format="dummy", enforce_eager=True
    )
    config = arguments.create_engine_config()
    with _single_rank(config), torch.device("meta"):
        return initialize_model(config), config


@contextmanager
def _single_rank(config: Any) -> Iterator[None]:
    """Layers ask for their parallel group while they are built: give them a group of one.

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
