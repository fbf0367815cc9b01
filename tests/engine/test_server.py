"""The life of a row from request to sidecar, with a real vLLM server and the official SDK.

The tests run in this order, on one server; the last one kills it.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
from safetensors.numpy import load
from transformers import AutoTokenizer

import clairai
from clairai.demo.scored_answer import ask_with_scores
from clairai.errors import ConfigError, ProbeError
from clairai.launch.engine_log import EngineLog
from clairai.launch.engine_process import EngineProcess
from clairai.library.http_client import ServerClient
from clairai.probe.files import dumps
from clairai.store.codecs.registry import named
from tests.engine import server as parts
from tests.engine.server import MODEL, Sidecar

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ONLY_NEW = {"If-None-Match": "*"}


class Running(NamedTuple):
    engine: EngineProcess
    sidecar: Sidecar
    runtime: Path
    sdk: openai.OpenAI
    server: ServerClient  # clairai's own client
    log: Path  # vLLM's


@pytest.fixture(scope="module")
def running(cut_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The sidecar is there first; the server is stopped whatever the tests did to it."""
    scratch = tmp_path_factory.mktemp("server")
    runtime = Path(tempfile.mkdtemp(prefix="clairai-"))  # short enough for a socket
    probes = scratch / "probes"
    probes.mkdir()
    launch = parts.launch(cut_model, runtime, probes)
    with (
        Sidecar(runtime, scratch) as sidecar,
        EngineProcess(launch, log=EngineLog(scratch / "vllm.log")) as engine,
        parts.client(launch.address.url) as sdk,
    ):
        assert engine.wait_ready()
        client = ServerClient(launch.address.url, parts.KEY)
        yield Running(engine, sidecar, runtime, sdk, client, scratch / "vllm.log")
    shutil.rmtree(runtime)


def _fields(**fields: Any) -> dict[str, Any]:
    return {"return_token_ids": True, "vllm_xargs": {"clairai": json.dumps(fields)}}


def _check_rows(rows: list[dict[str, Any]], prompt_ids: list[int], output_ids: list[int]) -> None:
    """Each forwarded token once, in order; the last one sampled is never forwarded."""
    forwarded = [*prompt_ids, *output_ids][:-1]
    assert [row["position"] for row in rows] == [*range(len(forwarded))]
    assert [row["token_id"] for row in rows] == forwarded
    phases = ["prefill"] * len(prompt_ids) + ["decode"] * (len(output_ids) - 1)
    assert [row["phase"] for row in rows] == phases
    assert all(math.isfinite(score) for row in rows for score in row["scores"].values())


def test_one_line_of_the_log_says_what_is_served(running: Running) -> None:
    (line,) = [one for one in running.log.read_text().splitlines() if "clairai taps" in one]
    assert f"readers attach in {running.runtime}" in line
    assert "probes" in line


def test_a_sidecar_that_was_there_first_prints_exactly_the_rows_of_a_request(
    running: Running,
) -> None:
    answer = running.sdk.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Name three rivers."}],
        max_tokens=12,
        extra_body={**_fields(stream=12345), "ignore_eos": True},
    )
    rows = running.sidecar.await_end(12345)
    output_ids = answer.choices[0].token_ids  # type: ignore[attr-defined]
    assert len(output_ids) == 12
    _check_rows(rows, answer.prompt_token_ids, output_ids)  # type: ignore[attr-defined]
    assert {name for row in rows for name in row["scores"]} == {"first", "second"}


def test_a_streamed_answer_is_scored_the_same(running: Running) -> None:
    prompt_ids: list[int] = []
    output_ids: list[int] = []
    for chunk in running.sdk.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Write a line about the sea."}],
        max_tokens=10,
        stream=True,
        extra_body={**_fields(stream=12346, prompt_scores=True), "ignore_eos": True},
    ):
        prompt_ids += getattr(chunk, "prompt_token_ids", None) or []
        for choice in chunk.choices:
            output_ids += getattr(choice, "token_ids", None) or []
    _check_rows(running.sidecar.await_end(12346), prompt_ids, output_ids)


