"""Two engine cores behind one API server (`--data-parallel-size 2`): one proxy reads both rings,
and what they capture is one store.

The tests run in this order, on one server; the last one kills an engine core.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import secrets
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
from clairai.errors import WeightsError
from clairai.fields.request_fields import new_stream_id
from clairai.points import Point
from clairai.probe.files import dumps
from clairai.probe.model import Probe
from clairai.ring.attach import RingReader
from clairai.ring.reader import Record
from clairai.store.disk import claim_folder
from clairai.store.recover import verify
from clairai.weights import Sender, transport
from clairai.weights.socket_client import RankClients, connect_ranks
from clairai.weights.trainer_session import take_state
from clairai.wire import ring_messages
from clairai.wire.weights_messages import WeightsCommitted, WeightsRank, WeightsState
from tests.engine import (
    adapters,
    attribution,
    core_faults,
    core_steering,
    ranked,
    weighed,
)
from tests.engine import server as parts
from tests.engine.attribution import Sent, Verdict
from tests.engine.core_steering import TOLERANCE
from tests.engine.hooked import ALWAYS, error_of, positions, vector_file
from tests.engine.serving import Served, serving
from tests.engine.steering import Answer, Ask
from tests.fidelity.oracle import hidden_states, relative_error
from tests.fidelity.steered import Change, Floats
from tests.support.ring_engine import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
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
    *("--weight-transfer-config", '{"backend": "clairai_ipc"}'),
    *("--enable-lora", "--max-lora-rank", "8"),
    *("--worker-extension-cls", core_faults.EXTENSION),
)
ADAPTER: Final = "adapter"
CPU: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # vLLM's own routes for trainers, and to call its workers
}


def _deep_probe(name: str, seed: int) -> Probe:
    direction_D = np.random.default_rng(seed).standard_normal(parts.WIDTH).astype(np.float32)
    return Probe(name, DEEP, direction_D)


class Layout(NamedTuple):
    """How each core runs its model."""

    num_drafts: int = 0  # so many tokens it drafts in a step
    num_ranks: int = 1

    @property
    def options(self) -> tuple[str, ...]:
        ranks = ("--tensor-parallel-size", str(self.num_ranks))
        if not self.num_drafts:
            return ranks
        given = {"method": "ngram", "num_speculative_tokens": self.num_drafts}
        given |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
        return (*ranks, "--speculative-config", json.dumps(given))

    @property
    def environment(self) -> dict[str, str]:
        return CPU | {"VLLM_CPU_OMP_THREADS_BIND": "|".join(["0", "1"] * self.num_ranks)}


MAX_DRAFTS: Final = 3
# The model has nine heads, and three for keys and values.
LAYOUTS: Final = {
    "plain": Layout(),
    "speculating": Layout(num_drafts=MAX_DRAFTS),
    "tensor-3": Layout(num_ranks=3),
}


@pytest.fixture(
    scope="module",
    params=[
        "plain",
        pytest.param("speculating", marks=pytest.mark.layouts),
        pytest.param("tensor-3", marks=pytest.mark.layouts),
    ],
)
def layout(request: pytest.FixtureRequest) -> Layout:
    return LAYOUTS[request.param]


@pytest.fixture(scope="module")
def captures(layout: Layout, tmp_path_factory: pytest.TempPathFactory) -> Path:
    del layout  # each has a folder of its own
    return tmp_path_factory.mktemp("captures") / "store"


@pytest.fixture(scope="module")
def adapter(cut_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapters.make(cut_model, tmp_path_factory.mktemp("adapter") / ADAPTER, seed=3)


@pytest.fixture(scope="module")
def served(
    cut_model: Path,
    layout: Layout,
    captures: Path,
    adapter: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    scratch = tmp_path_factory.mktemp("cores")
    options = (*OPTIONS, *layout.options, "--lora-modules", f"{ADAPTER}={adapter}")
    deep, ours = [_deep_probe("deep", 1)], ("--capture", str(captures), "--steering")
    with serving(cut_model, scratch, options, layout.environment, deep, ours) as found:
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
        self._end_thread()
        while self._poll():
            pass
        return sum(reader.statistics().lost for reader in self.readers)

    def rows_of(self, core: int, stream: int) -> NDArray[np.void]:
        found = [one.rows[one.rows["stream"] == stream] for one in self.records[core]]
        return np.concatenate([np.empty(0, ring_messages.ROW), *found])

    def _end_thread(self) -> None:
        self._is_done.set()
        self._thread.join()

    def close(self) -> None:
        self._end_thread()
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


async def _ask(
    engine: httpx.AsyncClient,
    sent: Sent,
    max_tokens: int,
    core: int | None,
    is_on_its_way: asyncio.Event | None = None,
) -> None:
    headers = {} if core is None else {"X-data-parallel-rank": str(core)}

    async def trace(event: str, _: Any) -> None:
        if event == "http11.send_request_body.complete" and is_on_its_way is not None:
            is_on_its_way.set()

    body, extensions = _body(sent, max_tokens), {"trace": trace}
    answer = await engine.post("/v1/completions", json=body, headers=headers, extensions=extensions)
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
            is_on_its_way = asyncio.Event()
            asking = asyncio.ensure_future(_ask(engine, one, lengths[number], None, is_on_its_way))
            if number in aborted:
                one.is_aborted = True
                await is_on_its_way.wait()
                await asyncio.wait({asking}, timeout=float(rng.random()))
                asking.cancel()
            await asyncio.gather(asking, return_exceptions=number in aborted)

    async with served.engine() as engine:
        await asyncio.gather(*map(ask, range(NUM_REQUESTS)))
        for core in (0, 1):
            # Any four of these have more tokens than a core has room for: some are preempted.
            crowd = [Sent(first + len(sent) + at, [7 + at] * 40, False) for at in range(8)]
            sent += crowd
            await asyncio.gather(*(_ask(engine, one, 80, core) for one in crowd))
            # The second finds the prompt of the first in the prefix cache of its core.
            prompt = rng.integers(5, 30000, 96).tolist()
            for _ in range(2):
                sent.append(Sent(first + len(sent), prompt, False))
                await _ask(engine, sent[-1], 4, core)
            # Each core takes a step that reports the ones before finished.
            await _ask(engine, Sent(first - 1 - core, [1, 2], False), 2, core)
    return {one.stream: one for one in sent}


def test_every_row_of_both_cores_belongs_to_its_request(served: Served, layout: Layout) -> None:
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
    verdict = _judge(collector, sent, served.vocabulary_VD, names, lost, layout.num_drafts)
    assert verdict.wrong == []
    assert (verdict.unaccounted, verdict.lost) == (0, 0)
    assert min(verdict.cached_tokens, verdict.recomputed_rows, verdict.aborted) > 0
    for records in collector.records:  # both cores worked
        streams = {int(stream) for one in records for stream in one.rows["stream"]} & set(sent)
        assert len(streams) > NUM_REQUESTS // 8


def test_cores_that_speculate_have_drafts_accepted_and_rejected(
    served: Served, layout: Layout
) -> None:
    """Else a run with drafts would say nothing."""
    for accepted, rejected in _count_drafts(served):
        assert (accepted > 10) == (rejected > 10) == (layout.num_drafts > 0)


def _count_drafts(served: Served) -> NDArray[np.float64]:
    """Of each core: how many were accepted, and how many rejected."""
    with served.client() as client:
        metrics = client.get("/metrics").text

    def count(kind: str, core: int) -> float:
        name = f"vllm:spec_decode_num_{kind}_tokens_total"
        found = re.findall(rf'^{name}{{engine="{core}".*}} (\S+)$', metrics, re.MULTILINE)
        return sum(map(float, found))

    counts = [(count("draft", core), count("accepted", core)) for core in (0, 1)]
    return np.array([(accepted, proposed - accepted) for proposed, accepted in counts])


def _judge(
    collector: Collector,
    sent: dict[int, Sent],
    vocabulary_VD: NDArray[np.float32],
    names: list[str],
    lost: int,
    num_drafts: int,
) -> Verdict:
    """All rows of both rings at once: a request's rows are in one of them."""
    records = [one for of_core in collector.records for one in of_core]
    rows = np.concatenate([one.rows for one in records])
    scores_RP = np.concatenate([one.scores_RC for one in records])
    columns = [names.index(f"embedding:{i}") for i in range(attribution.NUM_PROBES)]
    ours = np.isin(rows["stream"], np.array(list(sent), np.uint64))
    expected_VP = vocabulary_VD @ attribution.projections(vocabulary_VD)
    scores_RP = scores_RP[ours][:, columns]
    return attribution.judge(rows[ours], scores_RP, sent, expected_VP, lost, num_drafts)


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
            _check_deep_scores(served.model, records, sent[core], names)
    finally:
        collector.close()


