"""The whole stack on real vLLM: engine, ring, proxy, clients. One engine for all of it."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from clairai.launch.engine_command import EngineCommand, ListenAddress
from clairai.launch.engine_log import EngineLog
from clairai.launch.engine_process import EngineProcess
from clairai.library.config import config
from clairai.proxy.proxy import Proxy
from clairai.proxy.proxy_settings import ProxySettings
from tests.engine import models
from tests.engine.server import CPU, KEY, MODEL, NAMED, WIDTH, free_port
from tests.http.answers import CHAT, TEXT, events, without_ours
from tests.http.embedding import Embedding
from tests.http.stack_load import Sent, plan, send_all
from tests.http.world import PATIENT, proxy_of
from tests.support.ring_engine import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

# Small on purpose: 64 tokens a step cut prompts up, 26 blocks of 32 tokens run out.
SMALL = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "32"),
    *("--max-num-batched-tokens", "64", "--block-size", "32", "--num-gpu-blocks-override", "26"),
)


PROBE = "embedding:0"
PAST = {"phase": "prompt", "positions": [[900, 901]]}  # of a shorter prompt


class Stack(NamedTuple):
    url: str
    proxy: Proxy
    engine_url: str
    embedding: Embedding

    def engine(self) -> httpx.Client:
        bearer = {"Authorization": f"Bearer {KEY}"}
        return httpx.Client(base_url=self.engine_url, headers=bearer, timeout=60)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    scratch = tmp_path_factory.mktemp("stack")
    runtime = Path(tempfile.mkdtemp(prefix="clairai-"))  # short enough for a socket
    model = models.cut(models.real(), 4, scratch / MODEL)
    embedding = Embedding(model)
    (scratch / "probes").mkdir()
    embedding.save_probes(scratch / "probes")
    launch = EngineCommand(
        str(model),
        config(probes=scratch / "probes", steering=True, steer_rows=2, runtime_dir=str(runtime)),
        ListenAddress(port=free_port(), api_key=KEY),
        (*NAMED, *SMALL),
        CPU,
    )
    with EngineProcess(launch, log=EngineLog(scratch / "vllm.log")) as engine:
        assert engine.wait_ready()
        settings = ProxySettings(launch.address.url, upstream_api_key=KEY, runtime_dir=runtime)
        with proxy_of(replace(settings, timeouts=PATIENT)) as (url, proxy):
            yield Stack(url, proxy, launch.address.url, embedding)
    shutil.rmtree(runtime)


def wrongs(request: Sent, embedding: Embedding) -> list[str]:
    found = []
    for choice in range(request.body["n"]):
        ids, one = request.ids[choice], request.told[choice]
        *rows, last = [list(row.values()) for row in one.scores]
        found += embedding.wrong(ids[:-1], rows)
        found += [] if not any(last) else ["the last token has a score"]
        found += [f"{one.lost} lost"] if one.lost else []
        found += [] if len(ids) == request.body["max_tokens"] else [f"{len(ids)} tokens"]
    if request.body["clairai"]["prompt_scores"]:
        prompt = request.told[0].prompt
        assert prompt is not None
        found += embedding.wrong(request.prompt_ids, prompt["scores"])
    return found


def test_no_score_of_two_hundred_requests_is_wrong(stack: Stack, report: Any) -> None:
    requests = plan(200, 1, MODEL)
    asyncio.run(send_all(stack.url, requests, at_once=16))
    wrong = [fault for request in requests for fault in wrongs(request, stack.embedding)]
    rows = sum(len(ids) - 1 for request in requests for ids in request.ids.values())
    report(test="proxy", rows=rows, wrong=len(wrong))
    assert wrong == []
    assert _is_caught(requests, stack.embedding)
    numbers = stack.proxy.counts()
    assert (numbers.ring.mismatched, numbers.ring.records_lost, numbers.rows_lost) == (0, 0, 0)
    # The load really was what it claims to be.
    assert rows > 2_000
    assert sum(request.body["n"] > 1 for request in requests) > 20
    assert sum(request.is_named for request in requests) > 10
    assert sum(not request.body["stream"] for request in requests) > 10
    assert _metric(stack, "vllm:num_preemptions_total") > 0, "nothing was preempted"
    assert _metric(stack, "vllm:prefix_cache_hits_total") > 0, "no prefix-cache hit"


def _is_caught(requests: list[Sent], embedding: Embedding) -> bool:
    """Whether scores that are one token off, or another choice's, would have been seen."""
    several = next(r for r in requests if r.body["n"] > 1 and r.body["max_tokens"] > 8)
    rows = [list(row.values()) for row in several.told[0].scores[:-1]]
    own, other = several.ids[0][:-1], several.ids[1][:-1]
    return bool(embedding.wrong(own[1:], rows[:-1]) and embedding.wrong(other, rows))


def _metric(stack: Stack, name: str) -> float:
    with stack.engine() as client:
        text = client.get("/metrics").text
    return sum(
        float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)
    )


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("is_stream", [True, False])
def test_apart_from_our_field_the_bytes_are_vllms(stack: Stack, path: str, is_stream: bool) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Write a line about the sea: ü, 漢字, 🙂."}],
        "prompt": "Write a line about the sea: ü, 漢字, 🙂.",
        "max_tokens": 24,
        "temperature": 0,
        "logprobs": True if path == CHAT else 3,
        "stream": is_stream,
    }
    del body["prompt" if path == CHAT else "messages"]
    with stack.engine() as direct, httpx.Client(base_url=stack.url, timeout=60) as proxied:
        plain = direct.post(path, json=body)
        passed = proxied.post(path, json=body)
        scored = proxied.post(path, json={**body, "clairai": {"prompt_scores": True}})
    assert plain.status_code == 200
    assert b"probe_scores" in scored.content
    if is_stream:
        # vLLM puts two tokens into one chunk when its reader was late, so chunks are not compared
        # one by one: what all of them say is. Byte for byte: test_plain_stream.py, by a script.
        assert _said(passed.content) == _said(plain.content) == _said(scored.content)
        return
    assert _named_alike(passed.content) == _named_alike(plain.content)
    assert _framed(_named_alike(scored.content)) == _framed(_named_alike(plain.content))


