"""Reports which points of a model can be tapped, without loading a weight.

The model's weights are built on torch's meta device: shapes without memory, in a fraction of a
second for any size. What a model computes while it is built (slopes of ALiBi, rotary angles) is
real. Runs in: `clairai doctor`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from clairai.compat.check_engine import (
    check_version,
    find_refused_device,
    list_refused_modes,
    vllm_version,
)
from clairai.compat.count_layers import count_layers
from clairai.compat.model_sites import find_sites
from clairai.errors import UnsupportedError, printable
from clairai.points import Point

VERIFIED: Final = Path(__file__).parent / "verified_models.json"


@dataclass(frozen=True)
class DoctorReport:
    """Whether each point can be tapped, and what rules out all of them."""

    title: str
    verdicts: tuple[tuple[Point, str], ...]  # the reason is empty where the point is served
    problems: tuple[str, ...]
    evidence: str = ""  # what is known of the values that are read there

    def lines(self) -> Iterator[tuple[str, str, str]]:
        """(point, verdict, reason), in path order."""
        for point, reason in self.verdicts:
            yield str(point), "refused" if reason else "served", reason

    @property
    def summary(self) -> str:
        served = sum(not reason for _, reason in self.verdicts)
        return f"{served} of {len(self.verdicts)} points can be tapped"


def diagnose(
    model: str, arguments: Sequence[str] = (), *, allow_untested: bool = False
) -> DoctorReport:
    """Build what `vllm serve` would build of `model`, in this process, and look at every point.

    `arguments` are further ones of `vllm serve`. A release outside the tested range is a problem
    of the report unless `allow_untested`; the points are looked at either way.
    """
    version = vllm_version()
    problems: list[str] = []
    try:
        check_version(version, allow_untested=allow_untested)
    except UnsupportedError as error:
        problems.append(error.reason)
    try:
        report = _inspect(model, _make_config(model, arguments, version), version)
    except UnsupportedError as error:
        return DoctorReport(f"{model} on vLLM {version}", (), (*problems, error.reason))
    return replace(report, problems=(*problems, *report.problems))


def _inspect(model: str, config: Any, version: str) -> DoctorReport:
    module = _build(model, config, version)
    sites = find_sites(
        module,
        num_layers=count_layers(config.model_config),
        width=config.model_config.get_hidden_size(),
        dtype=config.model_config.dtype,
    )
    title = (
        f"{model}: {type(module).__name__}, {sites.num_layers} layers, "
        f"width {sites.width}, vLLM {version}"
    )
    problems = list_refused_modes(config)
    if refused_device := find_refused_device():
        problems.append(refused_device)
    if not sites.site_of:
        problems.append("no point of this architecture can be tapped")
    points = sorted([*sites.site_of, *sites.refused])
    verdicts = tuple((point, sites.refused.get(point, "")) for point in points)
    evidence = describe_evidence(config.model_config.architectures[0])
    return DoctorReport(title, verdicts, tuple(problems), evidence)


class VerifiedModels(msgspec.Struct, frozen=True):
    """What `make models` has shown, as docs/models.md has it."""

    vllm: str
    worst_errors: dict[str, float]  # against Hugging Face
    equal_to_blocks: tuple[str, ...]  # to vLLM's own, where Hugging Face is no measure


def describe_evidence(architecture: str) -> str:
    """What a tiny model of this architecture has shown."""
    known = msgspec.json.decode(VERIFIED.read_bytes(), type=VerifiedModels)
    name, release = printable(architecture), f"on vLLM {known.vllm}"
    if architecture in known.worst_errors:
        error = known.worst_errors[architecture]
        return f"{name}: values held against Hugging Face {release}, worst error {error:.1e}"
    if architecture in known.equal_to_blocks:
        return f"{name}: values equal to those of vLLM's own blocks {release}"
    return f"{name}: values not verified; its points were found by reading its code"


def _make_config(model: str, arguments: Sequence[str], version: str) -> Any:
    """vLLM's own config for these arguments of `vllm serve`.

    EngineArgs.add_cli_args, from_cli_args: engine/arg_utils.py, 0.26 and 0.32
    FlexibleArgumentParser: utils/argparse_utils.py, 0.26 and 0.32
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    ours = ["--skip-tokenizer-init", "--load-format", "dummy", "--enforce-eager"]
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm serve"))
    given = parser.parse_args(["--model", model, *arguments, *ours])
    try:
        return EngineArgs.from_cli_args(given).create_engine_config()
    except Exception as error:
        raise UnsupportedError(
            f"vLLM {version} makes no config for {model}: {type(error).__name__}: {error}; "
            f"`vllm serve {model}` would fail in the same way"
        ) from error


def _build(model: str, config: Any, version: str) -> Any:
    """The model's modules without weights."""
    # model_executor/model_loader/utils.py initialize_model: 0.26:42, 0.32:74
    from vllm.model_executor.model_loader.utils import initialize_model

    try:
        with _single_rank(config), _memoryless_weights():
            return initialize_model(config)
    except Exception as error:
        raise UnsupportedError(
            f"vLLM {version} did not build {model} without its weights: "
            f"{type(error).__name__}: {error}; `vllm serve {model}` may: with the clairai key it "
            "says at start-up which points it cannot serve"
        ) from error


def _memoryless_weights() -> Any:
    """Within it, tensors that nobody has filled are on the meta device: they are the weights."""
    import torch
    from torch.overrides import TorchFunctionMode

    class MemorylessWeights(TorchFunctionMode):  # type: ignore[misc]  # torch is Any to mypy
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            is_empty = function in (torch.empty, torch.empty_strided, torch.Tensor.new_empty)
            return function(*args, **{**(kwargs or {}), **({"device": "meta"} if is_empty else {})})

    return MemorylessWeights()


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