def _check_deep_scores(model: Path, records: list[Record], sent: Sent, names: list[str]) -> None:
    """As Hugging Face computes them in one process."""
    rows = np.concatenate([one.rows for one in records])
    scores_RP = np.concatenate([one.scores_RC for one in records])
    ours = (rows["stream"] == sent.stream) & (rows["phase"] <= ring_messages.DECODE)
    tokens = [*sent.prompt, *sent.output][:-1]
    found = rows[ours]["position"].tolist()
    assert found == [*range(len(found))]
    # The last token is forwarded only if it was a draft; others may have been accepted behind it.
    assert len(tokens) <= len(found) <= len(tokens) + 1 + MAX_DRAFTS
    states_TD = hidden_states(str(model), tokens)[str(DEEP)].astype(np.float64)
    for name, seed in (("deep", 1), ("new", 2)):
        direction_D = _deep_probe(name, seed).direction_D.astype(np.float64)
        size_T = np.linalg.norm(states_TD, axis=1) * np.linalg.norm(direction_D)
        scores_T = scores_RP[ours][: len(tokens), names.index(name)]
        error_T = np.abs(scores_T - states_TD @ direction_D) / size_T
        assert np.quantile(error_T, 0.999) <= 1e-5


@pytest.fixture(scope="module")
def steered(served: Served) -> Served:
    """The server with a vector that both of its cores have."""
    assert _put_vector(served, core_steering.NAME, core_steering.ROWS)[0] == 201
    return served


