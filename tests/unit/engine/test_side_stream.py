"""Forked work runs on the side stream, and is waited for once; behind taps, only in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from clairai.engine.side_stream import AfterTaps, NoSideStream, SideStream


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
    branch.join()  # nothing was forked since
    assert cuda.noted == ["side waits for forward", "forward waits for side"]


def test_two_forks_before_one_join_each_wait_for_what_was_queued(cuda: ToyCuda) -> None:
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


def test_every_captured_graph_is_joined_for_itself(cuda: ToyCuda) -> None:
    """A branch that crosses the end of a graph breaks its capture."""
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
