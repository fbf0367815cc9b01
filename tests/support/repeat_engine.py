"""An engine in the shape of a vLLM runner, with a StepPublisher.

Its graphs are replayed by the GPU of gpu_launches.py, or its forwards run as Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clairai.compat import step_hooks
from clairai.compat.change_steering import CHANGES_ATTRIBUTE
from clairai.engine.publish import step_publisher as step_publishers
from clairai.engine.publish.device_publisher import DevicePublisher
from clairai.engine.publish.ring_setup import OpenRing, open_ring
from clairai.engine.publish.step_extension import load_step_extension
from clairai.engine.publish.step_publisher import StepPublisher
from clairai.engine.step import NewRequest, RequestErrors, RequestMark, StepBatch
from clairai.ring.layout import RingHeader, RingShape
from tests.support.gpu_launches import INPUTS, MAX_REQUESTS, MAX_TOKENS, Gpu, ToyLauncher
from tests.support.toy_publisher import running_publisher


class Other:
    """Another listener; it can skip steps while `skips` is True."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.skips = True

    def begin(self, new: Any, finished: Any) -> RequestErrors:
        self.events.append(("begin", [one.req_id for one in new], finished))
        return {}

    def drop(self, req_id: str, reason: str) -> None: ...

    def place_failed(self, batch: StepBatch) -> list[str]:
        raise NotImplementedError

    def end_failed(self, batch: StepBatch | None) -> list[str]:
        raise NotImplementedError

    def amend(self, req_id: str, plan: Any) -> None:
        self.events.append(("amend", req_id, plan))

    def place(self, batch: StepBatch) -> None:
        self.events.append(("place", list(batch.req_ids), batch.starts_R.tolist()))

    def reject(self, rejected_R: Any) -> None:
        self.events.append(("reject", rejected_R.tolist()))

    def end(self, inputs: Any) -> None:
        inputs()
        self.events.append("end")

    def can_skip(self) -> bool:
        return self.skips

    def before_dummy_run(self) -> None: ...

    def after_dummy_run(self) -> None: ...

    def take(self) -> list[Any]:
        events, self.events = self.events, []
        return events


class Engine:
    """As vLLM's runners: lays a batch out, forwards it as a graph or as Python."""

    def __init__(self, step_publisher: StepPublisher, gpu: Gpu, publisher: DevicePublisher) -> None:
        self.step_publisher, self.gpu, self.publisher = step_publisher, gpu, publisher
        self.other = Other()
        self.come: dict[str, int] = {}
        self.is_graph = True
        self.carried: dict[str, Any] = {}
        self._starts: dict[int, list[int]] = {}  # of each step's requests, by its number
        self._counts: dict[str, int] = {}
        publisher.prepare(INPUTS)
        publisher.capture_publish(1)
        step_hooks.connect_listeners(self, [step_publisher, self.other], step_publisher.repeat_path)

    def lay_out(self, scheduled: Any) -> Any:
        """Through the method that is wrapped."""
        raise NotImplementedError

    def _laid_out(self) -> tuple[list[str], Any, Any]:
        counts_R = np.array([*self._counts.values()], np.int32)
        starts_R = np.array([self.come[one] for one in self._counts], np.int32)
        self._starts[self.publisher.last_step + 1] = starts_R.tolist()
        for one, count in self._counts.items():
            self.come[one] += count
        return [*self._counts], counts_R, starts_R

    def execute_model(self, scheduler_output: Any, *, dummy_run: bool = False) -> str:
        if dummy_run:
            return "dummy"
        if self._counts:
            self.lay_out(scheduler_output)
            self._forward()
        return "state"

    def _forward(self) -> None:
        if self.is_graph:
            self.gpu.replay(self.publisher.headers)
        else:
            self.publisher.forward_ran(lambda: INPUTS)

    def _dummy_run(self, num_tokens: int) -> None:
        del num_tokens
        self._forward()

    def read(self) -> list[dict[str, Any]]:
        """What the GPU read; of `seen`, how many of its rows that flags."""
        found = []
        for read in self.gpu.read:
            head = read["head"]
            starts = self._starts.get(head["step"], [])[: head["num_requests"]]
            fields, seen = read["requests"][: -len(starts)], read["requests"][-len(starts) :]
            flagged = [max(end - start, 0) for end, start in zip(seen, starts, strict=True)]
            found.append(read | {"requests": fields + flagged} if starts else read)
        return found

    def scheduled(self, counts: dict[str, int], finished: tuple[str, ...] = ()) -> Any:
        new = [SimpleNamespace(req_id=one) for one in counts if one not in self.come]
        for one in finished:
            self.come.pop(one, None)
        self.come |= dict.fromkeys([one.req_id for one in new], 0)
        self._counts = counts
        said = {"scheduled_new_reqs": new, "finished_req_ids": set(finished)}
        carried, self.carried = self.carried, {}
        return SimpleNamespace(**said, **({CHANGES_ATTRIBUTE: carried} if carried else {}))

    def step(self, counts: dict[str, int], finished: tuple[str, ...] = ()) -> None:
        assert self.execute_model(self.scheduled(counts, finished)) == "state"


