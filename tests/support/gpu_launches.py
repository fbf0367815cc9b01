"""A GPU played by C functions that record their arguments; it publishes when the test says so."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from clairai.engine.kernel_launch import DRIVER_CALLS, CudaDriver, KernelLaunch
from clairai.engine.publish import header_layout as layout
from clairai.engine.publish.header_layout import HEADER_FIELDS, HeaderHead
from clairai.engine.publish.launch_list import LaunchList, LaunchStreams, StepLauncher
from clairai.engine.publish.step_extension import load_step_extension
from clairai.engine.publish.step_header import StepHeaders, StepShape
from clairai.engine.step import ForwardInputs

MAX_REQUESTS, MAX_TOKENS = 4, 512
MAIN, SIDE, FORKED, JOINED = 40, 50, 60, 61
NOT_COMPARED = ("stamp_ns", "shape", "done")  # the kernel reads none but the time
INPUTS = ForwardInputs(torch.zeros(MAX_TOKENS), torch.zeros(MAX_TOKENS))


def read_header(address: int) -> dict[str, Any]:
    """What the kernel would read, except for the time."""
    num_words = layout.header_words(MAX_REQUESTS, MAX_TOKENS)
    words = list((ctypes.c_int64 * num_words).from_address(address))
    head = HeaderHead.from_address(address)
    events_at, tokens_at = layout.events_at(MAX_REQUESTS), layout.tokens_at(MAX_REQUESTS)
    tokens = np.array(words[tokens_at:]).view(np.int32)
    fields = range(len(HEADER_FIELDS), events_at, MAX_REQUESTS)
    return {
        "head": {name: getattr(head, name) for name in HEADER_FIELDS if name not in NOT_COMPARED},
        "requests": [word for at in fields for word in words[at : at + head.num_requests]],
        "events": words[events_at : events_at + head.num_events * layout.ROW_WORDS // 2],
        "tokens": tokens[: head.num_rows - head.num_events].tolist(),
    }


class Gpu:
    """Records launches; publishes headers when the test says so."""

    def __init__(self) -> None:
        self.header = ctypes.c_uint64(0)  # the kernel's argument
        self.pending: list[int] = []  # addresses of headers that are not published yet
        self.read: list[dict[str, Any]] = []
        self.queued: list[tuple[object, ...]] = []
        self.turn = 0  # the number of the last header
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
        self._take(self.header.value)
        return 0

    def _take(self, address: int) -> None:
        self.pending.append(address)
        self.read.append(read_header(address))
        self.turn = HeaderHead.from_address(address).number

    def replay(self, headers: StepHeaders) -> None:
        """A graph that publishes: the header whose turn it is, if it is there and allows it."""
        header = headers.all[self.turn % layout.NUM_HEADERS]
        if header.head.number == self.turn + 1 and header.head.in_graph:
            self._take(header.address)

    def publish(self, count: int) -> None:
        done, self.pending = self.pending[:count], self.pending[count:]
        for address in done:
            head = HeaderHead.from_address(address)
            head.done = head.number


class ToyLauncher:
    """Launches as GpuLauncher does, without Triton."""

    def __init__(self, gpu: Gpu) -> None:
        streams = LaunchStreams(lambda: MAIN, SIDE, FORKED, JOINED)
        self._launcher = StepLauncher(CudaDriver(gpu), streams, load_step_extension())
        launch = KernelLaunch(1, (1, 1, 1), 32, 0, (ctypes.c_void_p * 1)(), ())
        self._launcher.use(LaunchList.of([launch], gpu.header))
        self.begin_step, self.make_wait = self._launcher.begin_step, self._launcher.make_wait
        self.published_by_graph = self._launcher.published_by_graph

    def prepare(self, headers: StepHeaders, inputs: ForwardInputs) -> None: ...

    def __call__(self, headers: StepHeaders, inputs: ForwardInputs, shape: StepShape) -> None:
        del inputs, shape
        self._launcher.run(headers)

    def capture(self, num_tokens: int) -> None: ...

    def flush(self) -> None: ...
