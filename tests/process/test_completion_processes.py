"""A proxy with two completion processes: real processes, real sockets, a real ring."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from clairai.local.heartbeat import read_process_state
from clairai.proxy.access_keys import AccessKey
from clairai.proxy.observe.metrics import Metrics
from clairai.proxy.processes import first_process
from clairai.proxy.processes.first_process import CompletionProcesses
from clairai.proxy.proxy_settings import Limits
from tests.http.answers import CHAT, collect_scores, expected
from tests.http.fake import Exchange, Script, answering
from tests.http.world import PATIENT, World, world
from tests.process import fault_injection
from tests.process.served import Serve
from tests.process.served import serve as serve
from tests.process.test_serving import QUICK_S
from tests.support.ring_engine import until

pytestmark = pytest.mark.timeout(240)

READY_S = 60.0  # two interpreters start, on a busy machine
SCORED = {"messages": [], "clairai": {"probes": "all"}}
NAMED = {"messages": [], "stream": True, "clairai": {"events": "named"}}
TOKENS = [72, 105, 33]
SILENT = replace(PATIENT, head=600.0)  # connections that say nothing are kept
DONE = "[DONE]"
ONE, OTHER = "key-of-one-client", "key-of-another-client"
KEYS = (
    AccessKey.of(ONE, name="one", rights=("read",)),
    AccessKey.of(OTHER, name="other", rights=("read", "steer")),
)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is only slow, on a busy machine, is asked and gets connections as well."""
    monkeypatch.setattr(first_process, "ANSWER_S", READY_S)
    monkeypatch.setattr(first_process, "LATE_S", READY_S)