def _said(raw: bytes) -> dict[str, object]:
    """A stream's one answer: its text, its log probabilities, how it ended, and its last frame."""
    *frames, done = [frame.removeprefix(b"data: ") for frame in raw.strip().split(b"\n\n")]
    choices = [choice for frame in frames for choice in json.loads(frame)["choices"]]
    texts = [
        choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices
    ]
    scored = [choice["logprobs"] or {} for choice in choices]
    return {
        "text": "".join(texts),
        "logprobs": [item for part in scored for item in part.get("content") or []],
        "token_logprobs": [item for part in scored for item in part.get("token_logprobs") or []],
        "finish": [choice["finish_reason"] for choice in choices][-1],
        "fields": sorted({*choices[0]} - {"probe_scores", "prompt_scores"}),
        "done": done,
    }


def _named_alike(raw: bytes) -> bytes:
    """Without what differs between any two requests: the id and the time."""
    return re.sub(rb'"id":"[^"]*"|"created":\d+', b"", raw)


def _framed(raw: bytes) -> bytes:
    return without_ours(raw if raw.startswith(b"data: ") else b"data: " + raw)


def test_tokens_are_shown_as_they_are_written(stack: Stack) -> None:
    asked = {"events": "named", "prompt_scores": True}
    words = "naïve 漢字 🙂 <|im_end|>"
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": words}],
        "max_tokens": 4,
        "clairai": asked,
    }
    with httpx.Client(base_url=stack.url, timeout=60) as client:
        found = events(client.post(CHAT, json=body).content)
    prompt = [e.data for e in found if e.name == "token" and e.data["part"] == "prompt"]
    tokens = [text for part in prompt for text in part["tokens"]]
    assert "<|im_start|>" in tokens
    assert words in "".join(tokens)
    assert "" in tokens  # part of a character


def asking(**clairai: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": "The sea is", "max_tokens": 12, "temperature": 0}
    return {**body, "ignore_eos": True, "clairai": {"probes": [PROBE], **clairai}}


def packed(seed: int, *, value: float | None = None) -> dict[str, Any]:
    """A vector as a request carries it, at the one point that is tapped."""
    row_D = np.random.default_rng(seed).normal(size=WIDTH).astype(np.float32)
    if value is not None:
        row_D[:] = value
    return {"points": {"pre_attn.0": base64.b64encode(row_D.tobytes()).decode()}}


def test_a_steered_answer_is_another_one_and_leaves_the_next_alone(stack: Stack) -> None:
    steer = [{"vector": packed(1), "scale": 4.0}]
    with httpx.Client(base_url=stack.url, timeout=60) as client:
        plain, steered, again = (
            client.post(TEXT, json=asking(**given)).json() for given in ({}, {"steer": steer}, {})
        )
        named = events(client.post(TEXT, json=asking(steer=steer, events="named")).content)
    texts = [answer["choices"][0]["text"] for answer in (plain, steered, again)]
    assert texts[0] == texts[2] != texts[1]
    assert "clairai" not in plain
    (told,) = steered["clairai"]["steering"]
    assert (told["vector"], told["scale"], len(told["digest"])) == (None, 4.0, 64)
    assert named[0].data["clairai"] == steered["clairai"]
    scored = steered["choices"][0]["probe_scores"]["scores"]
    assert len(scored) == 12
    assert None not in [row[0] for row in scored[:-1]]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("steer", "status", "code"),
    [
        ([{"vector": "unknown"}], 400, "request"),
        ([{"vector": packed(0, value=float("nan"))}], 400, "vector"),
        ([{"vector": packed(seed)} for seed in range(3)], 409, "vector-capacity"),
        ([{"vector": packed(0), "when": PAST}], 400, "request"),
    ],
)
def test_what_the_engine_refuses_has_a_status_and_a_reason(
    stack: Stack, steer: list[Any], status: int, code: str, stream: bool
) -> None:
    with httpx.Client(base_url=stack.url, timeout=60) as client:
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
        answer = client.post(CHAT, json={**chat, "clairai": {"steer": steer}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "Internal" not in answer.json()["error"]["message"]


def test_an_answer_is_stopped_by_a_probe_and_says_so(stack: Stack) -> None:
    rule = {"probe": PROBE, "threshold": -1e9, "tokens": 3}
    with httpx.Client(base_url=stack.url, timeout=60) as client:
        answer = client.post(TEXT, json=asking(stop=[rule])).json()
        named = events(client.post(TEXT, json=asking(stop=[rule], events="named")).content)
    reason = f"clairai: probe {PROBE} >= -1e+09 for 3 tokens"
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
    assert answer["usage"]["completion_tokens"] < 12
    assert named[-1].data["stop_reasons"] == [reason]


def test_a_client_that_leaves_frees_the_engine(stack: Stack) -> None:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 250, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=stack.url, timeout=60) as client:
        with client.stream("POST", TEXT, json={**body, "clairai": {}}) as answer:
            next(answer.iter_bytes())
        until(lambda: _metric(stack, "vllm:num_requests_running") == 0)
        until(lambda: stack.proxy.counts().streams == 0)
        health = client.get("/health").json()
        assert health == {
            "status": "ready",
            "reason": None,
            "since": health["since"],
            "model": MODEL,
            "version": client.get("/openapi.json").json()["info"]["version"],
            "replica": None,
        }
