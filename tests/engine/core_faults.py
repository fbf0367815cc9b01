"""A fault that a test plants in one of several engine cores: it steers nothing.

Runs in: the workers, which vLLM makes a subclass of this (`--worker-extension-cls`).
"""

from __future__ import annotations

from typing import Any, Final

from clairai.compat.check_engine import find_core_number

EXTENSION: Final = "tests.engine.core_faults.FaultyWorker"
METHOD: Final = "steer_on_all_cores_but"


class FaultyWorker:
    vllm_config: Any

    def steer_on_all_cores_but(self, core: str) -> int:
        """`core`: its number, or "none". How many sites of this worker do not steer now."""
        named = self.vllm_config.compilation_config.static_forward_context
        sites = [one.site for name, one in named.items() if name.startswith("clairai.steer.")]
        is_faulty = str(find_core_number(self.vllm_config)) == core
        for site in sites:
            vars(site).pop("apply", None)
            if is_faulty:
                site.apply = lambda *_: None
        return len(sites) if is_faulty else 0