def keep_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody ends a process that is suspended but the test."""
    for name in ("STOPPED_S", "SILENT_S"):
        monkeypatch.setattr(first_process, name, 600.0)


@contextmanager
def two_processes(folder: Path, **settings: Any) -> Iterator[World]:
    """They are ready, and read the ring."""
    with world(folder, metrics=Metrics(), completion_processes=2, **settings) as w:
        await_ready(w)
        yield w


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with two_processes(tmp_path_factory.mktemp("w"), keys=KEYS, timeouts=SILENT) as w:
        yield w


@pytest.fixture
def w(shared: World) -> World:
    # New ones go where there are fewest: those of the test before must not count.
    until(lambda: not any(processes(shared).num_connections().values()))
    shared.upstream.forget()
    shared.upstream.script = answering(TOKENS)
    return shared


def processes(w: World) -> CompletionProcesses:
    assert w.proxy.processes is not None
    return w.proxy.processes


def await_ready(w: World) -> None:
    until(lambda: len(processes(w).ready_pids()) == 2 and w.proxy.is_reading, READY_S)


def client(w: World, key: str = ONE) -> httpx.Client:
    return w.client(headers={"Authorization": f"Bearer {key}"})


def samples(w: World) -> dict[str, float]:
    """Counters and gauges of one scrape, without the order of their labels."""
    with client(w) as scraping:
        text = scraping.get("/metrics").text
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value  # type: ignore[assignment]
    return dict(found)


def check_sums(found: dict[str, float]) -> None:
    """As docs/metrics.md promises of every scrape."""
    ended = sum(v for k, v in found.items() if k.startswith("clairai_completions_ended_total"))
    assert found["clairai_completions_total{}"] == found["clairai_streams{}"] + ended
    assert found["clairai_completion_seconds_count{}"] == ended
    errors = sum(v for k, v in found.items() if k.startswith("clairai_completion_errors_total"))
    assert found["clairai_completions_ended_total{outcome=error}"] == errors


def holding(go: threading.Event) -> Script:
    """Begins an answer, and ends it when the test says so."""

    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.tokens([72])
        await exchange.end_when(go)
        exchange.rows(4, [72])
        await exchange.tokens([105], finish="length")
        await exchange.end(num_generated=2)

    return script


def test_a_burst_of_connections_is_spread_evenly(w: World) -> None:
    before = processes(w).num_connections()
    port = int(w.url.rpartition(":")[2])
    with ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))

        def added() -> dict[int, int]:
            now = processes(w).num_connections()
            return {number: now[number] - before[number] for number in now}

        until(lambda: sum(added().values()) == 64)
        assert added() == {1: 32, 2: 32}
    until(lambda: processes(w).num_connections() == before)


def begin_run(asking: httpx.Client) -> str:
    """A named run that has ended; its id says which process has it."""
    answer = asking.post(CHAT, json=NAMED)
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-clairai-run"])


def test_scores_and_runs_are_found_through_any_connection(w: World) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(client(w)) for _ in range(4)]
        runs = [begin_run(one) for one in clients]
        ids = [one.post(CHAT, json=SCORED).json()["id"] for one in clients]
        assert {run[-2:] for run in runs} == {"01", "02"}
        for run in runs:
            assert len({one.get(f"/v1/runs/{run}").content for one in clients}) == 1
        for one in clients:
            for response_id in ids:
                found = one.get(f"/v1/scores/{response_id}").json()
                rows = found["choices"][0]["probe_scores"]
                named = [dict(zip(rows["names"], row, strict=True)) for row in rows["scores"]]
                assert named == expected(TOKENS)
        assert [one.delete(f"/v1/runs/{run}").status_code for run in runs for one in clients] == (
            [204] * 16
        )


def test_another_key_finds_neither_scores_nor_runs_whichever_process_has_them(w: World) -> None:
    with client(w) as asking:
        run, response = begin_run(asking), asking.post(CHAT, json=SCORED).json()["id"]
    for _ in range(4):
        with client(w, OTHER) as another:
            assert another.get(f"/v1/runs/{run}").status_code == 404
            refused = another.get(f"/v1/scores/{response}")
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "no-scores")


def test_keys_and_rights_are_those_of_one_process(w: World) -> None:
    steered = SCORED | {"clairai": {"steer": [{"vector": "calm", "scale": 1}]}}
    for _ in range(2):  # on both processes
        with w.client() as nobody:
            assert nobody.post(CHAT, json=SCORED).status_code == 401
            assert nobody.get("/v1/models").status_code == 401
            assert nobody.get("/health").status_code == 200
        with client(w) as one:
            refused = one.post(CHAT, json=steered)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
            assert one.delete("/v1/probes/token").status_code == 403


def test_a_client_cannot_say_who_it_is(w: World) -> None:
    """Nothing about a client is forwarded, so there is nothing to forge."""
    named = ("X-Forwarded-For", "Forwarded", "X-Real-Ip", "X-Clairai-Peer")
    forged = {"X-Clairai-Owner": "other", **dict.fromkeys(named, "10.0.0.1")}
    with client(w) as asking:
        asking.post(CHAT, json=SCORED, headers=forged)
        completion = w.upstream.last
        assert completion.fields["owner"] == "one"
        assert completion.headers["X-Clairai-Owner"] == "one"
        assert "X-Clairai-Peer" not in completion.headers
        response_id = asking.post(CHAT, json=SCORED, headers=forged).json()["id"]
    with client(w, OTHER) as another:
        assert another.get(f"/v1/scores/{response_id}").status_code == 404


def test_a_connection_can_ask_for_this_and_that_in_turn(w: World) -> None:
    with client(w) as asking:
        for _ in range(3):
            assert asking.get("/health").status_code == 200
            assert asking.post(CHAT, json=SCORED).status_code == 200
            assert asking.post("/v1/embeddings", json={"input": "a"}).status_code != 500
            assert asking.get("/v1/probes").status_code == 200
    until(lambda: sum(processes(w).num_connections().values()) == 0)


def read_until(sock: socket.socket, end: bytes) -> None:
    raw = b""
    while end not in raw:
        part = sock.recv(1 << 16)
        assert part, raw
        raw += part
    assert raw.startswith(b"HTTP/1.1 200"), raw


def test_a_body_that_comes_with_its_head_moves_with_the_connection(w: World) -> None:
    """A connection that the first process has gets a completion, in one part and in two."""
    body = json.dumps(SCORED).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {ONE}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    port = int(w.url.rpartition(":")[2])
    for parts in (
        [head + body],
        [head, body],
        [head + body[:5], body[5:]],
        [head[:9], head[9:] + body],
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            sock.sendall(b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            read_until(sock, b'{"live":true}')
            for part in parts:
                sock.sendall(part)
            read_until(sock, b"probe_scores")


def test_every_scrape_adds_up_the_counts_of_all_processes(w: World) -> None:
    go, before = threading.Event(), samples(w)
    w.upstream.script = holding(go)
    with ExitStack() as stack:
        clients = [stack.enter_context(client(w)) for _ in range(4)]
        streams = [
            stack.enter_context(one.stream("POST", CHAT, json=SCORED | {"stream": True}))
            for one in clients
        ]
        during = samples(w)
        check_sums(during)
        assert during["clairai_streams{}"] == 4
        assert {1: 2, 2: 2}.items() <= processes(w).num_connections().items()
        go.set()
        for stream in streams:
            stream.read()
    expected_growth = {
        "clairai_completions_total{}": 4,
        "clairai_completions_ended_total{outcome=done}": 4,
        "clairai_tokens_total{}": 8,
        "clairai_rows_total{}": 4,
        "clairai_requests_total{route=POST /v1/chat/completions,status=2xx}": 4,
        "clairai_generated_score_count{probe=token}": 4,
    }

    def growth() -> dict[str, float]:
        now = samples(w)
        check_sums(now)
        assert now["clairai_completion_processes{}"] == 2
        return {name: now.get(name, 0) - before.get(name, 0) for name in expected_growth}

    # Who watches may be told of an answer's rows after its client.
    until(lambda: growth() == expected_growth)
    assert samples(w)["clairai_streams{}"] == 0


def test_rows_of_nobody_are_orphaned_once_however_many_read_the_ring(w: World) -> None:
    before = samples(w)["clairai_rows_orphaned_total{}"]
    assert w.upstream.ring is not None
    w.upstream.ring.rows(12345, 0, [1, 2, 3])
    with client(w) as asking:
        assert asking.post(CHAT, json=SCORED).status_code == 200
    until(lambda: samples(w)["clairai_rows_orphaned_total{}"] - before == 3)
    assert samples(w)["clairai_rows_orphaned_total{}"] - before == 3


def test_a_changed_bank_is_known_to_every_process_when_the_change_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even to one that was suspended meanwhile, and to one that only now reads older rows."""
    keep_suspended(monkeypatch)
    with two_processes(tmp_path) as w, ExitStack() as stack:
        clients = [stack.enter_context(w.client()) for _ in range(4)]
        named = {"messages": [], "clairai": {"probes": ["token"]}}
        assert {one.post(CHAT, json=named).status_code for one in clients} == {200}
        changing = stack.enter_context(w.client())
        assert changing.get("/health").status_code == 200  # the first process has the connection
        suspended = processes(w).ready_pids()[1]
        os.kill(suspended, signal.SIGSTOP)
        assert changing.delete("/v1/probes/token").status_code == 200
        assert w.upstream.ring is not None
        w.upstream.ring.rows(12345, 0, [1, 2, 3])  # of the bank before
        os.kill(suspended, signal.SIGCONT)
        until(lambda: samples(w)["clairai_rows_orphaned_total{}"] == 3)
        w.upstream.control_status = 500  # whoever has to ask which probes there are, fails
        assert [one.post(CHAT, json=named).status_code for one in clients] == [502] * 4