def _put_vector(served: Served, name: str, rows: dict[str, Floats]) -> tuple[int, int | None]:
    """The status, and the version of the vectors then."""
    with served.client() as client:
        changed = client.put(f"/v1/steering/vectors/{name}", content=vector_file(name, rows))
    return changed.status_code, changed.json().get("version")


class Told(NamedTuple):
    """An answer, the cores whose rings have rows of it, and how many tokens were cached there."""

    answer: Answer
    cores: list[int]
    num_cached: int


def _answer(
    served: Served, asks: list[tuple[Ask, int | None]], *, is_in_turn: bool = False
) -> list[Told]:
    """Each by the core it names, or by one that vLLM chooses; all at once, or in turn."""
    collector, first = Collector(served.rings()), new_stream_id() // 2

    async def ask_all() -> list[Answer]:
        async with served.engine() as engine:
            asked = [
                core_steering.answer(engine, ask, first + at, core)
                for at, (ask, core) in enumerate(asks)
            ]
            return [await one for one in asked] if is_in_turn else await asyncio.gather(*asked)

    try:
        answers = asyncio.run(ask_all())
        with served.client() as client:
            client.get("/v1/clairai")  # returns when all is published
        assert collector.finish() == 0
    finally:
        collector.close()
    return [_tell(collector, answer, first + at) for at, answer in enumerate(answers)]


def _tell(collector: Collector, answer: Answer, stream: int) -> Told:
    rows_of = [collector.rows_of(core, stream) for core in (0, 1)]
    rows = np.concatenate(rows_of)
    cached = rows[rows["phase"] == ring_messages.CACHED]
    cores = [core for core, found in enumerate(rows_of) if len(found)]
    return Told(answer, cores, int(cached["span"].sum()))


