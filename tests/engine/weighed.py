"""What tests of new weights ask of an LLM in its own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

TOKENS: Final = 24
SUBJECTS: Final = ("a river", "two ships", "the sea", "my house", "old books", "rain", "he", "7, 8")


def prompts(count: int) -> list[str]:
    return [f"Once upon a time there was {subject}" for subject in SUBJECTS[:count]]


def perturb(folder: Path, target: Path, *, seed: int = 5, strength: float = 0.3) -> Path:
    """A model like the given one, each number changed by some: its answers are others."""
    import shutil

    import numpy as np
    from safetensors.numpy import load_file, save_file

    shutil.copytree(folder, target)
    rng = np.random.default_rng(seed)
    weights = {
        name: (value * (1 + strength * rng.standard_normal(value.shape))).astype(value.dtype)
        for name, value in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def answers(llm: Any, asked: list[str]) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and their log-probabilities, to the last bit."""
    from vllm import SamplingParams

    given = SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=0, ignore_eos=True)
    outputs = [output.outputs[0] for output in llm.generate(asked, given, use_tqdm=False)]
    return [(list(output.token_ids), _logprobs(output)) for output in outputs]


def _logprobs(output: Any) -> list[float]:
    pairs = zip(output.token_ids, output.logprobs, strict=True)
    return [one[token].logprob for token, one in pairs]


def pushed(folder: Path, url: str, key: str, *more: str) -> str:
    """What the command line says."""
    import os
    import subprocess
    import sys

    command = [sys.executable, "-m", "clairai.cli", "weights", "push", str(folder), "--to", url]
    environment = os.environ | {"CLAIRAI_API_KEY": key}
    return subprocess.run(
        [*command, *more], env=environment, capture_output=True, text=True, check=True
    ).stdout


def vector() -> Any:
    """One row, at a point that the server taps."""
    import numpy as np

    from clairai.points import Point
    from clairai.vector.model import Vector

    row_D = np.linspace(-1, 1, 576, dtype=np.float32)
    return Vector("calm", {Point("post_block", 3): row_D})


def held(folder: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    found: dict[str, Any] = load_file(folder / "model.safetensors")
    return found


def misfits(folder: Path) -> list[dict[str, Any]]:
    """Checkpoints that this model cannot take: each wrong in one way."""
    whole = held(folder)
    name = next(iter(whole))
    half = "model.layers.0.self_attn.k_proj.weight"  # vLLM's layer has q and v, too
    return [
        {key: value for key, value in whole.items() if key != half},
        whole | {name: whole[name][:-1]},
        whole | {name: whole[name].astype("float64")},
        whole | {"model.layers.99.extra": whole[name]},
    ]