def test_scores_that_ended_with_a_process_are_said_to_be_lost(tmp_path: Path) -> None:
    """While it is suspended nobody says that they are unknown."""
    with two_processes(tmp_path) as w, ExitStack() as stack:
        answer = stack.enter_context(w.client()).post(CHAT, json=SCORED).json()
        (number,) = (one for one, num in processes(w).num_connections().items() if num)
        asking = stack.enter_context(w.client())
        assert asking.get("/health").status_code == 200  # the first process has the connection
        until(lambda: samples(w)["clairai_kept_answers{}"] == 1)
        os.kill(processes(w).ready_pids()[number], signal.SIGSTOP)
        refused = asking.get(f"/v1/scores/{answer['id']}")
        assert refused.status_code == 404
        assert "it may be one of 1 that ended with a process of the proxy" in refused.text
        await_ready(w)
        assert samples(w)["clairai_kept_answers_dropped_total{}"] == 1


def test_limits_hold_for_all_processes_together(tmp_path: Path) -> None:
    go = threading.Event()
    # Next to nothing is added while the test runs, however long that is.
    limits = Limits(streams=3, client_json_rate=1, client_json_burst=8 << 10)
    with two_processes(tmp_path, limits=limits, script=holding(go)) as w, ExitStack() as stack:
        clients = [stack.enter_context(w.client()) for _ in range(4)]
        streaming = SCORED | {"stream": True}
        for one in clients[:3]:
            stack.enter_context(one.stream("POST", CHAT, json=streaming))
        refused = clients[3].post(CHAT, json=streaming)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        with w.client() as asking:
            assert asking.get("/health/ready").status_code == 503
        go.set()
        statuses = [
            one.post(CHAT, json={"messages": [], "user": "x" * 2500}).status_code for one in clients
        ]
        assert statuses.count(429) >= 1  # each alone has sent less than a burst


