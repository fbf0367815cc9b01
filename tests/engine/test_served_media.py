"""Images over HTTP: vLLM's own server and clairai's proxy give each row its position and mark."""

from __future__ import annotations

import base64
import io
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import load

from clairai.launch.engine_command import EngineCommand, ListenAddress
from clairai.launch.engine_log import EngineLog
from clairai.launch.engine_process import EngineProcess
from clairai.library.config import config
from clairai.points import Point
from clairai.probe.files import save
from clairai.probe.model import Probe
from clairai.wire import ring_messages
from tests.engine import server as parts
from tests.engine.server import Sidecar
from tests.fidelity import tiny_media, tiny_models
from tests.fidelity.verify_model import Truth, truth_process
from tests.web.server import running_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ARCHITECTURE: Final = "Idefics3ForConditionalGeneration"
MODEL: Final = "tiny-images"
TILE: Final = 20  # placeholders of one image: five tiles of four
TEMPLATE: Final = (
    "{% for message in messages %}w{{ 20 + loop.index }} "
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %} {% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}w20{% endif %}"
)
OPTIONS: Final = (
    *("--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", "256", "--max-num-batched-tokens", "96", "--block-size", "32"),
    *("--mm-hasher-algorithm", "sha256", "--skip-mm-profiling"),
    *("--limit-mm-per-prompt", '{"image": 2}', "--chat-template-content-format", "openai"),
)


class Served(NamedTuple):
    sidecar: Sidecar
    sdk: openai.OpenAI  # of vLLM's server
    proxy: openai.OpenAI
    url: str  # the proxy's
    placeholder: int  # token id


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    scratch = tmp_path_factory.mktemp("served")
    runtime = Path(tempfile.mkdtemp(prefix="clairai-"))  # short enough for a socket
    model, probes, template = (scratch / name for name in ("model", "probes", "chat.jinja"))
    with truth_process() as truth:
        stands_for = truth.call(make_model, model)
    probes.mkdir()
    template.write_text(TEMPLATE)
    direction_D = np.random.default_rng(1).normal(size=tiny_models.WIDTH).astype(np.float32)
    save(probes / "first.safetensors", Probe("first", Point("post_block", 2), direction_D))
    launch = EngineCommand(
        str(model),
        config(
            probes=probes,
            capture={"folder": str(scratch / "captures")},
            runtime_dir=str(runtime),
        ),
        ListenAddress(port=parts.free_port()),
        (*OPTIONS, "--chat-template", str(template)),
        parts.CPU,
    )
    upstream = launch.address.url
    with (
        Sidecar(runtime, scratch) as sidecar,
        EngineProcess(launch, log=EngineLog(scratch / "vllm.log")) as engine,
        parts.client(upstream) as sdk,
    ):
        assert engine.wait_ready(), (scratch / "vllm.log").read_text()[-4000:]
        command = ("proxy", "--upstream", upstream)
        with (
            running_server(runtime, *command, is_up=lambda status: status == 200) as url,
            parts.client(url) as proxy,
        ):
            (placeholder,) = stands_for
            yield Served(sidecar, sdk, proxy, url, placeholder)
    shutil.rmtree(runtime)


def make_model(truth: Truth, folder: Path) -> dict[int, int]:
    """In a process of its own; what the placeholders of its processor stand for."""
    truth.make(ARCHITECTURE, folder)
    return tiny_media.make_processor(ARCHITECTURE, folder)


def image(seed: int) -> dict[str, Any]:
    """A part of a message, as OpenAI has it."""
    out = io.BytesIO()
    tiny_media.make_media("image", seed).save(out, "PNG")
    encoded = base64.b64encode(out.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*content: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(content)}


def ask(sdk: openai.OpenAI, messages: list[Any], **body: Any) -> Any:
    more = {"return_token_ids": True, "ignore_eos": True, **body}
    return sdk.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=4, temperature=0, extra_body=more
    )


def get(served: Served, path: str) -> httpx.Response:
    return httpx.get(f"{served.url}{path}", timeout=parts.DEADLINE_S, trust_env=False)


def spans_of(token_ids: list[int], placeholder: int) -> list[dict[str, Any]]:
    """Where the placeholders lie, as the proxy tells it."""
    found: list[dict[str, Any]] = []
    for at, token in enumerate(token_ids):
        if token != placeholder:
            continue
        if found and found[-1]["start"] + found[-1]["span"] == at:
            found[-1]["span"] += 1
        else:
            found.append({"kind": "image", "start": at, "span": 1})
    return found


