"""Takes launches and briefs; gives what a GPU would be told. It publishes steps when it is told to.

A library of C functions that look at what they are given.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from clairai.engine.kernel_launch import DRIVER_CALLS, CudaDriver, KernelLaunch
from clairai.engine.publish import step_library
from clairai.engine.publish.launch_list import LaunchList, LaunchStreams, NativeLauncher
from clairai.engine.publish.publish_kernel import DONE_WORD, HEAD_WORDS, REQUEST_FIELDS, ROW_WORDS
from clairai.engine.publish.step_header import MAX_EVENTS, NUM_HEADERS, StepHeader, StepShape
from clairai.engine.step import ForwardInputs

MAX_REQUESTS, MAX_TOKENS = 4, 512
MAIN, SIDE, BEGUN, ENDED = 40, 50, 60, 61
STAMP_WORD, NUMBER_WORD, IN_GRAPH_WORD = 8, 9, 11
PLAN_END = HEAD_WORDS + REQUEST_FIELDS * MAX_REQUESTS
TOKENS_AT = PLAN_END + ROW_WORDS * MAX_EVENTS // 2
NUM_WORDS = TOKENS_AT + (MAX_TOKENS + 1) // 2
INPUTS = ForwardInputs(torch.zeros(MAX_TOKENS), torch.zeros(MAX_TOKENS))


def told(address: int) -> dict[str, list[int]]:
    """What the kernel would read, but for the time."""
    words = list((ctypes.c_int64 * NUM_WORDS).from_address(address))
    num_events, num_rows, num_requests = words[0], words[1], words[7]
    tokens = np.array(words[TOKENS_AT:]).view(np.int32)
    fields = range(HEAD_WORDS, PLAN_END, MAX_REQUESTS)
    return {
        "head": [word for at, word in enumerate(words[:DONE_WORD]) if at != STAMP_WORD],
        "plan": [word for at in fields for word in words[at : at + num_requests]],
        "events": words[PLAN_END : PLAN_END + num_events * ROW_WORDS // 2],
        "tokens": tokens[: num_rows - num_events].tolist(),
    }


class Gpu:
    """Takes launches; publishes steps when it is told to."""

    def __init__(self) -> None:
        self.step_header = ctypes.c_uint64(0)
        self.step_headers: list[int] = []  # not published yet
        self.told: list[dict[str, list[int]]] = []
        self.queued: list[tuple[object, ...]] = []
        self.turn = 0  # the number of the last brief
        self.cuEventRecord = self._called("cuEventRecord", "record")
        self.cuStreamWaitEvent = self._called("cuStreamWaitEvent", "wait")
        self.cuFuncGetParamInfo = self._called("cuFuncGetParamInfo", "size")
        self.cuLaunchKernel = ctypes.CFUNCTYPE(ctypes.c_int, *DRIVER_CALLS["cuLaunchKernel"])(
            self._launch
        )

    def _called(self, name: str, word: str) -> object:
        def call(*given: object) -> int:
            self.queued.append((word, *given))
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int, *DRIVER_CALLS[name])(call)

    def _launch(self, *given: object) -> int:
        self.queued.append(("launch", given[8]))  # the stream
        self._take(self.step_header.value)
        return 0

    def _take(self, step_header: int) -> None:
        self.step_headers.append(step_header)
        self.told.append(told(step_header))
        self.turn = (ctypes.c_int64 * HEAD_WORDS).from_address(step_header)[NUMBER_WORD]

    def replay(self, step_headers: Sequence[StepHeader]) -> None:
        """A graph that publishes: the brief whose turn it is, if it is there and says so."""
        address = step_headers[self.turn % NUM_HEADERS].address
        words = (ctypes.c_int64 * HEAD_WORDS).from_address(address)
        if words[NUMBER_WORD] == self.turn + 1 and words[IN_GRAPH_WORD]:
            self._take(address)

    def publish(self, count: int) -> None:
        done, self.step_headers = self.step_headers[:count], self.step_headers[count:]
        for address in done:
            words = (ctypes.c_int64 * HEAD_WORDS).from_address(address)
            words[DONE_WORD] = words[NUMBER_WORD]


class Launching:
    """Commit's launches without Triton."""

    def __init__(self, gpu: Gpu) -> None:
        lane = LaunchStreams(lambda: MAIN, SIDE, BEGUN, ENDED)
        self._launches = NativeLauncher(CudaDriver(gpu), lane, step_library.load_library("step.c"))
        self._launches.use(
            LaunchList.of(
                [KernelLaunch(1, (1, 1, 1), 32, 0, (ctypes.c_void_p * 1)(), ())], gpu.step_header
            )
        )
        self.begin, self.follow = self._launches.begin, self._launches.follow
        self.noted = self._launches.noted

    def prepare(self, step_headers: Sequence[StepHeader], inputs: ForwardInputs) -> None: ...

    def __call__(
        self, step_header: StepHeader, inputs: ForwardInputs, form: StepShape, ledger: int
    ) -> None:
        del inputs, form
        self._launches.run(step_header.address, ledger)

    def note(self, ledger: int, step: int) -> bool:
        return bool(self._launches.note(ledger, step))

    def capture(self, num_tokens: int) -> None: ...

    def flush(self) -> None: ...


class LongWay(Launching):
    """Without C for steps that are alike."""

    def note(self, ledger: int, step: int) -> bool:
        del ledger, step
        return False
