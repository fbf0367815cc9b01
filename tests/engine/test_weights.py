"""A real server under 8 streams gets other weights, and the old ones back.

The reference is an engine that was started with the other weights, and the server's own beginning.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from clairai.errors import ConfigError, WeightsError
from clairai.fields import request_fields
from clairai.library.http_client import ServerClient
from clairai.proxy.proxy_settings import ProxySettings
from clairai.weights import Sender
from tests.engine import server as parts
from tests.engine import weighed
from tests.engine.process import EngineProcess
from tests.engine.swapping import (
    DEADLINE_S,
    Answer,
    Client,
    Running,
    await_answers,
    kept_weights,
    seen,
    sender,
    serving,
)
from tests.http.world import proxy_of
from tests.support.ring_engine import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

STREAMS = 8
# Blocks of a CPU engine hold 128 tokens: this prompt fills some.
LONG = "Once upon a time there was a lighthouse. " * 45


@pytest.fixture(scope="module")
def running(cut_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(cut_model, tmp_path_factory.mktemp("weights"), seats=STREAMS) as made:
        yield made


@pytest.fixture(scope="module")
def expected(running: Running, runtime: Path) -> list[tuple[int, ...]]:
    """What an engine answers that was started with the other weights; the last to LONG."""
    with EngineProcess(
        runtime=runtime,
        model=str(running.other),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        enable_prefix_caching=False,
    ) as engine:
        asked = [*weighed.prompts(STREAMS), LONG]
        return [tuple(ids) for ids, _ in engine.call(weighed.answers, asked)]


@pytest.fixture(scope="module")
def sdk(running: Running) -> Iterator[openai.OpenAI]:
    with parts.client(running.url) as made:
        yield made


def test_eight_streams_see_the_old_weights_or_the_new_and_never_both(
    running: Running, sdk: openai.OpenAI, expected: list[tuple[int, ...]]
) -> None:
    stop = threading.Event()
    clients = [Client(sdk, prompt, stop) for prompt in weighed.prompts(STREAMS)]
    before = [client.ask().tokens for client in clients]
    threads = [threading.Thread(target=client.run) for client in clients]
    for thread in threads:
        thread.start()
    try:
        await_answers(clients)
        sent = sender(running).send(running.other, label="step-1")
        await_answers(clients)
        back = sender(running).send(running.model, label="step-2")
        await_answers(clients)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert (sent.version, back.version) == (1, 2)
    assert sent.digest != back.digest
    for client, old, new in zip(clients, before, expected, strict=False):
        assert old != new
        found = [answer for answer, _ in groupby(client.answers.values())]
        assert found == [Answer(old, 0), Answer(new, 1), Answer(old, 2)]
    _check_ring(running, clients)


def _check_ring(running: Running, clients: list[Client]) -> None:
    """Versions change once for each hand-over, and each row has that of its answer."""
    found = seen(running.runtime)
    assert [version for version, _ in groupby(found.versions)] == [0, 1, 2]
    told = {stream: {one.version} for client in clients for stream, one in client.answers.items()}
    assert told == {stream: found.streams[stream] for stream in told}


def test_the_server_says_which_weights_serve(running: Running) -> None:
    state = ServerClient(running.url, parts.KEY).weights()
    assert (state["version"], state["label"], state["is_torn"]) == (2, "step-2", False)
    assert state["device"] == "cpu"
    url, key = f"{running.url}/v1/models", {"Authorization": f"Bearer {parts.KEY}"}
    answer = httpx.get(url, headers=key, timeout=DEADLINE_S)
    (card,) = answer.json()["data"]
    about = {name: state[name] for name in ("version", "label", "digest")}
    assert (card["id"], card["clairai"]) == (parts.MODEL, {"weights": about})
    assert httpx.get(url, timeout=DEADLINE_S).status_code == 401


def test_a_prompt_that_was_cached_with_old_weights_is_forwarded_with_the_new(
    running: Running, sdk: openai.OpenAI, expected: list[tuple[int, ...]]
) -> None:
    client = Client(sdk, LONG)
    old = [client.ask() for _ in range(2)]
    sender(running).send(running.other)
    new = [client.ask() for _ in range(2)]
    sender(running).send(running.model)
    back = client.ask()
    tokens = [one.tokens for one in (*old, *new, back)]
    assert tokens == [tokens[0]] * 2 + [expected[-1]] * 2 + [tokens[0]]
    assert tokens[0] != expected[-1]
    cached = seen(running.runtime).cached
    is_cached = [cached.get(stream, 0) > 256 for stream in client.answers]
    assert is_cached == [False, True, False, True, False], "the second of each is served from it"


def test_all_answers_to_a_request_are_of_one_set_of_weights(
    running: Running, sdk: openai.OpenAI
) -> None:
    """Three times as many as fit into the batch: some have ended and some not begun by then."""
    stream, version, found = request_fields.new_stream_id(), running.version, list[Any]()
    fields = {"vllm_xargs": {"clairai": json.dumps({"stream": stream})}, "ignore_eos": True}

    def ask() -> None:
        found.append(
            sdk.completions.create(
                model=parts.MODEL,
                prompt=weighed.prompts(1)[0],
                n=3 * STREAMS,
                max_tokens=weighed.TOKENS,
                extra_body=fields,
            )
        )

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: stream in seen(running.runtime).streams, DEADLINE_S)
    sent = sender(running).send(running.other)
    asking.join()
    sender(running).send(running.model)
    (answer,) = found
    assert (answer.clairai, sent.version) == ({"weights": version}, version + 1)
    assert len(answer.choices) == 3 * STREAMS
    assert seen(running.runtime).streams[stream] == {version}


def test_captured_rows_say_which_weights_they_are_of(running: Running, sdk: openai.OpenAI) -> None:
    first = running.version
    names = []
    for folder in (running.other, running.model):
        names.append(_captured(running, sdk))
        sender(running).send(folder)
    names.append(_captured(running, sdk))
    versions, held = zip(*(name.split("-") for name in names), strict=True)
    assert [int(version) for version in versions] == [first, first + 1, first + 2]
    assert held[0] == held[2] != held[1]


def _captured(running: Running, sdk: openai.OpenAI) -> str:
    answer = parts.captured(sdk, "generated")
    told = answer.clairai
    assert told["weights"] == running.version
    assert parts.settled(running.url, told["capture"])["state"] == "kept"
    return kept_weights(running.captures, told["capture"])


def test_through_the_proxy_weights_are_sent_and_each_answer_says_which_made_it(
    running: Running, tmp_path: Path
) -> None:
    settings = ProxySettings(
        running.url, parts.KEY, api_key="of the proxy", runtime_dir=running.runtime
    )
    first = running.version
    with proxy_of(settings) as (url, _):
        told = [_told(url)]
        sent = [
            Sender(url, api_key="of the proxy", runtime_dir=str(meeting)).send(folder)
            for folder, meeting in ((running.other, running.runtime), (running.model, tmp_path))
        ]
        told.append(_told(url))
        with pytest.raises(Exception, match="another API key"):
            sender(running, url).check(running.other)
    told_of = [(one.version, one.home) for one in sent]
    assert told_of == [(first + 1, "host"), (first + 2, "http")]
    assert told == [{first}, {first + 2}]


def _told(url: str) -> set[int]:
    """The answer's own version, and those of all its scores."""
    with parts.client(url, "of the proxy") as sdk:
        answer: Any = sdk.completions.create(
            model=parts.MODEL, prompt="One, two,", max_tokens=6, extra_body={"clairai": {}}
        )
        (card,) = sdk.models.list().data
    weights = card.model_extra["clairai"]["weights"]["version"]  # type: ignore[index]
    return {answer.clairai["weights"], answer.choices[0].probe_scores["weights"], weights}