def _error(served: Served, ask: Ask, told: Told, *choices: list[Change]) -> float:
    """The smallest, if each of several lists of changes might be right."""
    return min(error_of(served.model, ask, told.answer, changes) for changes in choices)


NAMED: Final = [Change("add", core_steering.ROWS, ALWAYS)]


def test_every_answer_is_steered_as_it_asks_whichever_core_wrote_it(
    steered: Served, layout: Layout
) -> None:
    """Beside each a plain one with the same prompt, on the same core, at the same time."""
    rng, before = np.random.default_rng(31), _count_drafts(steered)
    deep = _deep_probe("deep", 1)
    kinds = core_steering.make_kinds(steered.vocabulary_VD, deep, layout.num_drafts)
    asks: list[tuple[Ask, int | None]] = []
    wanted: list[tuple[str, list[list[Change]]]] = []
    for (name, kind), core in itertools.product(kinds.items(), (0, 1, None)):
        # Repeated: a core that speculates drafts from the prompt.
        prompt = (*rng.integers(5, 30000, int(rng.integers(8, 16))).tolist(),) * 3
        ask = Ask(prompt, kind.steer, core_steering.NUM_NEW, stop=kind.stop)
        asks += [(ask, core), (Ask(prompt, num_new=core_steering.NUM_NEW), core)]
        wanted += [(name, kind.changes(len(prompt))), ("plain", [[]])]
    served_by: dict[str, set[int]] = {name: set() for name, _ in wanted}
    for (ask, core), (name, changes), told in zip(
        asks, wanted, _answer(steered, asks), strict=True
    ):
        assert _error(steered, ask, told, *changes) <= TOLERANCE, name
        assert name == "plain" or _error(steered, ask, told, []) > 10 * TOLERANCE, name
        assert len(told.cores) == 1
        assert core in (None, *told.cores)
        served_by[name].update(told.cores)
    assert all(cores == {0, 1} for cores in served_by.values())
    assert ((_count_drafts(steered) - before) > 0).all() == (layout.num_drafts > 0)


def test_a_core_that_does_not_steer_is_found_out(steered: Served) -> None:
    """Else the comparison with Hugging Face would say nothing of that core."""
    rng = np.random.default_rng(32)

    def plant(core: str) -> None:
        asyncio.run(_call_workers(steered, core_faults.METHOD, core))

    def ask_both() -> list[tuple[float, float]]:
        """Of each core: the distance from what was asked, and from no steering."""
        ask = Ask((*rng.integers(5, 30000, 40).tolist(),), (core_steering.STEER,))
        told = _answer(steered, [(ask, core) for core in (0, 1)])
        return [(_error(steered, ask, one, NAMED), _error(steered, ask, one, [])) for one in told]

    plant("1")
    try:
        (right, far), (wrong, near) = ask_both()
    finally:
        plant("none")
    assert max(right, near) <= TOLERANCE
    assert min(wrong, far) > 10 * TOLERANCE
    assert max(error for error, _ in ask_both()) <= TOLERANCE


async def _call_workers(served: Served, method: str, *args: str) -> None:
    async with served.engine() as engine:
        called = await engine.post("/collective_rpc", json={"method": method, "args": args})
        assert called.status_code == 200, called.text


def test_a_prompt_that_was_steered_on_a_core_is_not_found_there_without_steering(
    steered: Served,
) -> None:
    """The prefix cache of each core is its own: on the second one the prompt is new again."""
    prompt = (*np.random.default_rng(33).integers(5, 30000, 80).tolist(),)
    steer, plain = Ask(prompt, (core_steering.STEER,), 4), Ask(prompt, num_new=4)
    later = Ask(prompt, (core_steering.STEER | {"when": "generation"},), 4)
    generated = [Change("add", core_steering.ROWS, positions(len(prompt)))]
    turns = [(steer, NAMED), (plain, []), (steer, NAMED), (plain, []), (later, generated)]
    for core in (0, 1):
        told = _answer(steered, [(ask, core) for ask, _ in turns], is_in_turn=True)
        assert [one.cores for one in told] == [[core]] * len(turns)
        assert [one.num_cached for one in told] == [0, 0, 64, 64, 64]
        for one, (ask, changes) in zip(told, turns, strict=True):
            assert _error(steered, ask, one, changes) <= TOLERANCE


