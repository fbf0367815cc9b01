"""Takes launches and briefs; gives what a GPU would be told. It publishes steps when it is told to.

A library of C functions that look at what they are given.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from clairai.tap import native
from clairai.tap.brief import MAX_EVENTS, Brief, Form
from clairai.tap.commit_kernel import BRIEF_HEAD, DONE_WORD, PLAN_FIELDS, ROW_WORDS
from clairai.tap.launch import CALLS, Driver, Launch
from clairai.tap.ledger import NUM_BRIEFS
from clairai.tap.lineup import Lane, Lineup, NativeLaunches
from clairai.tap.outlet import Inputs

MAX_REQUESTS, MAX_TOKENS = 4, 512
MAIN, SIDE, BEGUN, ENDED = 40, 50, 60, 61
STAMP_WORD, NUMBER_WORD, IN_GRAPH_WORD = 8, 9, 11
PLAN_END = BRIEF_HEAD + PLAN_FIELDS * MAX_REQUESTS
TOKENS_AT = PLAN_END + ROW_WORDS * MAX_EVENTS // 2
NUM_WORDS = TOKENS_AT + (MAX_TOKENS + 1) // 2
INPUTS = Inputs(torch.zeros(MAX_TOKENS), torch.zeros(MAX_TOKENS))


def told(address: int) -> dict[str, list[int]]:
    """What the kernel would read, but for the time."""
    words = list((ctypes.c_int64 * NUM_WORDS).from_address(address))
    num_events, num_rows, num_requests = words[0], words[1], words[7]
    tokens = np.array(words[TOKENS_AT:]).view(np.int32)
    fields = range(BRIEF_HEAD, PLAN_END, MAX_REQUESTS)
    return {
        "head": [word for at, word in enumerate(words[:DONE_WORD]) if at != STAMP_WORD],
        "plan": [word for at in fields for word in words[at : at + num_requests]],
        "events": words[PLAN_END : PLAN_END + num_events * ROW_WORDS // 2],
        "tokens": tokens[: num_rows - num_events].tolist(),
    }


class Gpu:
    """Takes launches; publishes steps when it is told to."""

    def __init__(self) -> None:
        self.brief = ctypes.c_uint64(0)
        self.briefs: list[int] = []  # not published yet
        self.told: list[dict[str, list[int]]] = []
        self.queued: list[tuple[object, ...]] = []
        self.turn = 0  # the number of the last brief
        self.cuEventRecord = self._called("cuEventRecord", "record")
        self.cuStreamWaitEvent = self._called("cuStreamWaitEvent", "wait")
        self.cuFuncGetParamInfo = self._called("cuFuncGetParamInfo", "size")
        self.cuLaunchKernel = ctypes.CFUNCTYPE(ctypes.c_int, *CALLS["cuLaunchKernel"])(self._launch)

    def _called(self, name: str, word: str) -> object:
        def call(*given: object) -> int:
            self.queued.append((word, *given))
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int, *CALLS[name])(call)

    def _launch(self, *given: object) -> int:
        self.queued.append(("launch", given[8]))  # the stream
        self._take(self.brief.value)
        return 0

    def _take(self, brief: int) -> None:
        self.briefs.append(brief)
        self.told.append(told(brief))
        self.turn = (ctypes.c_int64 * BRIEF_HEAD).from_address(brief)[NUMBER_WORD]

    def replay(self, briefs: Sequence[Brief]) -> None:
        """A graph that publishes: the brief whose turn it is, if it is there and says so."""
        address = briefs[self.turn % NUM_BRIEFS].address
        words = (ctypes.c_int64 * BRIEF_HEAD).from_address(address)
        if words[NUMBER_WORD] == self.turn + 1 and words[IN_GRAPH_WORD]:
            self._take(address)

    def publish(self, count: int) -> None:
        done, self.briefs = self.briefs[:count], self.briefs[count:]
        for address in done:
            words = (ctypes.c_int64 * BRIEF_HEAD).from_address(address)
            words[DONE_WORD] = words[NUMBER_WORD]


class Launching:
    """Commit's launches without Triton."""

    def __init__(self, gpu: Gpu) -> None:
        lane = Lane(lambda: MAIN, SIDE, BEGUN, ENDED)
        self._launches = NativeLaunches(Driver(gpu), lane, native.load("step.c"))
        self._launches.use(
            Lineup.of([Launch(1, (1, 1, 1), 32, 0, (ctypes.c_void_p * 1)(), ())], gpu.brief)
        )
        self.begin, self.follow = self._launches.begin, self._launches.follow
        self.noted = self._launches.noted

    def prepare(self, briefs: Sequence[Brief], inputs: Inputs) -> None: ...

    def __call__(self, brief: Brief, inputs: Inputs, form: Form, ledger: int) -> None:
        del inputs, form
        self._launches.run(brief.address, ledger)

    def note(self, ledger: int, step: int) -> bool:
        return bool(self._launches.note(ledger, step))

    def capture(self, num_tokens: int) -> None: ...

    def flush(self) -> None: ...


class LongWay(Launching):
    """Without C for steps that are alike."""

    def note(self, ledger: int, step: int) -> bool:
        del ledger, step
        return False
