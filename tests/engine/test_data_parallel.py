"""Two engine cores behind one API server (`--data-parallel-size 2`): one proxy reads both rings,
and what they capture is one store.

The tests run in this order, on one server; the last one kills an engine core.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load

import clairai
from clairai.fields.request_fields import new_stream_id
from clairai.points import Point
from clairai.probe.files import dumps
from clairai.probe.model import Probe
from clairai.ring.attach import RingReader
from clairai.ring.reader import Record
from clairai.store.disk import claim_folder
from clairai.store.recover import verify
from clairai.wire import ring_messages
from tests.engine import attribution
from tests.engine import server as parts
from tests.engine.attribution import Sent, Verdict
from tests.engine.serving import Served, serving
from tests.fidelity.oracle import hidden_states, relative_error

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]
DIED: Final = "died unexpectedly (exit code: "  # v1/executor/multiproc_executor.py, 0.32

NUM_REQUESTS: Final = 120
NUM_AT_ONCE: Final = 40
MAX_PROMPT: Final = 60
MAX_NEW: Final = 24
DEEP: Final = Point.parse("post_block.3")
# Small, so that prompts are cut up and requests are preempted.
OPTIONS: Final = (
    *("--data-parallel-size", "2", "--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", "128", "--max-num-seqs", "16", "--max-num-batched-tokens", "64"),
    *("--block-size", "32", "--num-gpu-blocks-override", "14", "--enable-prefix-caching"),
)
CPU: Final = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def _deep_probe(name: str, seed: int) -> Probe:
    direction_D = np.random.default_rng(seed).standard_normal(parts.WIDTH).astype(np.float32)
    return Probe(name, DEEP, direction_D)


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("captures") / "store"


@pytest.fixture(scope="module")
def served(
    cut_model: Path, captures: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    scratch = tmp_path_factory.mktemp("cores")
    deep, ours = [_deep_probe("deep", 1)], ("--capture", str(captures))
    with serving(cut_model, scratch, OPTIONS, CPU, deep, ours) as found:
        yield found


class Collector:
    """Reads the rings of both cores while requests run."""

    def __init__(self, readers: list[RingReader]) -> None:
        self.readers = readers
        self.records: list[list[Record]] = [[] for _ in readers]
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while not self._is_done.wait(0.005):
            self._poll()

    def _poll(self) -> bool:
        found = [reader.poll() for reader in self.readers]
        for records, more in zip(self.records, found, strict=True):
            records += more
        return any(found)

    def finish(self) -> int:
        """Read what is left; how many records were lost."""
        self._is_done.set()
        self._thread.join()
        while self._poll():
            pass
        return sum(reader.statistics().lost for reader in self.readers)

    def close(self) -> None:
        for reader in self.readers:
            reader.close()


def _body(sent: Sent, max_tokens: int) -> dict[str, Any]:
    fields = {"stream": sent.stream, "prompt_scores": sent.wants_prompt_scores}
    return {
        "model": parts.MODEL,
        "prompt": sent.prompt,
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "vllm_xargs": {"clairai": json.dumps(fields)},
    }


async def _ask(engine: httpx.AsyncClient, sent: Sent, max_tokens: int, core: int | None) -> None:
    headers = {} if core is None else {"X-data-parallel-rank": str(core)}
    answer = await engine.post("/v1/completions", json=_body(sent, max_tokens), headers=headers)
    assert answer.status_code == 200, answer.text
    sent.output = answer.json()["choices"][0]["token_ids"]


async def _load(served: Served, rng: np.random.Generator) -> dict[int, Sent]:
    plan = attribution.Plan(NUM_REQUESTS, NUM_AT_ONCE, MAX_PROMPT, MAX_NEW, seed=3)
    shared = rng.integers(5, 30000, MAX_PROMPT).tolist()
    first = new_stream_id() // 2
    sent = [attribution._next(rng, plan, shared, first + i) for i in range(NUM_REQUESTS)]
    lengths = rng.integers(1, MAX_NEW + 1, NUM_REQUESTS).tolist()
    aborted = set(rng.choice(NUM_REQUESTS, NUM_REQUESTS // 8, replace=False).tolist())
    places = asyncio.Semaphore(NUM_AT_ONCE)

    async def ask(number: int) -> None:
        one = sent[number]
        async with places:
            asking = asyncio.ensure_future(_ask(engine, one, lengths[number], None))
            if number in aborted:
                one.is_aborted = True
                await asyncio.wait({asking}, timeout=float(rng.random()))
                asking.cancel()
            await asyncio.gather(asking, return_exceptions=number in aborted)

    async with served.engine() as engine:
        await asyncio.gather(*map(ask, range(NUM_REQUESTS)))
        for core in (0, 1):
            # The second finds the prompt of the first in the prefix cache of its core.
            prompt = rng.integers(5, 30000, 96).tolist()
            for _ in range(2):
                sent.append(Sent(first + len(sent), prompt, False))
                await _ask(engine, sent[-1], 4, core)
            # Each core takes a step that reports the ones before finished.
            await _ask(engine, Sent(first - 1 - core, [1, 2], False), 2, core)
    return {one.stream: one for one in sent}


def test_every_row_of_both_cores_belongs_to_its_request(served: Served) -> None:
    collector = Collector(served.rings())
    try:
        sent = asyncio.run(_load(served, np.random.default_rng(3)))
        with served.client() as client:
            client.get("/v1/clairai")  # returns when all is published
        lost = collector.finish()
        bank = collector.readers[0].bank(collector.records[0][-1].bank_version)
    finally:
        collector.close()
    names = [one.name for one in bank.probes]
    verdict = _judge(collector, sent, served.vocabulary_VD, names, lost)
    assert verdict.wrong == []
    assert (verdict.unaccounted, verdict.lost) == (0, 0)
    assert min(verdict.cached_tokens, verdict.recomputed_rows, verdict.aborted) > 0
    for records in collector.records:  # both cores worked
        streams = {int(stream) for one in records for stream in one.rows["stream"]} & set(sent)
        assert len(streams) > NUM_REQUESTS // 8


def _judge(
    collector: Collector,
    sent: dict[int, Sent],
    vocabulary_VD: NDArray[np.float32],
    names: list[str],
    lost: int,
) -> Verdict:
    """All rows of both rings at once: a request's rows are in one of them."""
    records = [one for of_core in collector.records for one in of_core]
    rows = np.concatenate([one.rows for one in records])
    scores_RP = np.concatenate([one.scores_RC for one in records])
    columns = [names.index(f"embedding:{i}") for i in range(attribution.NUM_PROBES)]
    ours = np.isin(rows["stream"], np.array(list(sent), np.uint64))
    expected_VP = vocabulary_VD @ attribution.projections(vocabulary_VD)
    return attribution.judge(rows[ours], scores_RP[ours][:, columns], sent, expected_VP, lost)