class V2(Engine):
    """v1/worker/gpu/model_runner.py, 0.26"""

    req_states = None
    input_buffers = SimpleNamespace(positions=INPUTS.positions_T, input_ids=INPUTS.token_ids_T)

    def lay_out(self, scheduled: Any) -> Any:
        return self.prepare_inputs(scheduled)

    def prepare_inputs(self, scheduled: Any) -> Any:
        del scheduled
        req_ids, counts_R, starts_R = self._laid_out()
        named = {"num_scheduled_tokens": counts_R, "num_computed_tokens_np": starts_R}
        return SimpleNamespace(req_ids=req_ids, **named)


class V1(Engine):
    """v1/worker/gpu_model_runner.py, 0.26: its batch has room for more, and is used again."""

    positions, input_ids = INPUTS.positions_T, SimpleNamespace(gpu=INPUTS.token_ids_T)

    def __init__(self, *given: Any) -> None:
        numbers_R = np.zeros(MAX_REQUESTS, np.int32)
        self.input_batch = SimpleNamespace(num_reqs=0, num_computed_tokens_cpu=numbers_R)
        super().__init__(*given)

    def lay_out(self, scheduled: Any) -> Any:
        batch, (req_ids, counts_R, starts_R) = self.input_batch, self._laid_out()
        batch.req_ids, batch.num_reqs = [*req_ids, "nobody"], len(req_ids)
        batch.num_computed_tokens_cpu[: len(req_ids)] = starts_R
        return self._prepare_inputs(scheduled, counts_R)

    def _prepare_inputs(self, scheduled: Any, num_scheduled_tokens: Any) -> None: ...


@contextmanager
def engine(*, has_c: bool = True, runner: type[Engine] = V2) -> Iterator[Engine]:
    """`has_c`: C handles steps that are like the last one."""
    gpu, made = Gpu(), list[DevicePublisher]()
    extension = load_step_extension() if has_c else None

    def on_gpu(*given: Any) -> OpenRing:
        opened = open_ring(*given)
        header = RingHeader(given[3], RingShape(slots=8, slot_bytes=4096, ahead=2))
        publisher = DevicePublisher(ToyLauncher(gpu), header, given[1], MAX_REQUESTS, extension)
        made.append(publisher)
        return replace(opened, publisher=publisher, forwards=publisher)

    with ExitStack() as opened:
        patched = opened.enter_context(pytest.MonkeyPatch.context())
        patched.setattr(step_publishers, "open_ring", on_gpu)
        patched.setattr(step_publishers, "new_epoch", lambda: 0xABCD_0000_1234_5678)
        patched.setattr("tests.support.toy_publisher.MAX_TOKENS", MAX_TOKENS)
        patched.setattr(step_hooks, "_read_new_request", new_request)
        patched.setattr(step_hooks, "decode_steering_plan", lambda sealed: sealed)
        folder = Path(opened.enter_context(TemporaryDirectory()))
        step_publisher = opened.enter_context(running_publisher(folder))
        yield runner(step_publisher, gpu, made[0])
        gpu.publish(len(gpu.pending))  # else closing waits


def new_request(new: Any) -> NewRequest:
    name = new.req_id
    return NewRequest(name, f"ex-{name}", RequestMark(ord(name)), 2)
