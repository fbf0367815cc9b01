"""Forked work runs on the side stream, and is waited for once; of taps, only in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.side_stream import AfterTaps, NoSideStream, SideStream
from clairai.points import Point
from clairai.probe.bank import EngineBank
from clairai.probe.model import Probe

HERE = Point("post_block", 0)


class ToyCuda:
    """Streams that record who waits for whom; stands where torch.cuda's functions stand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_capturing = False
        self.noted: list[str] = []
        self.current = self.Stream("forward")
        for name, function in (
            ("Stream", lambda _device: self.Stream("side")),
            ("stream", self.within),
            ("current_stream", lambda _device: self.current),
            ("Event", ToyEvent),
            ("is_current_stream_capturing", lambda: self.is_capturing),
        ):
            monkeypatch.setattr(torch.cuda, name, function)

    def Stream(self, name: str) -> ToyStream:
        return ToyStream(name, self)

    @contextmanager
    def within(self, stream: ToyStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class ToyEvent:
    def record(self, stream: ToyStream) -> None:
        self.stream, self.num_queued = stream, len(stream.queued)


class ToyStream:
    def __init__(self, name: str, cuda: ToyCuda) -> None:
        self.name, self._cuda = name, cuda
        self.queued: list[str] = []

    def wait_event(self, event: ToyEvent) -> None:
        work = event.stream.queued[: event.num_queued]
        after = f" after {work[-1]}" if work else ""
        self._cuda.noted.append(f"{self.name} waits for {event.stream.name}{after}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> ToyCuda:
    return ToyCuda(monkeypatch)


def side() -> SideStream:
    return SideStream(torch.device("cpu"), only_in_graphs=True)


def test_outside_of_capture_the_work_stays_on_the_forwards_own_stream(cuda: ToyCuda) -> None:
    branch = side()
    with branch.fork():
        assert cuda.current.name == "forward"
        branch.release()
    branch.join()
    assert cuda.noted == []


def test_work_after_the_release_is_not_waited_for(cuda: ToyCuda) -> None:
    """Captured rows are copied out of the forward's memory, and encoded after that."""
    stream = SideStream(torch.device("cpu"))
    with stream.fork():
        for work in ("copy", "encode"):
            cuda.current.queued.append(work)
            if work == "copy":
                stream.release()
    stream.join()
    stream.join()
    assert cuda.noted == ["side waits for forward", "forward waits for side after copy"]


def test_a_fork_that_releases_nothing_is_not_waited_for(cuda: ToyCuda) -> None:
    stream = SideStream(torch.device("cpu"))
    with stream.fork():
        pass
    stream.release()  # not within the fork
    stream.join()
    assert cuda.noted == ["side waits for forward"]


def test_within_a_capture_the_work_forks_and_is_joined_once(cuda: ToyCuda) -> None:
    cuda.is_capturing = True
    branch = side()
    with branch.fork():
        assert cuda.current.name == "side"
        branch.release()
    assert cuda.current.name == "forward"
    branch.join()
    branch.join()  # a second attention without a tap before it
    assert cuda.noted == ["side waits for forward", "forward waits for side"]


def test_two_taps_before_one_join_each_wait_for_their_own_rows(cuda: ToyCuda) -> None:
    cuda.is_capturing = True
    branch = side()
    for _ in range(2):
        with branch.fork():
            branch.release()
    branch.join()
    assert cuda.noted == ["side waits for forward"] * 2 + ["forward waits for side"]


def test_a_join_without_a_fork_waits_for_nothing(cuda: ToyCuda) -> None:
    cuda.is_capturing = True
    side().join()
    assert cuda.noted == []


def test_every_piece_of_a_captured_graph_is_joined_for_itself(cuda: ToyCuda) -> None:
    """vLLM captures a graph in pieces: a branch that crosses a piece's end breaks the capture."""
    cuda.is_capturing = True
    branch = side()
    for _ in range(3):
        with branch.fork():
            branch.release()
        branch.join()
    assert cuda.noted == ["side waits for forward", "forward waits for side"] * 3


def test_where_there_is_one_stream_work_runs_where_it_stands(cuda: ToyCuda) -> None:
    branch = NoSideStream()
    with branch.fork():
        assert cuda.current.name == "forward"
    branch.join()
    assert cuda.noted == []


def test_a_site_aside_is_read_on_the_branch_and_scores_the_same(cuda: ToyCuda) -> None:
    tables = ScoreTables([str(HERE)], width=3, capacity=2, max_tokens=4, device="cpu")
    probe = Probe("p", HERE, np.ones(3, np.float32))
    tables.load(EngineBank.empty((HERE,), 2, 3, "toy").add([probe]))
    rows_TD = torch.arange(6.0).view(2, 3)
    tables.site(str(HERE)).read(rows_TD)
    expected_TP = tables.gather(2)
    tables.scores_STK.zero_()
    cuda.is_capturing, tables.branch = True, side()
    tables.side_stream_site(str(HERE)).read(rows_TD)
    assert cuda.noted == ["side waits for forward"]
    assert torch.equal(tables.gather(2), expected_TP)
    assert tables.ran_S.tolist() == [2]


def captured_with(tail: AfterTaps, cuda: ToyCuda) -> list[tuple[int, str]]:
    """What was worked, and on which stream, when a forward of one tap was captured."""
    worked: list[tuple[int, str]] = []
    tail.begin(None)
    tail.tap_ran(5)
    tail.end()
    cuda.is_capturing = True
    tail.begin(lambda num_tokens: worked.append((num_tokens, cuda.current.name)))
    tail.tap_ran(5)
    return worked


def test_a_tail_runs_beside_the_blocks_behind_the_last_tap_and_is_waited_for(cuda: ToyCuda) -> None:
    tail = AfterTaps(side())
    assert captured_with(tail, cuda) == [(5, "side")]
    assert cuda.noted == ["side waits for forward"]
    assert tail.end()
    assert cuda.noted == ["side waits for forward", "forward waits for side"]


def test_a_tail_in_line_leaves_the_graph_without_a_branch(cuda: ToyCuda) -> None:
    tail = AfterTaps(side())
    tail.stay_on_main_stream()
    assert captured_with(tail, cuda) == [(5, "forward")]
    assert tail.end()
    assert cuda.noted == []