def test_the_proxy_gives_every_answer_its_scores_whichever_core_wrote_it(served: Served) -> None:
    directions_DP = attribution.projections(served.vocabulary_VD)
    expected_VP = served.vocabulary_VD @ directions_DP

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        body = {
            "model": parts.MODEL,
            "prompt": f"Number {number} is",
            "max_tokens": 16,
            "ignore_eos": True,
            "return_token_ids": True,
            "clairai": {"probes": [f"embedding:{i}" for i in range(attribution.NUM_PROBES)]},
        }
        answer = (await client.post("/v1/completions", json=body)).json()
        (choice,) = answer["choices"]
        found = choice["probe_scores"]
        tokens = choice["token_ids"]
        assert found.get("lost", 0) == 0
        scores = np.array(found["scores"][:-1], np.float32)  # the last token is not forwarded
        np.testing.assert_allclose(scores, expected_VP[tokens[:-1]], rtol=1e-4, atol=1e-4)

    async def ask_all() -> None:
        async with httpx.AsyncClient(base_url=served.url, timeout=600, trust_env=False) as client:
            await asyncio.gather(*(ask(client, number) for number in range(12)))

    asyncio.run(ask_all())
    with served.client() as client:
        metrics = client.get("/metrics").text
        assert client.get("/health").json()["status"] == "ready"
    assert "clairai_rows_mismatched_total 0.0" in metrics
    for core in (0, 1):
        assert f'clairai_core_ring_attached{{engine="{core}"}} 1.0' in metrics
        counted = re.search(rf'clairai_core_rows_total{{engine="{core}"}} ([\d.]+)', metrics)
        assert counted is not None
        assert float(counted[1]) > 0