def test_connections_of_all_processes_are_counted_together(tmp_path: Path) -> None:
    bounds = Limits(connections=8)
    with two_processes(tmp_path, limits=bounds, timeouts=SILENT) as w, ExitStack() as stack:
        port = int(w.url.rpartition(":")[2])
        for _ in range(6):  # three quarters: what one peer may have
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        until(lambda: sum(processes(w).num_connections().values()) == 6)
        with w.client() as asking:
            assert asking.get("/health").status_code == 200
        with w.client() as asking:
            assert asking.post(CHAT, json=SCORED).status_code == 503


class Reading:
    """A client in the middle of a streamed answer."""

    def __init__(self, w: World) -> None:
        self._client = w.client()
        self.answer = self._client.send(
            self._client.build_request("POST", CHAT, json=SCORED | {"stream": True}), stream=True
        )

    def is_cut(self) -> bool:
        """Read to the end; True if the stream broke off."""
        return self.read_end() != DONE

    def read_end(self) -> str:
        """Read to the end: DONE, the reason why it ends without, or nothing if it broke off."""
        try:
            last = b"".join(self.answer.iter_bytes()).rstrip().rpartition(b"data: ")[2].decode()
            return last if last == DONE else str(json.loads(last)["error"]["message"])
        except (httpx.RemoteProtocolError, httpx.ReadError):
            return ""
        finally:
            self._client.close()


def hang(pid: int) -> None:
    """Its event loop goes round no more; other threads of the process do."""
    try:
        fault_injection.spin(pid)
    except PermissionError:
        pytest.skip("needs the right to trace processes")


