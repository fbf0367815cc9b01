"""Everything that serving can ask of a GPU, and what Triton compiles and loads meanwhile.

Runs in the engine's process, like all of tests/engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import clairai
from tests.engine.asks import generate
from tests.engine.models import random_prompts

POINTS: Final = ("post_block.3", "post_block.20")
ENCODERS: Final = ("raw", "full8", "rp8", "topk8", "fp8", "int4")
# Lengths of prompts: a single token, the multiples of 16 that Triton compiles kernels of their own
# for, neighbours of them, batches between the sizes of the graphs, prompts in several chunks, and
# steps of more tokens than graphs have, in each kernel that scores such.
BATCHES: Final = (
    *((1,), (16,) * 16, (17, 3, 40), (1,) * 5, (33,) * 70, (900, 2500), (64,) * 200),
    *((3,) * 230, (200,) * 60),
)
OPS: Final[tuple[Mapping[str, Any], ...]] = (
    {"vector": "v", "scale": 0.1},
    {"vector": "v", "scale": 0.1, "match_norm": True},
    {"vector": "v", "op": "ablate"},
    {"vector": "v", "op": "clamp", "low": -1, "high": 1},
    {"vector": "v", "op": "replace", "scale": 0.1, "when": "generation"},
    {"vector": "v", "scale": 0.1, "gate": {"probe": "p0", "threshold": 0.1, "release": 0.05}},
)


def watch(_llm: Any) -> list[str]:
    """The names of the kernels that Triton compiles from now on, or loads if they are ours.

    A kernel that is compiled and not loaded still makes its first launch wait, for a launcher.
    vLLM's own V1 runner leaves one of its kernels so (0.32).
    """
    import triton

    ours, noted = own_kernels(), list[str]()

    def note_compiled(*, fn: Any, **_: Any) -> None:
        noted.append(f"compiled {fn.name}")

    def note_loaded(_module: Any, _function: Any, name: str, *_: Any) -> None:
        if name in ours:
            noted.append(f"loaded {name}")

    triton.knobs.runtime.jit_post_compile_hook = note_compiled
    triton.knobs.runtime.kernel_load_end_hook = note_loaded
    return noted


def own_kernels() -> set[str]:
    import triton

    modules = [one for name, one in sys.modules.items() if name.startswith("clairai.engine.")]
    values = [value for module in modules for value in vars(module).values()]
    return {one.__name__ for one in values if isinstance(one, triton.runtime.jit.JITFunction)}


def compiled_by_traffic(llm: Any) -> dict[str, list[str]]:
    """What was compiled for each kind of request, in the order in which a new engine meets them."""
    compiled = watch(llm)
    found = {}
    for kind, ask in _traffic().items():
        ask(llm)
        found[kind] = compiled.copy()
        compiled.clear()
    return found


def _traffic() -> dict[str, Callable[[Any], None]]:
    return {
        "plain": _plain,
        "new probes": _add_probes,
        "scored": _plain,
        "prompt scores": lambda llm: _ask(llm, prompt_scores=True),
        "new vectors": _add_vectors,
        "steered": _steered,
        "inline vector": lambda llm: _ask(llm, steer=[{"vector": _vector("w"), "scale": 0.1}]),
        "stop rule": lambda llm: _ask(llm, stop=[{"probe": "p0", "threshold": 1e6}]),
        **{f"captured, {name}": _captured(name) for name in ENCODERS},
        "captured, prompts": lambda llm: _ask(llm, capture={"positions": "prompt"}),
        "changed probes": _change_probes,
        "scored again": _plain,
    }


def _ask(llm: Any, **fields: Any) -> None:
    for lengths in BATCHES:
        prompts = random_prompts(1, lengths, 30_000)
        generate(llm, prompts, max_tokens=6, extra=clairai.request(**fields))


def _plain(llm: Any) -> None:
    for lengths in BATCHES:
        generate(llm, random_prompts(1, lengths, 30_000), max_tokens=6)


def _steered(llm: Any) -> None:
    for op in OPS:
        _ask(llm, steer=[op])


def _captured(encoder: str) -> Callable[[Any], None]:
    return lambda llm: _ask(llm, capture={"encoder": encoder})


def _add_probes(llm: Any) -> None:
    names = [f"p{at}" for at in range(16)]
    bank = clairai.ProbeBank(llm)
    for point in POINTS:
        bank.add(*(_probe(name if point == POINTS[0] else f"{name}b", point) for name in names))


def _change_probes(llm: Any) -> None:
    bank = clairai.ProbeBank(llm)
    bank.redirect(["p1", "p2"], np.stack([_row(3), _row(4)]))
    bank.replace(_probe("p3", POINTS[1]))
    bank.remove("p4")


def _add_vectors(llm: Any) -> None:
    clairai.VectorBank(llm).add(_vector("v"))


def _probe(name: str, point: str) -> clairai.Probe:
    return clairai.Probe(name, clairai.Point.parse(point), _row(1), activation="sigmoid")


def _vector(name: str) -> clairai.Vector:
    return clairai.Vector(name, {clairai.Point.parse(point): _row(2) for point in POINTS})


def _row(seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(1024, np.float32) / np.float32(32)