def test_a_change_of_a_vector_reaches_both_cores_with_one_version_or_none(steered: Served) -> None:
    prompt = (*np.random.default_rng(34).integers(5, 30000, 80).tolist(),)
    ask = Ask(prompt, ({"vector": "changed"},), 8)
    old, new = core_steering.ROWS, core_steering.OTHER_ROWS

    def check(rows: dict[str, Floats], others: dict[str, Floats]) -> None:
        for one in _answer(steered, [(ask, 0), (ask, 1)]):
            assert _error(steered, ask, one, [Change("add", rows, ALWAYS)]) <= TOLERANCE
            assert _error(steered, ask, one, [Change("add", others, ALWAYS)]) > 10 * TOLERANCE

    status, version = _put_vector(steered, "changed", old)
    assert status == 201
    assert version is not None
    check(old, new)
    assert _put_vector(steered, "changed", {"post_block.3": np.ones(7)}) == (400, None)
    check(old, new)
    assert _put_vector(steered, "changed", new) == (200, version + 1)
    check(new, old)
    with steered.client() as client:
        gone = client.delete("/v1/steering/vectors/changed").json()
    assert gone["version"] == version + 2
    for core in (0, 1):
        with pytest.raises(AssertionError, match="no vector is named 'changed'"):
            _answer(steered, [(ask, core)])


def test_global_steering_reaches_both_cores_and_leaves_both(steered: Served) -> None:
    prompt = (*np.random.default_rng(35).integers(5, 30000, 40).tolist(),)
    plain = Ask(prompt, num_new=8)
    own = Ask(prompt, ({"vector": core_steering.NAME, "when": "prompt"},), 8)
    asks: list[tuple[Ask, int | None]] = [(ask, core) for ask in (plain, own) for core in (0, 1)]
    tier = Change("add", core_steering.ROWS, positions(len(prompt)), -2.0)
    prompted = Change("add", core_steering.ROWS, positions(0, len(prompt)))

    def check(*tiers: Change) -> None:
        wanted = [[*tiers], [*tiers], [*tiers, prompted], [*tiers, prompted]]
        for (ask, _), one, changes in zip(asks, _answer(steered, asks), wanted, strict=True):
            assert _error(steered, ask, one, changes) <= TOLERANCE

    def change(entries: list[dict[str, Any]]) -> httpx.Response:
        with steered.client() as client:
            return client.post("/v1/steering", json={"decode": entries})

    changed = change([core_steering.STEER | {"scale": -2.0}])
    assert changed.status_code == 200, changed.text
    try:
        check(tier)
        assert change([{"vector": "nobody's"}]).status_code == 400
        check(tier)
    finally:
        cleared = change([])
    assert cleared.json()["version"] == changed.json()["version"] + 1
    check()


class Changed(NamedTuple):
    """A request whose steering was changed while it ran."""

    answers: list[Answer]
    positions: list[int]  # from which each of them was steered; in the order of the cores
    refusal: httpx.Response  # to a change that cannot be made


async def _change_running(served: Served, ask: Ask, core: int | None, n: int) -> Changed:
    """Ask until an answer was long enough for the change to come in time, on a busy machine."""
    for _ in range(10):
        stream = new_stream_id()
        # Nearly greedy: vLLM does not sample several greedy answers.
        body = core_steering.make_body(ask, stream) | {"n": n, "temperature": 0.01}
        found, (refusal, changed) = await _ask_and_change(served, body, core, stream)
        starts = changed.json().get("positions", ())
        last = len(ask.prompt) + ask.num_new - 8
        if len(starts) == n and max(starts) < last:
            return Changed([*core_steering.join_parts(found).values()], starts, refusal)
    raise AssertionError("every answer had ended before its change came")