def test_every_answer_of_one_request_has_its_own_rows(running: Running) -> None:
    answer = running.sdk.completions.create(
        model=MODEL,
        prompt="One, two, three,",
        max_tokens=5,
        n=2,
        extra_body={**_fields(stream=12347), "ignore_eos": True},
    )
    running.sidecar.until(
        lambda: len([e for e in running.sidecar.events("finished") if e["stream"] == 12347]) == 2
    )
    rows = running.sidecar.rows(12347)
    for index, choice in enumerate(answer.choices):
        own = [row for row in rows if row.get("choice", 0) == index]
        decoded = [row["token_id"] for row in own if row["phase"] == "decode"]
        assert decoded == choice.token_ids[:-1]  # type: ignore[attr-defined]


def test_tokens_that_the_prefix_cache_served_are_an_event_and_no_rows(running: Running) -> None:
    text = "Once upon a time there was a lighthouse. " * 40
    for stream in (400, 401):
        running.sdk.completions.create(
            model=MODEL, prompt=text, max_tokens=2, extra_body=_fields(stream=stream)
        )
    rows = running.sidecar.await_end(401)
    (cached,) = [event for event in running.sidecar.events("cached") if event["stream"] == 401]
    assert cached["position"] == 0
    assert rows[0]["position"] == cached["span"] > 0
    assert running.sidecar.await_end(400)[0]["position"] == 0


def test_the_demo_prints_an_answer_with_its_scores(running: Running) -> None:
    scored = ask_with_scores(running.server, running.runtime, "What is a lighthouse?", max_tokens=8)
    assert len(scored.texts) == len(scored.scores.generated) <= 8
    assert all(map(math.isfinite, scored.scores.generated[:-1, 0]))
    assert math.isnan(scored.scores.generated[-1, 0])


def test_probes_change_while_a_request_runs_and_its_rows_follow(running: Running) -> None:
    before = running.server.probes()
    assert [info["name"] for info in before["data"]] == ["first", "second"]
    added = parts.probe("dir/added", layer=3, seed=5)
    stream = running.sdk.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Tell me a long story."}],
        max_tokens=parts.ENDLESS,
        stream=True,
        extra_body={**_fields(stream=500), "ignore_eos": True},
    )
    with stream:
        next(iter(stream))
        after = running.server.put_probe(added.name, dumps(added), only_if=ONLY_NEW)
        assert after["version"] == before["version"] + 1
        running.sidecar.until(
            lambda: any(added.name in row["scores"] for row in running.sidecar.rows(500)[-1:])
        )
        running.server.remove_probe(added.name)
        running.sidecar.until(lambda: added.name not in running.sidecar.rows(500)[-1]["scores"])
    rows = running.sidecar.await_end(500)
    assert [row["position"] for row in rows] == [*range(len(rows))]
    assert running.server.probes()["data"] == before["data"]


def test_a_probe_is_created_or_replaced_and_the_bank_has_an_end(running: Running) -> None:
    full = parts.probe("third", seed=7)
    put = running.server.put_probe
    assert len(put("third", dumps(full), only_if={})["data"]) == 3
    assert len(put("third", dumps(parts.probe("third", seed=8)), only_if={})["data"]) == 3
    with pytest.raises(ProbeError, match=r"409.*slots"):
        put("fourth", dumps(parts.probe("fourth")), only_if={})
    with pytest.raises(ProbeError, match=r"412.*has a probe named"):
        put("third", dumps(full), only_if=ONLY_NEW)
    running.server.remove_probe("third")
    with pytest.raises(ProbeError, match=r"412.*no probe named"):
        put("third", dumps(full), only_if={"If-Match": "*"})
    with pytest.raises(ProbeError, match=r"404.*no probe named"):
        running.server.remove_probe("third")


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("bad", b"not safetensors", "not a clairai probe"),
        ("other", dumps(parts.probe("bad")), "make them the same"),
        ("bad", dumps(parts.probe("bad", layer=2)), "not tapped"),
        ("bad", b"\0" * (17 << 20), "413.*over 16777216 bytes"),
    ],
    ids=["noise", "name", "point", "size"],
)
def test_a_bad_probe_is_refused_and_the_bank_is_unchanged(
    running: Running, name: str, data: bytes, reason: str
) -> None:
    before = running.server.probes()
    with pytest.raises(ProbeError, match=reason):
        running.server.put_probe(name, data, only_if={})
    assert running.server.probes() == before


