"""Adapters of LoRA that are loaded while the server runs, asked for by name through the proxy."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import numpy as np
import pytest

from clairai.launch.engine_command import EngineCommand, ListenAddress
from clairai.launch.engine_log import EngineLog
from clairai.launch.engine_process import EngineProcess
from clairai.library.config import config
from clairai.probe.files import save
from clairai.proxy.proxy_settings import ProxySettings
from tests.engine import adapters, models
from tests.engine.server import CPU, KEY, MODEL, NAMED, free_port, probe
from tests.fidelity.oracle import HuggingFace
from tests.http.answers import TEXT
from tests.http.world import PATIENT, proxy_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PROMPT: Final = [*range(3000, 3080)]
POINT: Final = "post_block.3"
PROBE: Final = "depth"
ROUTES: Final = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
# One slot more than adapters: see tests/engine/test_lora.py.
LORA: Final = (
    *("--enable-lora", "--max-loras", "3", "--max-lora-rank", "8", "--block-size", "32"),
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "256"),
)
DIRECTION_D: Final = probe(PROBE, seed=7).direction_D


class Served(NamedTuple):
    url: str
    folders: dict[str, Path]  # of the adapters
    merged: dict[str, Path]  # by the name of a model: the whole of it


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    scratch = tmp_path_factory.mktemp("lora")
    runtime = Path(tempfile.mkdtemp(prefix="clairai-"))  # short enough for a socket
    model = models.cut(models.real(), 4, scratch / MODEL)
    made = {
        name: adapters.make(model, scratch / name, at) for at, name in enumerate(("red", "blue"))
    }
    merged = {
        name: adapters.merge(model, one, scratch / f"{name}-merged") for name, one in made.items()
    }
    (scratch / "probes").mkdir()
    save(scratch / "probes" / "depth.safetensors", replace(probe(PROBE, seed=7), activation="none"))
    launch = EngineCommand(
        str(model),
        config(probes=scratch / "probes", runtime_dir=str(runtime)),
        ListenAddress(port=free_port(), api_key=KEY),
        (*NAMED, *LORA),
        CPU | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
    )
    with EngineProcess(launch, log=EngineLog(scratch / "vllm.log")) as engine:
        assert engine.wait_ready()
        settings = ProxySettings(launch.address.url, upstream_api_key=KEY, runtime_dir=runtime)
        with proxy_of(replace(settings, timeouts=PATIENT)) as (url, _):
            yield Served(url, made, {MODEL: model, **merged})
    shutil.rmtree(runtime)


@cache
def truth_of(folder: Path) -> HuggingFace:
    return HuggingFace(str(folder))


async def ask_all(url: str, names: list[str]) -> list[dict[str, Any]]:
    """One request for each model of these names, all at the same time."""
    body = {
        "prompt": PROMPT,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "clairai": {"probes": [PROBE]},
    }
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        answers = await asyncio.gather(
            *(client.post(TEXT, json={**body, "model": name}) for name in names)
        )
    return [answer.raise_for_status().json() for answer in answers]


def error_of(answer: dict[str, Any], folder: Path) -> float:
    """The worst score of a generated token, relative to the spread of the true ones."""
    (choice,) = answer["choices"]
    found = np.array([row[0] for row in choice["probe_scores"]["scores"][:-1]], np.float64)
    sequence = [*PROMPT, *choice["token_ids"]]
    truth = truth_of(folder).streams(sequence)[POINT] @ DIRECTION_D
    generated = truth[len(PROMPT) : len(PROMPT) + len(found)]
    assert len(found) == len(choice["token_ids"]) - 1
    return float(np.abs(found - generated).max() / np.abs(generated).mean())


def test_adapters_loaded_at_run_time_have_scores_of_their_own_and_no_others_cache(
    served: Served,
) -> None:
    with httpx.Client(base_url=served.url, timeout=60, trust_env=False) as client:
        for name, folder in served.folders.items():
            loaded = client.post(ROUTES[0], json={"lora_name": name, "lora_path": str(folder)})
            assert loaded.status_code == 200, loaded.text
        listed = {one["id"] for one in client.get("/v1/models").json()["data"]}
    assert listed == {*served.merged}
    for _ in range(2):  # the second time from the prefix cache
        answers = asyncio.run(ask_all(served.url, [*served.merged]))
        texts = {tuple(answer["choices"][0]["token_ids"]) for answer in answers}
        assert len(texts) == len(answers)  # the adapters do change the model
        for answer, folder in zip(answers, served.merged.values(), strict=True):
            assert error_of(answer, folder) <= 1e-3
    assert error_of(answers[0], served.merged["red"]) > 0.01  # it would show


def test_an_adapter_that_is_unloaded_is_unknown_and_the_others_go_on(served: Served) -> None:
    with httpx.Client(base_url=served.url, timeout=60, trust_env=False) as client:
        assert client.post(ROUTES[1], json={"lora_name": "red"}).status_code == 200
        gone = client.post(TEXT, json={"model": "red", "prompt": "Hi", "clairai": {}})
        assert (gone.status_code, "red" in gone.text) == (404, True)
    answers = asyncio.run(ask_all(served.url, [MODEL, "blue"]))
    for answer, name in zip(answers, (MODEL, "blue"), strict=True):
        assert error_of(answer, served.merged[name]) <= 1e-3
