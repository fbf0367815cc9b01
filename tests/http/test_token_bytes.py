"""The engine's route for the bytes of every token, for the tokenizers that models have."""

from __future__ import annotations

import asyncio
import base64
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from clairai.compat.api_server import list_token_bytes
from clairai.errors import UnsupportedError
from clairai.plugin import Endpoint
from clairai.proxy.completions.token_text import TokenTexts
from tests.engine.models import real


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3, Qwen and SmolLM2 are: bytes in an alphabet of their own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: at for at, letter in enumerate(alphabet)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return _fast(made)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2, Gemma and Mistral are: a mark for the space, and bytes by their number."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "▁a": 258}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(parts)
    return _fast(made)


def _fast(made: Tokenizer) -> PreTrainedTokenizerFast:
    made.add_special_tokens([AddedToken("<|im_start|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["level", "fallback"])
@pytest.mark.parametrize("text", ["a", " a", "naïve", "漢字🙂", "<|im_start|>a"])
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    pieces = list_token_bytes(tokenizer)
    ids = tokenizer.encode(text.replace(" ", "▁") if 256 in tokenizer.encode("▁") else text)
    assert b"".join(pieces[token_id] for token_id in ids).decode() == text
    assert "".join(TokenTexts(pieces).decode(ids)) == text


def test_every_token_of_the_demo_model_has_its_bytes() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(real())
    pieces = list_token_bytes(tokenizer)
    assert len(pieces) >= len(tokenizer)
    assert pieces[tokenizer.convert_tokens_to_ids("<|im_start|>")] == b"<|im_start|>"
    ids = tokenizer.encode("Écris « 漢字 » 🙂\n\tfor i in range(3):")
    assert b"".join(pieces[i] for i in ids).decode() == "Écris « 漢字 » 🙂\n\tfor i in range(3):"


def test_a_tokenizer_that_cannot_be_read_is_an_error_that_says_so() -> None:
    with pytest.raises(UnsupportedError, match="SimpleNamespace"):
        list_token_bytes(SimpleNamespace())


def _server(*, is_async: bool, is_disabled: bool = False) -> TestClient:
    """Stock vLLM's order of calls, with an engine that has a tokenizer and no taps."""
    tokenizer = byte_level()

    async def later() -> Any:
        return tokenizer

    app, plugin = FastAPI(), Endpoint()
    plugin.attach_router(app)
    engine = SimpleNamespace(
        vllm_config=SimpleNamespace(additional_config={}),
        get_tokenizer=later if is_async else lambda: tokenizer,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLAIRAI_DISABLE", "1" if is_disabled else "0")
        asyncio.run(plugin.init_state(engine, app.state, Namespace()))
    return TestClient(app)


@pytest.mark.parametrize("is_async", [True, False])
def test_the_route_answers_with_or_without_taps(is_async: bool) -> None:
    server = _server(is_async=is_async)
    answer = server.get("/v1/clairai/tokens")
    tokens = [base64.b64decode(token) for token in answer.json()["tokens"]]
    assert tokens == list_token_bytes(byte_level())
    assert server.get("/v1/clairai").status_code == 404
    assert server.get("/v1/clairai/tokens").content == answer.content


def test_a_disabled_plugin_has_no_route_for_tokens() -> None:
    assert _server(is_async=False, is_disabled=True).get("/v1/clairai/tokens").status_code == 404