def test_the_description_tells_what_is_tapped_and_nothing_of_the_machine(running: Running) -> None:
    described = running.server.describe()
    assert described["model"] == MODEL
    assert described["points"] == ["post_block.3"]
    assert (described["width"], described["capacity"]) == (parts.WIDTH, 3)
    assert described["epoch"] == running.sidecar.events("attached")[-1]["epoch"]
    assert described["published"] > 0
    assert str(running.runtime) not in json.dumps(dict(described))


def test_the_key_guards_our_routes_as_it_guards_vllms(running: Running) -> None:
    with pytest.raises(ConfigError, match="another API key"):
        ServerClient(running.server.url, "wrong").probes()
    with pytest.raises(openai.AuthenticationError):
        parts.client(running.server.url, "wrong").models.list()


def test_a_request_with_bad_fields_is_refused_with_the_reason(running: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="unknown clairai request field 'bogus'"):
        _ask(running, bogus=1)


def test_a_stream_is_never_given_to_a_second_request(running: Running) -> None:
    with running.sdk.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Tell me another long story."}],
        max_tokens=parts.ENDLESS,
        stream=True,
        extra_body={**_fields(stream=600), "ignore_eos": True},
    ) as first:
        next(iter(first))
        # Only the engine core knows this; vLLM keeps its reason to itself, our routes ask for it.
        with pytest.raises(openai.BadRequestError, match="belongs to a request that is not fin"):
            _ask(running, stream=600)
    rows = running.sidecar.await_end(600)
    assert [row["position"] for row in rows] == [*range(len(rows))]
    with pytest.raises(openai.BadRequestError, match="was used by a request that has ended"):
        _ask(running, stream=600)


def _ask(running: Running, **fields: Any) -> openai.types.chat.ChatCompletion:
    return running.sdk.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=3,
        extra_body=_fields(**fields),
    )


def test_the_rows_of_one_message_come_back_as_a_file(running: Running, cut_model: Path) -> None:
    answer = parts.captured(running.sdk, {"message": 1})
    handle = parts.settled(running.server.url, answer.clairai["capture"])
    first, end = clairai.message_range(AutoTokenizer.from_pretrained(cut_model), parts.CHAT, 1)
    assert (handle["state"], handle["rows"], handle["lost"]) == ("kept", end - first, 0)
    got = parts.rows_of(running.server.url, handle)
    found = load(got.content)
    assert found["position"].tolist() == [*range(first, end)]
    assert found["token_id"].tolist() == answer.prompt_token_ids[first:end]
    rows = named("full8").decode(
        {n: found[f"rows.{n}"] for n in ("codes", "low", "high")}, width=576
    )
    assert np.isfinite(rows).all()
    assert rows.std() > 0
    part = parts.rows_of(running.server.url, handle, Range="bytes=-100")
    assert (part.status_code, part.content) == (206, got.content[-100:])


def test_a_streamed_answer_ends_with_what_became_of_its_rows(running: Running) -> None:
    chunks = list(parts.captured(running.sdk, "generated", stream=True))
    told = [chunk.clairai["capture"] for chunk in (chunks[0], chunks[-1])]
    assert (chunks[-1].choices, told[1]["id"]) == ([], told[0]["id"])
    assert parts.settled(running.server.url, told[1])["state"] == "kept"
    found = load(parts.rows_of(running.server.url, told[1]).content)
    said = [choice.model_extra for chunk in chunks for choice in chunk.choices]
    ids = [token for extra in said for token in extra.get("token_ids") or ()]
    # An engine that schedules ahead may forward the last token too.
    assert found["token_id"].tolist()[:4] == ids[:4]
    assert len(found["token_id"]) in (4, 5)


def test_a_killed_engine_is_reported(running: Running) -> None:
    running.engine.kill()
    running.sidecar.until(lambda: running.sidecar.events("detached"))
    assert "engine gone" in running.sidecar.said()