def test_a_change_reaches_both_cores_with_one_version_or_none(served: Served) -> None:
    new = dumps(_deep_probe("new", 2))
    too_wide = dumps(Probe("wide", DEEP, np.ones(7, np.float32)))
    with served.client() as client:
        before = client.get("/v1/probes").json()["version"]
        assert client.put("/v1/probes/wide", content=too_wide).status_code == 400
        changed = client.put("/v1/probes/new", content=new)
        assert changed.status_code == 201, changed.text
        version = changed.json()["version"]
    assert version == before + 1
    collector = Collector(served.rings())
    rng = np.random.default_rng(9)
    first = new_stream_id() // 2
    sent = [Sent(first + core, rng.integers(5, 30000, 40).tolist(), True) for core in (0, 1)]

    async def ask() -> None:
        async with served.engine() as engine:
            await asyncio.gather(*(_ask(engine, sent[core], 20, core) for core in (0, 1)))

    try:
        asyncio.run(ask())
        with served.client() as client:
            client.get("/v1/clairai")
        collector.finish()
        for core in (0, 1):
            reader, records = collector.readers[core], collector.records[core]
            assert {one.bank_version for one in records} == {version}
            names = [one.name for one in reader.bank(version).probes]
            _check_deep_scores(served, records, sent[core], names)
    finally:
        collector.close()


def _check_deep_scores(served: Served, records: list[Record], sent: Sent, names: list[str]) -> None:
    """As Hugging Face computes them in one process."""
    rows = np.concatenate([one.rows for one in records])
    scores_RP = np.concatenate([one.scores_RC for one in records])
    ours = (rows["stream"] == sent.stream) & (rows["phase"] <= ring_messages.DECODE)
    tokens = [*sent.prompt, *sent.output][:-1]
    assert rows[ours]["position"].tolist() == [*range(len(tokens))]
    states_TD = hidden_states(str(served.model), tokens)[str(DEEP)].astype(np.float64)
    for name, seed in (("deep", 1), ("new", 2)):
        direction_D = _deep_probe(name, seed).direction_D.astype(np.float64)
        size_T = np.linalg.norm(states_TD, axis=1) * np.linalg.norm(direction_D)
        error_T = np.abs(scores_RP[ours][:, names.index(name)] - states_TD @ direction_D) / size_T
        assert np.quantile(error_T, 0.999) <= 1e-5


class Kept(NamedTuple):
    """A captured request: its id, and for each answer the tokens that were forwarded."""

    id: str
    tokens: list[list[int]]

    @property
    def stream(self) -> int:
        return int(self.id, 16)


