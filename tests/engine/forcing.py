"""A logits processor as a user of vLLM writes one: it forces the token that a request names."""

from __future__ import annotations

from typing import Any

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from tests.engine.sampling import FORCED_KEY


class ForceToken(AdapterLogitsProcessor):  # type: ignore[misc]  # vllm is Any where it is missing
    """Reads `extra_args`, where the fields of clairai are, too."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        token = (params.extra_args or {}).get(FORCED_KEY)
        if token is None:
            return None

        def force(_output_ids: list[int], logits_V: Any) -> Any:
            kept = logits_V[token].item()
            logits_V.fill_(float("-inf"))
            logits_V[token] = kept
            return logits_V

        return force
