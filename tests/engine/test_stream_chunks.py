"""vLLM's own stream generators write the same bytes with plain chunks as without them."""

from __future__ import annotations

import asyncio
import importlib
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from clairai.compat import stream_chunks
from clairai.compat.stream_chunks import KINDS, ChunkKind, replace_models, write_chunks_plainly

CHAT, COMPLETION = KINDS
PROMPT = [1, 2, 3]
TRICKY = ['"}]}', "\n\t\0\x7f\\", "Füße", "\u2028", "\U0001f600", ""]
TEXTS = [f" token {at}" for at in range(40)] + TRICKY
MODEL, REQUEST_ID = 'a "model"', "cmpl-1"
Write = Callable[..., list[str]]


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    """Imported once; what its packages warn of then is theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in KINDS:
            importlib.import_module(kind.module)


@pytest.fixture(autouse=True)
def _vllms_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names are vLLM's again after each test, and the clock stands still."""
    for kind in KINDS:
        module = importlib.import_module(kind.module)
        for name in names_of(kind):
            assert isinstance(getattr(module, name), type)  # nobody has replaced it before
            monkeypatch.setattr(module, name, getattr(module, name))
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: 1.0))


def names_of(kind: ChunkKind) -> list[str]:
    return [name for name in (kind.chunk, kind.choice, kind.delta) if name is not None]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often vLLM's models were made, by name."""
    counts: Counter[str] = Counter()

    def count(model: type[Any]) -> type[Any]:
        class Counted(model):  # type: ignore[misc]
            def __init__(self, **given: Any) -> None:
                counts[model.__name__] += 1
                super().__init__(**given)

        return Counted

    for kind in KINDS:
        module = importlib.import_module(kind.module)
        for name in names_of(kind):
            monkeypatch.setattr(module, name, count(getattr(module, name)))
    return counts


def outputs(texts: Sequence[str], *, choices: int = 1, logprobs: bool = False) -> list[Any]:
    """What the engine gives for an answer: a step for each token of each choice."""
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput

    steps = []
    for at, text in enumerate(texts):
        for choice in range(choices):
            chances = [{one: Logprob(-0.5, 1, text)} for one in (7, at)] if logprobs else None
            is_last = at == len(texts) - 1
            output = CompletionOutput(
                *(choice, text, [7, at], None, chances), "length" if is_last else None
            )
            prompt = PROMPT if at == 0 else None
            steps.append(RequestOutput("r", "prompt", prompt, None, [output], is_last))
    return steps


async def collect(frames: AsyncIterator[str]) -> list[str]:
    return [frame async for frame in frames]


def server_of(cls: type[Any]) -> Any:
    """vLLM's object that serves an API, with what its generator of streams reads."""
    server = object.__new__(cls)
    vars(server).update(
        response_role="assistant",
        parser_cls=None,
        enable_force_include_usage=False,
        enable_prompt_tokens_details=False,
        enable_per_request_metrics=False,
        enable_log_outputs=False,
        enable_log_deltas=False,
        request_logger=None,
        system_fingerprint="fingerprint",
        return_tokens_as_token_ids=False,
        _include_reasoning_tokens_details=False,
    )
    return server


def write_chat(steps: Sequence[Any], **fields: Any) -> list[str]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    messages = [{"role": "user", "content": "hello"}]
    request = ChatCompletionRequest(model=MODEL, messages=messages, stream=True, **fields)
    tokenizer = SimpleNamespace(decode=str)
    frames = server_of(OpenAIServingChat).chat_completion_stream_generator(
        *(request, replay(steps), REQUEST_ID, MODEL, messages, tokenizer, SimpleNamespace())
    )
    return asyncio.run(collect(frames))


def write_completion(steps: Sequence[Any], **fields: Any) -> list[str]:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    request = CompletionRequest(model=MODEL, prompt="hello", max_tokens=64, stream=True, **fields)

    async def numbered() -> AsyncIterator[tuple[int, Any]]:
        for step in steps:
            yield 0, step

    frames = server_of(OpenAIServingCompletion).completion_stream_generator(
        *(request, [{}], numbered(), REQUEST_ID, 1, MODEL, 1, None, SimpleNamespace())
    )
    return asyncio.run(collect(frames))


async def replay(steps: Sequence[Any]) -> AsyncIterator[Any]:
    for step in steps:
        yield step


TOOL = {"type": "function", "function": {"name": "look"}}
USAGE = {"stream_options": {"include_usage": True}}
ALWAYS_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@pytest.mark.parametrize(
    "fields",
    [{}, {"return_token_ids": True}, USAGE, ALWAYS_USAGE, {**USAGE, "return_token_ids": True}],
    ids=["plain", "token ids", "usage", "usage in each chunk", "token ids and usage"],
)
@pytest.mark.parametrize("write", [write_chat, write_completion])
def test_every_byte_of_a_stream_is_vllms(write: Write, fields: dict[str, Any]) -> None:
    expected = write(outputs(TEXTS), **fields)
    assert expected[-1] == "data: [DONE]\n\n"
    assert '"error"' not in "".join(expected)
    write_chunks_plainly()
    assert write(outputs(TEXTS), **fields) == expected


