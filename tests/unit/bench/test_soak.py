"""The checks of a soak can fail: leaks, left-over descriptors and mixed-up rows are planted."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import httpx
import numpy as np
import pytest

from bench import soak_footprint as footprint
from bench.soak_clients import Answer, SoakClient, Tally, read_capture
from bench.soak_footprint import Sample
from bench.soak_graph import draw
from clairai.points import Point
from clairai.probe.model import Probe
from clairai.store.row_block import Origin, RowBlock
from clairai.store.shard import seal_safetensors
from clairai.wire.ring_messages import DECODE, ROW

POINT = "post_block.19"
PROBE = Probe("p", Point.parse(POINT), np.ones(4, np.float32), activation="sigmoid")


def samples(grow: Callable[[float], float], minutes: int = 18) -> list[Sample]:
    """One every five seconds, with noise of some MiB as a busy process has it."""
    noise = random.Random(1)  # noqa: S311
    return [
        Sample(at_s, "proxy", 7, 0, int(1024 * (100 + grow(at_s / 60) + noise.uniform(0, 6))), 9, 3)
        for at_s in range(0, 60 * minutes, 5)
    ]


def test_a_leak_of_two_mib_a_minute_is_a_fault() -> None:
    slopes, faults = footprint.judge_memory(samples(lambda minute: 2 * minute))
    assert slopes["proxy (7)"] == pytest.approx(2.0, abs=0.1)
    assert len(faults) == 1
    assert "grows by" in faults[0]


def test_a_leak_in_steps_is_a_fault() -> None:
    _, faults = footprint.judge_memory(samples(lambda minute: 8 * (minute // 4)))
    assert len(faults) == 1


def test_noise_and_a_single_jump_are_no_leak() -> None:
    for grow in (lambda _: 0.0, lambda minute: 20.0 if 5 < minute < 6 else 0.0):
        assert footprint.judge_memory(samples(grow))[1] == []


def test_too_few_samples_are_not_judged() -> None:
    assert footprint.judge_memory(samples(lambda minute: 50 * minute, minutes=2)) == ({}, [])


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"descriptors": 30}, "9 to 30 descriptors"),
        ({"threads": 6}, "3 to 6 threads"),
        ({"shards": 257}, "257 shards are mapped"),
        ({"pid": 8}, "is new"),
    ],
)
def test_what_is_left_behind_is_a_fault(change: dict[str, Any], fault: str) -> None:
    before = samples(lambda _: 0.0)[:1]
    assert footprint.judge_rest(before, before) == []
    assert fault in " ".join(footprint.judge_rest(before, [replace(before[0], **change)]))


def test_a_fault_says_what_there_is_more_of() -> None:
    first = replace(samples(lambda _: 0.0)[0], held={"socket": 2, "thread pool": 1})
    last = replace(first, descriptors=30, held={"socket": 9, "thread pool": 1, "pipe": 1})
    (fault,) = footprint.judge_rest([first], [last])
    assert fault == "proxy: 9 to 30 descriptors; more: 1 pipe, 7 socket"


@pytest.mark.parametrize(("num_contexts", "is_fault"), [(1, False), (2, True)])
def test_the_collector_that_pyzmq_starts_once_is_no_fault(
    num_contexts: int, is_fault: bool
) -> None:
    first = replace(samples(lambda _: 0.0)[0], held={"thread ZMQbg/Reaper": 4})
    last = replace(
        first,
        descriptors=first.descriptors + 7 * num_contexts,
        threads=first.threads + 3 * num_contexts,
        held={"thread ZMQbg/Reaper": 4 + num_contexts},
    )
    assert bool(footprint.judge_rest([first], [last])) is is_fault


def test_a_process_that_has_ended_is_a_fault() -> None:
    before = samples(lambda _: 0.0)[:1]
    assert footprint.judge_rest(before, []) == ["proxy (7) has ended"]


def test_the_tree_of_a_process_has_its_children() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = {sample.pid: sample for sample in footprint.take_samples(os.getpid(), 0.0)}
        assert found[os.getpid()].descriptors > 3
        assert found[os.getpid()].anon_kib > 1000
        assert child.pid in found
        child.communicate(b"\n")


@pytest.mark.parametrize(
    ("command", "parent_role", "role"),
    [
        ("python -m clairai.cli demo --port 5", "", "proxy"),
        ("VLLM::EngineCore", "API server", "engine core"),
        ("python -c from multiprocessing.spawn import spawn_main", "API server", "engine core"),
        ("python -c from multiprocessing.spawn import spawn_main", "engine core", "worker"),
        ("python -m clairai.launch.process_guard 5", "proxy", "process guard"),
        ("/bin/vllm serve model", "process guard", "API server"),
        ("sleep 5", "proxy", "other"),
    ],
)
def test_processes_are_named_by_what_they_do(command: str, parent_role: str, role: str) -> None:
    assert footprint.find_role(command, parent_role) == role


def test_the_graph_is_an_image_with_a_line_for_each_process() -> None:
    lines = samples(lambda _: 0.0)
    drawn = ElementTree.fromstring(  # noqa: S314  # our own
        draw([*lines, *(replace(one, pid=8) for one in lines)], 60.0)
    )
    assert len(drawn.findall("{http://www.w3.org/2000/svg}polyline")) == 2 * 3


def capture_of(rows_ND: Any, tokens: list[int], first: int) -> bytes:
    origin = Origin.of(
        model="m",
        weights="v",
        dtype="float32",
        width=4,
        encoder="raw",
        parameters={"dtype": "float32"},
    )
    rows_N = np.zeros(len(tokens), ROW)
    rows_N["stream"], rows_N["phase"], rows_N["token_id"] = 5, DECODE, tokens
    rows_N["position"] = np.arange(first, first + len(tokens))
    sealed = seal_safetensors([RowBlock(origin, POINT, rows_N, {"values": rows_ND})], {})
    return sealed.start + b"".join(map(bytes, sealed.pieces))


def answer_with(**changes: Any) -> tuple[Answer, bytes]:
    """Three tokens after a prompt of two, and the capture of the two that were forwarded."""
    rows_ND = np.array([[0.1, 0.2, 0.3, 0.4], [-1.0, 0.5, 0.0, 0.1]], np.float32)
    scores: list[float] = PROBE.apply(rows_ND).tolist()
    answer = Answer(
        token_ids=[11, 12, 13],
        prompt=[1, 2],
        rows=[{"p": scores[0]}, {"p": scores[1]}, {"p": None}],
        capture={"id": "0" * 16, "state": "kept", "lost": 0},
    )
    for name, value in changes.items():
        setattr(answer, name, value)
    return answer, capture_of(rows_ND, [11, 12], 2)


def check(answer: Answer, capture: bytes) -> Tally:
    tally = Tally()

    def respond(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=capture)

    async def run() -> None:
        transport = httpx.MockTransport(respond)
        async with httpx.AsyncClient(transport=transport, base_url="http://soak") as http:
            client = SoakClient(http, 0, "m", [PROBE], tally)
            client._check_scores(answer, {"p": PROBE})
            await client._check_rows(answer, {"p": PROBE})

    asyncio.run(run())
    return tally


def test_scores_that_fit_their_rows_are_counted() -> None:
    tally = check(*answer_with())
    assert (tally.rows_verified, tally.tokens, tally.scores_lost) == (2, 3, 0)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"rows": [{"p": 0.5}, {"p": 0.5}, {"p": None}]}, "its row gives"),
        ({"token_ids": [11, 99, 13]}, "a row of token 12"),
        ({"rows": [{"p": None}, {"p": 0.5}, {"p": None}]}, "1 scores are missing, 0 reported"),
        ({"rows": [{"p": 0.5}, {"p": None}]}, "a token without scores"),
        ({"capture": {"id": "0", "state": "kept", "lost": 1}}, "'lost': 1"),
        ({"capture": {"id": "0", "state": "failed", "lost": 0}}, "failed"),
    ],
)
def test_a_score_of_another_row_is_a_fault(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(AssertionError, match=fault):
        check(*answer_with(**changes))


def test_a_capture_is_read_by_point_and_position() -> None:
    rows = read_capture(answer_with()[1])
    assert list(rows) == [(POINT, 2), (POINT, 3)]
    assert rows[POINT, 3][0] == 12


def test_scores_out_of_order_are_a_fault() -> None:
    scores = {"names": ["p"], "start": 3, "scores": [[0.5]]}
    chunk = json.loads(json.dumps({"choices": [{"token_ids": [1], "probe_scores": scores}]}))
    with pytest.raises(AssertionError, match="out of order"):
        Answer().read(chunk)