def suspend(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def is_told_of_process(w: World, number: int) -> bool:
    try:
        with w.client() as asking:
            health = asking.get("/health").json()
    except httpx.TransportError:  # the connection was given to that process, and ended with it
        return False
    return health["status"] == "degraded" and f"completion process {number}" in health["reason"]


TOLD = "the process of the proxy that gave this answer {} and was ended; ask again"


@pytest.mark.parametrize(
    ("plant", "end"),
    [(kill, ""), (suspend, TOLD.format("is suspended")), (hang, TOLD.format("makes no progress"))],
)
def test_a_process_that_ends_stops_or_hangs_takes_its_own_streams_and_is_replaced(
    tmp_path: Path, plant: Callable[[int], None], end: str
) -> None:
    go = threading.Event()
    with two_processes(tmp_path, script=holding(go)) as w:
        readers = [Reading(w) for _ in range(4)]
        before = processes(w).ready_pids()
        until(lambda: samples(w)["clairai_streams{}"] == 4)
        first = samples(w)
        plant(before[1])
        # From now on: it is so only until the next process is ready.
        until(lambda: is_told_of_process(w, 1), READY_S)
        until(lambda: before[1] not in processes(w).ready_pids().values(), READY_S)
        until(lambda: samples(w)["clairai_completions_cut_off_total{}"])
        cut = samples(w)
        check_sums(cut)
        assert all(cut[name] >= value for name, value in first.items() if "_total{" in name)
        assert cut["clairai_completions_cut_off_total{}"] == 2
        go.set()
        assert Counter(reader.read_end() for reader in readers) == {DONE: 2, end: 2}
        await_ready(w)
        until(lambda: samples(w)["clairai_health{state=ready}"] == 1)
        after = samples(w)
        check_sums(after)
        assert after["clairai_completion_process_restarts_total{}"] == 1
        assert after["clairai_streams{}"] == 0
        w.upstream.script = answering(TOKENS)
        check_scores_on_both(w)


def test_whoever_waits_for_a_process_that_hangs_is_told_why_as_its_api_says_it(
    tmp_path: Path,
) -> None:
    """Before the first byte with a status of its own, in a stream as an event."""
    go = threading.Event()

    async def script(exchange: Exchange) -> web.StreamResponse:
        if exchange.body.get("stream"):
            await exchange.send(b'data: {"choices":[]}\n\n')
        await exchange.end_when(go)
        return exchange.response or exchange.refuse(500, "over")

    with two_processes(tmp_path, script=script) as w, ExitStack() as stack:
        asked: dict[str, tuple[str, dict[str, Any]]] = {
            "whole": (CHAT, {"messages": []}),
            "message": ("/v1/messages", {"messages": [], "stream": True}),
            "response": ("/v1/responses", {"input": "a", "stream": True}),
            "run": (CHAT, NAMED),
        }
        pool = stack.enter_context(ThreadPoolExecutor(8))
        stack.callback(go.set)
        answers = {}
        for name, (path, body) in asked.items():
            for number in (1, 2):  # each is asked of both processes
                client = stack.enter_context(w.client())
                answers[name, number] = pool.submit(client.post, path, json=body, timeout=60)
                w.upstream.wait_for(lambda: len(w.upstream.seen) == len(answers))
        hang(processes(w).ready_pids()[1])
        until(lambda: sum(answer.done() for answer in answers.values()) == 4, READY_S)
        reason = TOLD.format("makes no progress")
        told = {name: one.result() for (name, _), one in answers.items() if one.done()}
        assert set(told) == set(asked)
        assert told["whole"].status_code == 503
        assert told["whole"].json()["error"]["message"] == reason
        assert told["whole"].headers["retry-after"] == "1"
        ends = {name: told[name].text.rpartition("event: error\ndata: ")[2] for name in told}
        assert json.loads(ends["message"])["error"] == {"type": "process-ended", "message": reason}
        assert json.loads(ends["response"])["message"] == reason
        assert json.loads(ends["run"])["error"]["message"] == reason


def check_scores_on_both(w: World) -> None:
    with ExitStack() as stack:
        for _ in range(4):
            asking = stack.enter_context(w.client())
            answer = asking.post(CHAT, json=SCORED).json()
            assert collect_scores([answer])[0].scores == expected(TOKENS)


def test_a_suspended_process_gets_no_new_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_suspended(monkeypatch)
    monkeypatch.setattr(first_process, "LATE_S", 2.0)
    with two_processes(tmp_path) as w:
        pids = processes(w).ready_pids()
        os.kill(pids[1], signal.SIGSTOP)
        until(lambda: processes(w).find_problems())
        for _ in range(4):
            with w.client() as asking:
                assert asking.post(CHAT, json=SCORED).status_code == 200


def exhaust(pid: int) -> Callable[[], None]:
    return fault_injection.exhaust_fds(pid)


def test_a_process_without_descriptors_loses_nothing(tmp_path: Path) -> None:
    """Others take new connections; what it alone can answer is refused, and says why."""
    go = threading.Event()
    with two_processes(tmp_path, script=holding(go)) as w, ExitStack() as stack:
        readers = [Reading(w) for _ in range(2)]
        pids = processes(w).ready_pids()
        asking = stack.enter_context(w.client())
        assert asking.get("/health").status_code == 200  # the first process has the connection
        w.upstream.script = answering(TOKENS)
        both = [stack.enter_context(w.client()) for _ in range(2)]
        runs = {int(run[-2:], 16): run for run in map(begin_run, both)}
        give_back = exhaust(pids[1])
        for _ in range(4):
            with w.client() as client:
                assert client.post(CHAT, json=SCORED).status_code == 200
        assert asking.get(f"/v1/runs/{runs[2]}").status_code == 200
        with w.client() as client:
            assert client.get("/health").status_code == 200
            refused = client.get(f"/v1/runs/{runs[1]}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        give_back_all = [give_back, exhaust(pids[2])]
        exhaust(pids[1])
        with w.client() as client:  # the first process answers
            assert client.post(CHAT, json=SCORED).status_code == 200
        for give in give_back_all:
            give()
        go.set()
        assert [reader.is_cut() for reader in readers] == [False, False]
        check_scores_on_both(w)
        assert processes(w).ready_pids() == pids


def test_a_connection_that_a_process_had_not_taken_when_it_ended_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_suspended(monkeypatch)
    script = answering(TOKENS)
    with (
        two_processes(tmp_path, script=script) as w,
        ThreadPoolExecutor() as pool,
        ExitStack() as stack,
    ):
        pid = processes(w).ready_pids()[1]
        suspend(pid)
        asked = []
        for _ in range(4):
            client = stack.enter_context(w.client())
            asked.append(pool.submit(client.post, CHAT, json=SCORED))
        until(lambda: sum(one.done() for one in asked) == 2)  # those of the other process
        assert sum(processes(w).num_connections().values()) == 4
        kill(pid)
        for one in asked:
            assert collect_scores([one.result().json()])[0].scores == expected(TOKENS)


def test_the_first_process_answers_when_no_other_can(tmp_path: Path) -> None:
    with world(tmp_path, metrics=Metrics(), completion_processes=2) as w, w.client() as asking:
        first = asking.post(CHAT, json=SCORED)  # none is ready yet
        assert first.status_code == 200
        await_ready(w)
        assert asking.get(f"/v1/scores/{first.json()['id']}").status_code == 200


def test_messages_of_the_launcher_reach_every_process(tmp_path: Path) -> None:
    from clairai.proxy.engine_facts import HealthStatus

    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.forever()

    with two_processes(tmp_path, script=script) as w:
        readers = [Reading(w) for _ in range(4)]
        w.proxy.health.set_status(HealthStatus("failed", "the engine is gone: planted"))
        w.proxy.end_answers()
        assert [reader.is_cut() for reader in readers] == [True] * 4
        w.stop_upstream()
        for _ in range(2):
            with w.client() as asking:
                refused = asking.post(CHAT, json=SCORED)
                assert refused.status_code == 503
                assert refused.json()["error"]["message"] == "the engine is gone: planted"


@pytest.mark.parametrize("suspended", [False, True])
def test_nothing_is_left_when_the_first_process_is_killed(serve: Serve, suspended: bool) -> None:
    served = serve("--completion-processes", "2")
    served.await_ready()
    found = completion_pids(served.process.pid)
    assert len(found) == 2
    if suspended:
        os.kill(found[0], signal.SIGSTOP)
        until(lambda: (state := read_process_state(found[0])) is not None and state.letter == "T")
    served.process.kill()
    served.process.wait()
    served.check_nothing_left()


def test_the_service_ends_as_asked_and_has_said_what_it_answered(serve: Serve) -> None:
    key = "a-key-that-no-process-shows"
    served = serve("--completion-processes", "2", CLAIRAI_API_KEY=key)
    served.await_ready()
    for pid in completion_pids(served.process.pid):
        assert key.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
        assert key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    more: Any = {"headers": {"Authorization": f"Bearer {key}"}, "timeout": 60, "trust_env": False}
    for _ in range(2):
        answer = httpx.post(f"{served.url}{CHAT}", json=SCORED, **more)
        scores = answer.json()["choices"][0]["probe_scores"]["scores"]
        assert scores == [[72.0, 4.0], [105.0, 5.0], [None, None]]
    assert served.end() < QUICK_S
    assert served.process.returncode == 0
    served.check_nothing_left()
    assert served.said().count("completion route=/v1/chat/completions status=200") == 2
    assert "cannot be attached" not in served.said()


def completion_pids(parent: int) -> list[int]:
    mark = b"clairai.proxy.processes.completion_process"
    children = Path(f"/proc/{parent}/task").glob("*/children")
    pids = [int(pid) for one in children for pid in one.read_text().split()]
    return [pid for pid in pids if mark in Path(f"/proc/{pid}/cmdline").read_bytes()]
