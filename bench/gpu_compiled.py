"""What vLLM compiled, saved and loaded while it started; runs in the worker."""

from __future__ import annotations

from typing import Any


def counts(_worker: Any) -> dict[str, int]:
    """compilation/counter.py, 0.26 and 0.32; a piece is what lies between two attentions."""
    from vllm.compilation.counter import compilation_counter as seen

    return {
        "pieces": seen.num_backend_compilations,
        "saved": seen.num_compiled_artifacts_saved,
        "loaded": seen.num_compiled_artifacts_loaded,
        "models_compiled": seen.num_aot_compiles,
        "models_loaded": seen.num_aot_artifacts_loaded,
    }
