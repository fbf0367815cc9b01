"""Streams are spread over processes, timed and counted; nothing that went wrong is left out."""

from __future__ import annotations

import json
import socketserver
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from bench.load_clients import Seen, count_rows, join, run_load, spread
from bench.serving_load import ALONE, SCORED, as_markdown, roles_in_log, summary

ROWS = [[0.25, 0.5]]


def frame(**fields: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [], **fields}, separators=(",", ":")).encode()


def answer(texts: list[str], *, rows: int) -> bytes:
    """A chat as vLLM streams it: the role, a chunk for each token, usage, the end."""
    frames = [frame(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])]
    for at, text in enumerate(texts):
        scores = {"probe_scores": {"scores": ROWS}} if at < rows else {}
        frames.append(frame(choices=[{"index": 0, "delta": {"content": text}, **scores}]))
    frames += [frame(usage={"completion_tokens": len(texts)}), b"data: [DONE]", b""]
    return b"\n\n".join(frames)


class Server(socketserver.StreamRequestHandler):
    """Answers every request with four tokens, three of them scored."""

    def handle(self) -> None:
        while self.rfile.readline():
            length = 0
            while (line := self.rfile.readline()) != b"\r\n":
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            asked = json.loads(self.rfile.read(length))
            body = answer(["a", "b", "c", "d"], rows=asked["rows"])
            status = b"200 OK" if asked["rows"] < 4 else b"503 Busy"
            head = b"HTTP/1.1 %s\r\nTransfer-Encoding: chunked\r\n\r\n" % status
            self.wfile.write(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))


@pytest.fixture
def url() -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Server) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_every_stream_asks_as_often_as_it_should_from_several_processes(url: str) -> None:
    seen = run_load(url, {"rows": 3}, streams=3, requests=2, tokens=4, processes=2)
    assert seen.faults == []
    assert seen.tokens == 3 * 2 * 4
    assert len(seen.first_ms) == len(seen.token_ms) == 6
    assert (seen.scores, seen.expected) == (9, 9)
    assert 0 < seen.begun_ns < seen.ended_ns
    assert seen.cpu_s > 0


def test_missing_scores_and_missing_tokens_and_refusals_are_seen(url: str) -> None:
    seen = run_load(url, {"rows": 2}, streams=1, requests=1, tokens=4, processes=1)
    assert (seen.scores, seen.expected) == (2, 3)
    seen = run_load(url, {"rows": 3}, streams=1, requests=1, tokens=5, processes=1)
    assert seen.faults == ["an answer has 4 tokens, was asked for 5"]
    seen = run_load(url, {"rows": 4}, streams=1, requests=1, tokens=4, processes=1)
    assert len(seen.faults) == 1
    assert "status 503" in seen.faults[0]


def test_a_row_that_was_lost_is_not_counted() -> None:
    lost = frame(choices=[{"index": 0, "probe_scores": {"scores": [[None, None], [0.1, 0.2]]}}])
    assert count_rows(lost + b"\n\n") == (0, 1)


def test_streams_are_spread_evenly() -> None:
    assert spread(256, 3) == [86, 85, 85]
    assert spread(2, 8) == [1, 1]


def test_processes_are_joined_from_the_first_begin_to_the_last_end() -> None:
    first = Seen(begun_ns=5, ended_ns=8, tokens=2, faults=["late"])
    both = join([first, Seen(begun_ns=4, ended_ns=9, tokens=3)])
    assert (both.begun_ns, both.ended_ns, both.tokens, both.faults) == (4, 9, 5, ["late"])


def turn(way: str, seconds: float, proxy_s: float) -> dict[str, Any]:
    seen = Seen([10.0 * seconds], [2.0], 1, 1 + int(seconds * 1e9), tokens=1000)
    used = Counter({"proxy": proxy_s})
    return {"api_servers": 1, "streams": 4, "way": way, **summary(seen, used, Counter())}


def test_the_table_says_what_part_of_vllm_alone_each_number_is() -> None:
    found = [turn(ALONE, 1.0, 0.0), turn(SCORED, 1.25, 0.04)]
    alone, ours = as_markdown(found).splitlines()[2:]
    assert alone.startswith(f"| 1 | 4 | {ALONE} | 1,000 (1.000) | 10.00 (1.00) |")
    assert ours.startswith(f"| 1 | 4 | {SCORED} | 800 (0.800) | 12.50 (1.25) |")
    assert ours.endswith("| 40 | 0 |")  # the proxy, and no completion process


def test_processes_are_told_apart_by_the_names_in_the_log() -> None:
    log = "(APIServer pid=4) INFO\n(ApiServer_1 pid=5) x\n(EngineCore_DP0 pid=6) (Worker_TP1 pid=7)"
    assert roles_in_log(log) == {4: "API server", 5: "API server", 6: "engine core", 7: "worker"}