@pytest.mark.parametrize(
    ("write", "fields", "how"),
    [
        (write_chat, {"n": 2}, {"choices": 2}),
        (write_chat, {"logprobs": True, "top_logprobs": 1}, {"logprobs": True}),
        (write_chat, {"parallel_tool_calls": False}, {}),
        (write_chat, {"tools": [TOOL], "tool_choice": "none"}, {}),
        (write_completion, {"n": 2}, {"choices": 2}),
        (write_completion, {"echo": True}, {}),
    ],
)
def test_less_usual_requests_get_vllms_bytes_too(
    write: Write, fields: dict[str, Any], how: dict[str, Any]
) -> None:
    expected = write(outputs(TEXTS, **how), **fields)
    assert '"error"' not in "".join(expected)
    write_chunks_plainly()
    assert write(outputs(TEXTS, **how), **fields) == expected


@pytest.mark.parametrize("write", [write_chat, write_completion])
def test_no_model_is_made_for_an_ordinary_token(write: Write, made: Counter[str]) -> None:
    write(outputs(TEXTS), return_token_ids=True)
    before = sum(made.values())
    write_chunks_plainly()
    made.clear()
    write(outputs(TEXTS), return_token_ids=True)
    assert before >= 2 * len(TEXTS)
    assert sum(made.values()) <= 12  # the first chunk, the last one, and a template


def test_what_is_set_afterwards_is_written() -> None:
    module = importlib.import_module(CHAT.module)

    def write_changed() -> str:
        delta = module.DeltaMessage(content="a")
        delta.reasoning = "why"
        choice = module.ChatCompletionResponseStreamChoice(
            index=0, delta=delta, logprobs=None, finish_reason=None, token_ids=None
        )
        chunk = module.ChatCompletionStreamResponse(
            id="1", object="chat.completion.chunk", created=1, model="m", choices=[choice]
        )
        written: str = chunk.model_dump_json(exclude_unset=True)
        return written

    expected = write_changed()
    assert '"reasoning":"why"' in expected
    write_chunks_plainly()
    assert write_changed() == expected


def test_streams_with_one_id_do_not_share_a_template() -> None:
    write_chunks_plainly()
    plain, with_ids = (write_chat(outputs(TEXTS), return_token_ids=ids) for ids in (False, True))
    assert '"token_ids":null' in plain[3]
    assert '"token_ids":[7,2]' in with_ids[3]


class BrokenEncoder:
    def encode(self, text: str) -> bytes:
        return repr(text).encode()


def test_models_stay_vllms_if_one_byte_would_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_chunks, "_JSON", BrokenEncoder())
    before = {kind: getattr(importlib.import_module(kind.module), kind.chunk) for kind in KINDS}
    write_chunks_plainly()
    for kind, model in before.items():
        assert getattr(importlib.import_module(kind.module), kind.chunk) is model


def test_a_module_that_uses_isinstance_on_a_model_is_left_alone(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module(CHAT.module)
    module = ModuleType("serving")
    for name in names_of(CHAT):
        setattr(module, name, getattr(real, name))
    source = tmp_path / "serving.py"
    monkeypatch.setattr(module, "__file__", str(source), raising=False)
    source.write_text(f"isinstance(item, {CHAT.choice})\n")
    with pytest.raises(ValueError, match="isinstance"):
        replace_models(module, CHAT)
    source.write_text("pass\n")
    replace_models(module, CHAT)
    assert getattr(module, CHAT.chunk) is not getattr(real, CHAT.chunk)


def test_a_release_without_these_models_is_served_as_it_is() -> None:
    module = importlib.import_module(CHAT.module)
    delattr(module, CHAT.chunk)
    write_chunks_plainly()
    assert isinstance(getattr(module, CHAT.choice), type)


def test_a_module_whose_source_cannot_be_read_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = importlib.import_module(CHAT.module)
    monkeypatch.setattr(module, "__file__", "/nowhere/serving.py")
    write_chunks_plainly()
    assert isinstance(getattr(module, CHAT.chunk), type)
    assert "writes every chunk of a stream with pydantic" in caplog.text


def test_replacing_twice_changes_nothing() -> None:
    write_chunks_plainly()
    module = importlib.import_module(CHAT.module)
    first = getattr(module, CHAT.chunk)
    write_chunks_plainly()
    assert getattr(module, CHAT.chunk) is first