def test_rows_of_a_request_to_vllms_server_are_marked(served: Served) -> None:
    xargs = {"clairai": json.dumps({"stream": 71, "prompt_scores": True})}
    messages = [user(text("w31 w32"), image(1), text("w33"), image(2))]
    answer = ask(served.sdk, messages, vllm_xargs=xargs)
    rows = served.sidecar.await_end(71)
    forwarded = [*answer.prompt_token_ids, *answer.choices[0].token_ids[:-1]]
    assert [row["position"] for row in rows] == [*range(len(forwarded))]
    assert [row["token_id"] for row in rows] == forwarded
    marked = [row["position"] for row in rows if "media" in row]
    assert marked == [at for at, one in enumerate(forwarded) if one == served.placeholder]
    assert len(marked) == 2 * TILE
    assert {row["media"] for row in rows if "media" in row} == {"image"}


def test_the_proxy_tells_where_the_images_of_a_prompt_are(served: Served) -> None:
    asked = {"clairai": {"probes": ["first"], "prompt_scores": True}}
    answer = ask(served.proxy, [user(image(1), text("w31 w32"), image(3))], **asked)
    (choice,) = answer.choices
    prompt = choice.prompt_scores
    assert prompt["token_ids"] == answer.prompt_token_ids
    wanted = spans_of(prompt["token_ids"], served.placeholder)
    assert prompt["media"] == wanted
    assert sum(one["span"] for one in wanted) == 2 * TILE
    assert "lost" not in prompt
    assert all(isinstance(row[0], float) for row in prompt["scores"])
    assert len(choice.probe_scores["scores"]) == len(choice.token_ids)
    kept = get(served, f"/v1/scores/{answer.id}").json()
    assert kept["choices"][0]["prompt_scores"]["media"] == wanted


def test_named_events_tell_it_too(served: Served) -> None:
    body = {
        "model": MODEL,
        "messages": [user(text("w31"), image(4))],
        "max_tokens": 2,
        "stream": True,
        "clairai": {"prompt_scores": True, "events": "named"},
    }
    url = f"{served.url}/v1/chat/completions"
    answer = httpx.post(url, json=body, timeout=parts.DEADLINE_S, trust_env=False)
    events = [frame.splitlines() for frame in answer.text.split("\n\n") if "event: " in frame]
    data = [(dict(line.split(": ", 1) for line in lines if ": " in line)) for lines in events]
    found = [(one["event"], json.loads(one["data"])) for one in data]
    tokens = [one for name, one in found if name == "token" and one["part"] == "prompt"]
    updates = [one for name, one in found if name == "probe_update" and one["part"] == "prompt"]
    ids = [token for one in tokens for token in one["token_ids"]]
    assert [span for one in updates for span in one["media"]] == spans_of(ids, served.placeholder)


def test_text_alone_has_no_marks(served: Served) -> None:
    answer = ask(served.proxy, [user(text("w40 w41"))], clairai={"prompt_scores": True})
    assert "media" not in answer.choices[0].prompt_scores


def test_what_is_cached_of_an_image_is_marked_and_serves_no_other(served: Served) -> None:
    words = text(" ".join(f"w{word}" for word in range(100, 120)))
    seen = []
    for stream, seed in ((81, 5), (82, 5), (83, 6)):
        xargs = {"clairai": json.dumps({"stream": stream})}
        messages = [user(words, image(seed), text("w31 w32"))]
        answer = ask(served.sdk, messages, vllm_xargs=xargs)
        rows = served.sidecar.await_end(stream)
        spans = [one for one in served.sidecar.events("cached") if one["stream"] == stream]
        seen.append((answer.prompt_token_ids, rows, spans))
    (prompt, first, none), (again, rows, spans), (other, _, few) = seen
    assert prompt == again == other
    assert none == []
    cached = sum(one["span"] for one in spans)
    assert cached == 32
    marks = {at: one.get("media") for one in spans for at in _positions(one)}
    marks |= {row["position"]: row.get("media") for row in rows}
    assert marks == {row["position"]: row.get("media") for row in first}
    assert sum(one["span"] for one in few) < prompt.index(served.placeholder)


def _positions(span: dict[str, Any]) -> range:
    return range(span["position"], span["position"] + span["span"])


def test_a_message_after_an_image_is_captured_where_it_lies(served: Served) -> None:
    messages = [
        user(image(7), text("w31")),
        user(text("w50 w51"), role="assistant"),
        user(text("w60 w61 w62")),
    ]
    wish = {"points": ["post_block.2"], "positions": [{"message": 0}, {"message": 2}]}
    answer = ask(served.proxy, messages, clairai={"capture": wish})
    handle = parts.settled(served.url, answer.clairai["capture"])
    found = load(get(served, f"/v1/captures/{handle['id']}").content)
    prompt = answer.prompt_token_ids
    last = prompt.index(60)
    positions = found["position"].tolist()
    assert [prompt[at] for at in positions if at >= last] == [60, 61, 62]
    assert not {50, 51} & {prompt[at] for at in positions}
    marks = (found["flags"] >> ring_messages.MEDIA_SHIFT).tolist()
    assert marks == [int(prompt[at] == served.placeholder) for at in positions]
    assert sum(marks) == TILE