async def _ask_and_change(
    served: Served, body: dict[str, Any], core: int | None, stream: int
) -> tuple[list[dict[str, Any]], list[httpx.Response]]:
    """The parts of the answer, and the replies to two changes when the first part is there."""
    found: list[dict[str, Any]] = []
    replies: list[httpx.Response] = []
    path = f"/v1/steering/requests/{stream}"
    async with served.engine() as engine:
        async for choices in core_steering.answer_parts(engine, body, core):
            found += choices
            if not replies:
                bodies = [{"steer": [{"vector": v}]} for v in ("nobody's", core_steering.NAME)]
                replies = [await engine.post(path, json=one) for one in bodies]
    return found, replies


@pytest.mark.parametrize(("core", "n"), [(0, 1), (1, 1), (None, 4)], ids=["first", "second", "n"])
def test_a_change_reaches_the_cores_that_run_the_request(
    steered: Served, core: int | None, n: int
) -> None:
    """Also a request's answers on both cores; a refusal is that of a core that runs one."""
    prompt = (*np.random.default_rng(36 + n).integers(5, 30000, 20).tolist(),)
    ask = Ask(prompt, num_new=100)
    collector = Collector(steered.rings())
    try:
        found = asyncio.run(_change_running(steered, ask, core, n))
        with steered.client() as client:
            client.get("/v1/clairai")
        collector.finish()
    finally:
        collector.close()
    assert found.refusal.status_code == 400
    assert "nobody's" in found.refusal.json()["error"]["message"]
    wanted = [[Change("add", core_steering.ROWS, positions(start))] for start in found.positions]
    assert len(found.answers) == n
    for one in found.answers:
        told = Told(one, [], 0)
        assert _error(steered, ask, told, *wanted) <= TOLERANCE
        assert _error(steered, ask, told, []) > 10 * TOLERANCE
    is_busy = [any(_has_answers(records) for records in of_core) for of_core in collector.records]
    assert is_busy == ([True, True] if core is None else [core == 0, core == 1])


def _has_answers(record: Record) -> bool:
    return bool((record.rows["phase"] == ring_messages.DECODE).any())


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
    """Ask for a capture of all tokens at all points."""
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
    # On a busy machine the rows are safe only after the response.
    assert told["state"] in ("open", "writing", "kept")
    assert (told["lost"], told.get("reason")) == (0, None)
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

    found = asyncio.run(ask())
    with served.client() as client:
        until(
            lambda: all(one["state"] == "kept" for one in _list_captures(client)),
            parts.DEADLINE_S,
        )
        rows = {one["id"]: one["rows"] for one in _list_captures(client)}
    for one in itertools.chain(*found):
        assert rows[one.id] >= 2 * sum(map(len, one.tokens))  # at two points
    return found


def _list_captures(client: httpx.Client) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = client.get("/v1/captures").json()["data"]
    return listed


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


