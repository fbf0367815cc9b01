"""Takes a model; gives a table of its tap points: served, or why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from clairai.compat.blueprint import Blueprint, draw
from clairai.compat.version import check_version, vllm_version
from clairai.errors import ClairaiError, UnsupportedError
from clairai.points import Point


@dataclass(frozen=True)
class Report:
    """The fate of every point, and what stands in the way of all of them."""

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


def diagnose(model: str) -> Report:
    """Build the model without weights in this process and look at every point."""
    version = vllm_version()
    try:
        check_version(version, allow_untested=False)
        blueprint = draw(model)
    except UnsupportedError as error:
        return Report(f"{model} on vLLM {version}", (), (error.reason,))
    except ClairaiError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"vLLM {version} cannot build {model}: {type(error).__name__}: {error}; "
            f"`vllm serve {model}` would fail in the same way"
        ) from error
    return _report(model, version, blueprint)


def _report(model: str, version: str, blueprint: Blueprint) -> Report:
    sites = blueprint.sites
    points = sorted([*sites.site_of, *sites.refused])
    title = (
        f"{model}: {blueprint.architecture}, {sites.num_layers} layers, "
        f"width {sites.width}, vLLM {version}"
    )
    problems = list(blueprint.refused_modes)
    if not sites.site_of:
        problems.append("no point of this architecture can be tapped")
    verdicts = tuple((point, sites.refused.get(point, "")) for point in points)
    return Report(title, verdicts, tuple(problems))
