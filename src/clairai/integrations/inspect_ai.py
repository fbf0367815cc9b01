"""Inspect: the model provider `clairai/MODEL`, whose outputs have the scores of their tokens.

Written against inspect-ai 0.3.285. Runs in: the user's process.
"""

from __future__ import annotations

import os
from typing import Any

import anyio.to_thread
from inspect_ai.model import ChatMessage, GenerateConfig, ModelOutput, modelapi
from inspect_ai.model._model_call import ModelCall
from inspect_ai.model._providers.openai_compatible import OpenAICompatibleAPI
from inspect_ai.tool import ToolChoice, ToolInfo

from clairai.integrations.fetch_scores import DEFAULT_URL, HEADER, KEY, TIMEOUT_S, ScoreFetcher

SERVICE = "clairai"  # names its settings too: CLAIRAI_BASE_URL, CLAIRAI_API_KEY


@modelapi(name=SERVICE)
class ClairaiAPI(OpenAICompatibleAPI):
    """As Inspect's `openai-api`; `ModelOutput.metadata["clairai"]` has the scores of the answer.

    `-M probes=a,b` chooses probes, `-M strict=true` makes an answer without scores an error.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008  frozen, and as Inspect has it
        *,
        probes: str | list[str] = "all",
        strict: bool = False,
        scores_timeout: float = TIMEOUT_S,
        **model_args: Any,
    ) -> None:
        super().__init__(
            model_name,
            base_url,
            api_key or os.environ.get("CLAIRAI_API_KEY", "none"),
            config,
            service=SERVICE,
            service_base_url=DEFAULT_URL,
            **model_args,
        )
        self._probes = probes if isinstance(probes, str) else ",".join(probes)
        self._fetcher = ScoreFetcher(
            str(self.base_url), self.api_key, timeout_s=scores_timeout, strict=strict
        )

    def request_headers(self, config: GenerateConfig) -> dict[str, str]:
        return {**super().request_headers(config), HEADER: self._probes}

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput | tuple[ModelOutput | Exception, ModelCall]:
        made = await super().generate(input, tools, tool_choice, config)
        output = made[0] if isinstance(made, tuple) else made
        if isinstance(output, ModelOutput) and output.error is None:
            found = await anyio.to_thread.run_sync(self._fetcher.fetch, output.response_id)
            scores = [found.choice(at).metadata() for at in range(len(output.choices))]
            output.metadata = {**(output.metadata or {}), KEY: scores}
        return made