@pytest.fixture(scope="module")
def new(cut_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shape, with other numbers."""
    return weighed.perturb(cut_model, tmp_path_factory.mktemp("new") / "new")


def _sender(served: Served, **more: Any) -> Sender:
    return Sender(served.url, **{"runtime_dir": str(served.runtime), **more})


def _check_cores(served: Served, model: Path, version: int) -> None:
    """Both cores score as Hugging Face's model of this folder does, and say the version."""
    collector = Collector(served.rings())
    rng, first = np.random.default_rng(version), new_stream_id() // 2
    sent = [Sent(first + core, rng.integers(5, 30000, 40).tolist(), True) for core in (0, 1)]

    async def ask() -> None:
        async with served.engine() as engine:
            await asyncio.gather(*(_ask(engine, sent[core], 12, core) for core in (0, 1)))

    try:
        asyncio.run(ask())
        with served.client() as client:
            client.get("/v1/clairai")  # returns when all is published
            state = client.get("/v1/weights").json()
        assert (state["version"], state["is_torn"]) == (version, False)
        assert len({rank["epoch"] for rank in state["ranks"]}) == 2
        collector.finish()
        for core in (0, 1):
            reader, records = collector.readers[core], collector.records[core]
            banks = [reader.bank(one.bank_version) for one in records]
            assert {bank.weights for bank in banks} == {version}
            names = [one.name for one in banks[0].probes]
            _check_deep_scores(model, records, sent[core], names)
    finally:
        collector.close()


def test_new_weights_reach_both_cores_with_one_version(
    served: Served, new: Path, tmp_path: Path
) -> None:
    """Through the sockets of all ranks, and over HTTP where those cannot be reached."""
    near = _sender(served).send(new, label="step-1")
    assert (near.home, near.version) == ("host", 1)
    _check_cores(served, new, 1)
    far = _sender(served, runtime_dir=str(tmp_path)).send(served.model)
    assert (far.home, far.version) == ("http", 2)
    _check_cores(served, served.model, 2)


def _is_of_one_layer(name: str) -> bool:
    return ".layers.1." in name


def test_a_part_of_the_model_and_a_probe_reach_both_cores(served: Served, new: Path) -> None:
    sender, tensors = _sender(served), ranked.pick(new, bool)
    row_D = _deep_probe("deep", 1).direction_D
    part = {name: tensor for name, tensor in tensors.items() if _is_of_one_layer(name)}
    assert sender.send(part).version == 3
    turned = sender.send({"probe::deep": -row_D})
    assert (turned.version, turned.bank_version is None) == (3, False)
    rest = {name: tensor for name, tensor in tensors.items() if name not in part}
    assert sender.send(rest | {"probe::deep": row_D.copy()}).version == 4
    _check_cores(served, new, 4)
    with served.client() as client:  # the banks have one version still
        changed = client.put("/v1/probes/new", content=dumps(_deep_probe("new", 2)))
        assert changed.status_code == 200, changed.text


def test_a_core_that_did_not_get_all_keeps_both_at_the_old_weights(
    served: Served, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect_first(folder: Path, ranks: list[WeightsRank]) -> RankClients:
        return connect_ranks(folder, ranks[: len(ranks) // 2])

    with monkeypatch.context() as planted:
        planted.setattr(transport, "connect_ranks", connect_first)
        with pytest.raises(WeightsError, match=r"engine core 1: 0 of .* buffers have come"):
            _sender(served).send(served.model)
    _check_cores(served, new, 4)
    with pytest.raises(WeightsError, match="nothing named"):
        _sender(served).send({"model.layers.99.extra": np.ones(3, np.float32)})


def test_every_answer_under_load_is_of_one_version_whichever_cores_wrote_it(
    served: Served,
) -> None:
    """The answers to one request (n = 2) may be written by both cores.

    Without an end to such requests new weights would wait, so each client sends a few.
    """
    collector = Collector(served.rings())
    rng, first = np.random.default_rng(12), new_stream_id() // 2
    sent: list[Sent] = []
    begun = asyncio.Event()

    async def ask(engine: httpx.AsyncClient) -> None:
        one = Sent(first + len(sent), rng.integers(5, 30000, 20).tolist(), False)
        sent.append(one)
        body = _body(one, int(rng.integers(4, MAX_NEW))) | {"n": 2}
        # A connection of its own: one that waits while weights are sent may be closed for that.
        headers = {"Connection": "close"}
        answer = await engine.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        begun.set()

    async def send() -> int:
        await begun.wait()
        return (await asyncio.to_thread(_sender(served).send, served.model)).version

    async def ask_until(engine: httpx.AsyncClient, sending: asyncio.Future[int]) -> None:
        for _ in range(4):
            await ask(engine)
        await sending
        await ask(engine)

    async def main() -> int:
        async with served.engine() as engine:
            sending = asyncio.ensure_future(send())
            await asyncio.gather(*(ask_until(engine, sending) for _ in range(12)))
            return await sending

    with served.client() as client:
        before = client.get("/v1/weights").json()["version"]
    try:
        assert asyncio.run(main()) == before + 1
        with served.client() as client:
            client.get("/v1/clairai")  # returns when all is published
        assert collector.finish() == 0
        versions = _find_versions(collector, sent)
    finally:
        collector.close()
    assert all(len(found) == 1 for found in versions.values()), versions
    assert {*itertools.chain(*versions.values())} == {before, before + 1}
    _check_cores(served, served.model, before + 1)


def _find_versions(collector: Collector, sent: list[Sent]) -> dict[int, set[int | None]]:
    """The weights that the rows of each stream are of, on whichever cores."""
    versions: dict[int, set[int | None]] = {one.stream: set() for one in sent}
    read = zip(collector.readers, collector.records, strict=True)
    for reader, record in ((reader, one) for reader, records in read for one in records):
        weights = reader.bank(record.bank_version).weights
        for stream in {int(stream) for stream in record.rows["stream"]} & {*versions}:
            versions[stream].add(weights)
    return versions


class TrainerRoutes:
    """What a Sender asks, by the routes of vLLM's trainers: they have no answers."""

    def __init__(self, engine: httpx.Client, runtime: Path) -> None:
        self._engine, self._runtime = engine, runtime

    def post(self, path: str, body: dict[str, Any]) -> None:
        answer = self._engine.post(path, json=body)
        if answer.status_code != 200:
            raise WeightsError(answer.text)

    def state(self) -> WeightsState:
        session = secrets.token_hex(16)
        self.post("/init_weight_transfer_engine", {"init_info": {"session": session}})
        return take_state(self._runtime, session)

    def check(self, manifest: bytes) -> None:
        raise NotImplementedError

    def plan(self, manifest: bytes) -> None:
        self.post("/update_weights", {"update_info": {"plan": manifest.decode()}})

    def commit(self, manifest: bytes) -> WeightsCommitted:
        self.post("/update_weights", {"update_info": {"manifest": manifest.decode()}})
        return WeightsCommitted(self.state().version, "", 0, 0.0)


@pytest.fixture
def routes(served: Served) -> Iterator[TrainerRoutes]:
    (path,) = served.runtime.glob("*/api.sock")
    way = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=way, base_url="http://engine", timeout=600) as engine:
        yield TrainerRoutes(engine, served.runtime)


def test_vllms_own_routes_for_trainers_reach_both_cores_or_none(
    served: Served, new: Path, routes: TrainerRoutes
) -> None:
    sender = Sender(routes, runtime_dir=str(served.runtime))
    routes.post("/pause", {})
    routes.post("/start_weight_update", {})
    half = ranked.pick(new, ranked.is_query)
    with pytest.raises(WeightsError, match=r"k_proj\.weight.* is missing"):
        sender.send(half)
    routes.post("/start_weight_update", {})  # the one before has ended
    assert sender.send(new).version == 6
    routes.post("/finish_weight_update", {})
    routes.post("/resume", {})
    _check_cores(served, new, 6)


def test_an_adapter_changes_the_weights_that_serve_on_both_cores(
    served: Served, new: Path, adapter: Path, tmp_path: Path
) -> None:
    """They are those that were sent last."""
    merged = adapters.merge(new, adapter, tmp_path / "merged")
    right = ranked.greedy(merged)
    assert right != ranked.greedy(new)

    async def ask(engine: httpx.AsyncClient, prompt: tuple[int, ...], core: int) -> tuple[int, ...]:
        body = {"model": ADAPTER, "prompt": list(prompt), "max_tokens": ranked.NUM_NEW}
        body |= {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
        headers = {"X-data-parallel-rank": str(core)}
        answer = await engine.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return tuple(answer.json()["choices"][0]["token_ids"])

    async def ask_all() -> list[list[tuple[int, ...]]]:
        async with served.engine() as engine:
            return [
                [await ask(engine, prompt, core) for prompt in ranked.PROMPTS] for core in (0, 1)
            ]

    assert asyncio.run(ask_all()) == [right, right]


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
    assert served.process.wait(parts.DEADLINE_S) == 3
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
