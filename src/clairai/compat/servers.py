"""Takes vLLM's engine client; gives whether other API servers have clients of the same engine."""

from __future__ import annotations

from typing import Any


def is_one_of_many(client: Any) -> bool:
    """`--api-server-count` (config/parallel.py, `_api_process_count`, 0.32:443)."""
    config = getattr(client, "vllm_config", None)
    parallel = getattr(config, "parallel_config", None)
    return int(getattr(parallel, "_api_process_count", 1)) > 1