def test_the_routes_need_the_key(running: Running) -> None:
    for ask in (
        ServerClient(running.url).weights,
        lambda: _post(ServerClient(running.url, "wrong")),
    ):
        with pytest.raises(Exception, match="another API key"):
            ask()


def _post(server: ServerClient) -> Any:
    return server.post_weights("commit", b"{}")


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve_on(
    running: Running, sdk: openai.OpenAI
) -> None:
    client = Client(sdk, weighed.prompts(1)[0])
    before = client.ask()
    for wrong in weighed.misfits(running.other):
        with pytest.raises(WeightsError):
            sender(running).send(wrong)
    assert client.ask() == before, "the version too"


def test_a_dry_run_changes_nothing(running: Running) -> None:
    before = running.version
    assert sender(running).check(running.other) > 1 << 20
    with pytest.raises(WeightsError, match="nothing named"):
        sender(running).check({"model.nothing": np.zeros(4, np.float32)})
    assert running.version == before


def test_a_probe_is_replaced_by_its_entry_alone(running: Running) -> None:
    server = ServerClient(running.url, parts.KEY)
    held, version = server.probes(), running.version
    direction_D = np.random.default_rng(77).normal(size=parts.WIDTH).astype(np.float32)
    sent = sender(running).send({"probe::first": direction_D})
    after = server.probes()
    assert sent.version == version, "the model's weights are the same"
    assert sent.bank_version == after["version"] == held["version"] + 1
    changed = {p["name"] for p, q in zip(after["data"], held["data"], strict=True) if p != q}
    assert changed == {"first"}


def test_a_vector_comes_with_the_weights_it_was_made_for(running: Running) -> None:
    server = ServerClient(running.url, parts.KEY)
    (before,), version = server.vectors()["data"], running.version
    rows_PD = np.ones((1, parts.WIDTH), np.float32)
    sent = sender(running).send(weighed.held(running.other) | {"steer::calm": rows_PD})
    (after,) = server.vectors()["data"]
    assert (sent.version, sent.vectors_version) == (version + 1, server.vectors()["version"])
    assert after["digest"] != before["digest"]
    assert after["points"] == before["points"]


def test_the_command_line_pushes_a_folder(running: Running) -> None:
    given = (running.model, running.url, parts.KEY, "--runtime-dir", str(running.runtime))
    assert weighed.pushed(*given, "--dry-run").startswith("they would be taken: ")
    version, (way, served) = running.version, weighed.pushed(*given).splitlines()
    assert way == "sending through shared memory: the engine has no GPU"
    assert served.startswith(f"version {version + 1} serves: ")


def test_who_cannot_reach_the_socket_sends_the_same_over_http(
    running: Running, sdk: openai.OpenAI, tmp_path: Path
) -> None:
    client = Client(sdk, weighed.prompts(1)[0])
    expected = sender(running).send(running.other), client.ask()
    sender(running).send(running.model)
    far: Any = {"runtime_dir": str(tmp_path / "elsewhere"), "buffer_bytes": 32 << 20}
    with pytest.raises(ConfigError, match="another API key"):
        Sender(running.url, api_key="wrong", **far).send(running.other)
    sent = Sender(running.url, api_key=parts.KEY, **far).send(running.other)
    assert "socket is not here" in sent.why
    assert (sent.home, sent.digest) == ("http", expected[0].digest)
    assert client.ask()[0] == expected[1][0]