async def _capture(
    client: httpx.AsyncClient, prompt: list[int], headers: dict[str, str], *, n: int = 1
) -> Kept:
    """Ask for a capture of all tokens at all points; the response says that all is safe."""
    body = {
        "model": parts.MODEL,
        "prompt": prompt,
        "n": n,
        "max_tokens": 12,
        "temperature": 1.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    asked: dict[str, Any] = {"capture": True}
    is_proxy = client.base_url.host == "127.0.0.1"
    body |= {"clairai": asked} if is_proxy else {"vllm_xargs": {"clairai": json.dumps(asked)}}
    response = await client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    answer = response.json()
    tokens = [[*prompt, *one["token_ids"]][:-1] for one in answer["choices"]]
    told = answer["clairai"]["capture"]
    assert (told["state"], told["lost"], told.get("reason")) == ("kept", 0, None)
    assert told["rows"] >= 2 * sum(map(len, tokens))  # at two points
    return Kept(told["id"], tokens)


def _check_capture(
    served: Served, kept: Kept, choice: int, rows: Mapping[str, Any], truth: Mapping[str, Any]
) -> None:
    """`rows`: of one answer at one point each. An engine ahead may have one row more."""
    tokens = kept.tokens[choice]
    for point in ("pre_attn.0", str(DEEP)):
        found_ND = np.asarray(rows[point])[: len(tokens)]
        assert len(found_ND) == len(tokens)
        if point == "pre_attn.0":  # the embedding of the token, to the bit
            np.testing.assert_array_equal(found_ND, served.vocabulary_VD[tokens])
        else:
            assert np.quantile(relative_error(found_ND, truth[point]), 0.999) <= 1e-5


@pytest.fixture(scope="module")
def kept(served: Served) -> list[list[Kept]]:
    """Three captures of each core, then those of requests whose core vLLM chose."""
    rng = np.random.default_rng(21)

    def prompt() -> list[int]:
        return [int(token) for token in rng.integers(5, 30000, rng.integers(3, 40))]

    async def ask() -> list[list[Kept]]:
        proxy = httpx.AsyncClient(base_url=served.url, timeout=600, trust_env=False)
        async with served.engine() as engine, proxy as through:
            cores = [{"X-data-parallel-rank": str(core)} for core in (0, 1)]
            asked = [[_capture(engine, prompt(), core) for _ in range(3)] for core in cores]
            asked.append([_capture(through, prompt(), {}, n=1 + at % 3) for at in range(12)])
            return [await asyncio.gather(*of_core) for of_core in asked]

    return asyncio.run(ask())


def test_captures_of_both_cores_are_one_store_with_every_row_in_its_place(
    served: Served, kept: list[list[Kept]], captures: Path
) -> None:
    every = [one for of_core in kept for one in of_core]
    assert len({one.id for one in every}) == len(every)
    store = clairai.open(captures)
    assert {one.stream for one in every} == {one.stream for one in store.requests()}
    for one in every:
        request = store.request(one.stream)
        assert request.choices == (*range(len(one.tokens)),)
        for choice, tokens in enumerate(one.tokens):
            rows = {p: store.rows(one.stream, point=p, choice=choice) for p in request.points}
            assert rows["pre_attn.0"].token_id[: len(tokens)].tolist() == tokens
            assert rows["pre_attn.0"].position.tolist()[: len(tokens)] == [*range(len(tokens))]
            truth = hidden_states(str(served.model), tokens)
            _check_capture(served, one, choice, rows, truth)
    for core in (0, 1):  # each wrote its own, and others that vLLM gave it
        part = {one.stream for one in clairai.open(captures / f"engine-core-{core}").requests()}
        assert {one.stream for one in kept[core]} <= part
        assert part.isdisjoint(one.stream for one in kept[1 - core])
        assert part & {one.stream for one in kept[2]}


def test_clients_see_the_captures_of_both_cores_as_one_list(
    served: Served, kept: list[list[Kept]]
) -> None:
    every = [one for of_core in kept for one in of_core]
    with served.client() as client:
        listed = client.get("/v1/captures").json()
        assert {one["id"] for one in listed["data"]} == {one.id for one in every}
        assert all((one["state"], one["lost"]) == ("kept", 0) for one in listed["data"])
        assert listed["rows"] == sum(one["rows"] for one in listed["data"])
        names = ["fs of engine core 0", "fs of engine core 1"]
        assert [(one["name"], one["state"]) for one in listed["consumers"]] == [
            (name, "writing") for name in names
        ]
        newest = client.get("/v1/captures?limit=2").json()["data"]
        assert [one["id"] for one in newest] == [one["id"] for one in listed["data"][:2]]
        for one in every:
            file = load(client.get(f"/v1/captures/{one.id}?point=pre_attn.0").content)
            for choice, tokens in enumerate(one.tokens):
                is_own = file["choice"] == choice
                found_ND = file["rows.values"][is_own][: len(tokens)]
                np.testing.assert_array_equal(found_ND, served.vocabulary_VD[tokens])
        assert client.get("/health").json()["status"] == "ready"
        assert client.get("/v1/captures/00000000000000ff").status_code == 404


def test_a_captured_request_cannot_choose_a_stream_that_another_core_may_have(
    served: Served, captures: Path
) -> None:
    fields = {"stream": new_stream_id(), "capture": True}

    async def ask() -> httpx.Response:
        body = {"model": parts.MODEL, "prompt": "Once", "max_tokens": 2}
        async with served.engine() as engine:
            xargs = {"vllm_xargs": {"clairai": json.dumps(fields)}}
            return await engine.post("/v1/completions", json=body | xargs)

    response = asyncio.run(ask())
    assert response.status_code == 400, response.text
    assert "cannot choose its stream" in response.json()["error"]["message"]
    assert not clairai.open(captures).has(fields["stream"])


def test_a_killed_core_ends_the_engine_with_its_reason_and_leaves_what_was_kept(
    served: Served, kept: list[list[Kept]], captures: Path
) -> None:
    readers = served.rings()
    pid = readers[1].welcome.pid
    for reader in readers:
        reader.close()
    body = {"model": parts.MODEL, "prompt": "Once", "max_tokens": 100, "ignore_eos": True}
    with (
        served.client() as client,
        client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer,
    ):
        chunks = answer.iter_text()
        text = next(chunks)  # on a busy machine that may be all of it
        os.kill(pid, signal.SIGKILL)
        text += "".join(chunks)
    assert "error" in text or "[DONE]" in text  # cut off, or it ran on the other core
    assert served.process.wait(120) == 3
    # Whoever notices first: the watch over heartbeats, or vLLM, which ends in order by itself.
    said = served.said()
    assert f"(process {pid}) has ended" in said or DIED in said, said
    store = clairai.open(captures)
    for one in (one for of_core in kept for one in of_core):
        for choice, tokens in enumerate(one.tokens):
            rows = store.rows(one.stream, point="pre_attn.0", choice=choice)
            np.testing.assert_array_equal(rows[: len(tokens)], served.vocabulary_VD[tokens])
    for core in (0, 1):  # both writers have ended, and a restarted engine finds their folders whole
        with claim_folder(captures / f"engine-core-{core}") as disk:
            assert [one.fault for one in verify(disk) if one.fault] == []
