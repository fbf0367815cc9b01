"""On a GPU: weights go from a trainer's memory to the engine's by 64-byte handles, and back.

The engine core is a process of its own: CUDA opens no handle in the process that made it. Free
memory is counted on the whole GPU: nothing else may start or end on it meanwhile.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

import clairai
from clairai.errors import WeightsError
from clairai.weights import checksum as host
from clairai.weights import device_checksum
from clairai.weights.manifest import encode_manifest, parse_manifest
from clairai.weights.pack import DevicePacker, open_sources
from clairai.weights.socket_client import BufferClient
from clairai.wire import weights_messages
from clairai.wire.weights_messages import BufferFilled, BufferOffer
from tests.engine import weighed
from tests.engine.process import EngineProcess
from tests.gpu import forced

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

TRANSFERS = 100


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forced.model(tmp_path_factory.mktemp("weights") / "tiny")


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weighed.perturb(model, tmp_path_factory.mktemp("weights-other") / "tiny")


class Running(NamedTuple):
    """Two engines of the same arguments, started together: a start takes most of the time."""

    engine: EngineProcess  # takes weights, and was started with `model`
    fresh: EngineProcess  # was started with `other`
    runtime: Path


@pytest.fixture(scope="module")
def running(model: Path, other: Path, runtime: Path) -> Iterator[Running]:
    taking = {
        "weight_transfer_config": {"backend": "clairai_ipc"},
        "additional_config": clairai.config(points=["pre_attn.0"], runtime_dir=str(runtime)),
    }
    with ThreadPoolExecutor(2) as pool:
        starting = [
            pool.submit(_start, model, runtime, taking),
            pool.submit(_start, other, runtime, {}),
        ]
        try:
            yield Running(starting[0].result(), starting[1].result(), runtime)
        finally:  # an engine takes as long to end as it likes: both at once
            wait([pool.submit(_end, each) for each in starting])


def _end(starting: Future[EngineProcess]) -> None:
    if starting.exception() is None:
        starting.result().close()


def _start(model: Path, runtime: Path, more: dict[str, Any]) -> EngineProcess:
    return EngineProcess(
        runtime=runtime,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        model=str(model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=16,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 28,  # measured by none of the two while the other starts
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4]},  # as many as are asked for
        **more,
    )


def answers(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    given = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": list(range(at, at + 8))} for at in (1, 40, 300)]
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, given, use_tqdm=False)]


def _held(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    loaded = load_file(folder / "model.safetensors")
    return {name: tensor.to("cuda", torch.bfloat16) for name, tensor in loaded.items()}


def send(llm: Any, folder: Path, times: int = 1) -> dict[str, Any]:
    """From tensors on the GPU; what the last one says, and what the GPU had free in between."""
    from clairai.weights import Sender

    held = _held(folder)
    sender = Sender(llm)
    free, digests = [], set()
    for _ in range(times):
        sent = sender.send(held)
        digests.add(sent.digest)
        free.append(torch.cuda.mem_get_info()[0])
    return {"home": sent.home, "version": sent.version, "digests": len(digests), "free": free}


def test_the_kernels_checksum_is_the_hosts() -> None:
    sizes = [(8 << 20) + 5, 0, 1, 8, 131072, 131080]
    held = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    expected = [host.checksum(raw.numpy().tobytes()) for raw in held]
    spans = [raw.cuda() for raw in held]
    targets = [torch.zeros_like(span) for span in spans]
    assert device_checksum.checksums(spans) == expected
    assert device_checksum.copy_and_checksum(spans, targets) == expected
    assert all(torch.equal(span, target) for span, target in zip(spans, targets, strict=True))


def test_weights_go_over_by_handle_and_come_back(
    running: Running, model: Path, other: Path
) -> None:
    before = running.engine.call(answers)
    there = running.engine.call(send, other)
    after = running.engine.call(answers)
    back = running.engine.call(send, model)
    assert there["home"] == back["home"] == "device"
    assert back["version"] == there["version"] + 1
    assert running.engine.call(answers) == before != after
    assert running.fresh.call(answers) == after


def test_a_hundred_transfers_leave_the_gpu_as_it_was(running: Running, model: Path) -> None:
    found = running.engine.call(send, model, TRANSFERS)
    assert found["digests"] == 1
    assert found["free"][-1] == found["free"][1], "bytes were not given back"


def plan(llm: Any, folder: Path) -> bytes:
    """A manifest that the engine expects the buffers of from now on; four of them or more."""
    from clairai.library.engine_control import ask_engine
    from clairai.weights.pack import plan_buffers

    state = ask_engine(llm, weights_messages.DescribeWeights(), weights_messages.WeightsState)
    described = [source.spec for source in open_sources(_held(folder), ExitStack())]
    planned = plan_buffers(
        described,
        transfer=secrets.token_hex(16),
        epoch=state.epoch,
        device=state.device,
        buffer_bytes=1,
    )
    manifest = encode_manifest(planned)
    ask_engine(llm, weights_messages.PlanWeights(manifest), weights_messages.WeightsPlanned)
    return manifest


FORGED = {
    "a handle of nothing": {"handle": bytes(64)},
    "a handle cut short": {"handle": bytes(63)},
    "honest": {},
}


def hand_over(folder: Path, runtime: Path, pipe: Any) -> None:
    """A sender of its own: for each plan one buffer, honest or not; it is killed with the last.

    One process for all: to start one, and CUDA in it, takes longer than all else here.
    """
    held = open_sources(_held(folder), ExitStack())
    while True:
        raw, changes = pipe.recv()
        manifest = parse_manifest(raw)
        packer = DevicePacker(held, manifest, torch.device("cuda:0"))
        begun = packer.begin(0)
        offer = BufferOffer(manifest.transfer, 0, manifest.buffers[0], "device", begun.handle)
        with BufferClient(runtime, manifest.epoch) as client:
            client.offer_early(msgspec.structs.replace(offer, **changes))
            begun.finish()
            try:
                client.finish(BufferFilled(manifest.transfer, 0), manifest.buffers[0])
                pipe.send("taken")
                pipe.recv()  # never comes: it is killed, the buffer open on both sides
            except WeightsError as error:
                pipe.send(error.reason)
        packer.close()


def test_a_sender_that_lies_or_is_killed_leaves_the_old_weights_and_no_memory(
    running: Running, model: Path, other: Path
) -> None:
    running.engine.call(send, model)
    before, free = running.engine.call(answers), torch.cuda.mem_get_info()[0]
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=hand_over, args=(other, running.runtime, theirs))
    child.start()
    for forge, changes in FORGED.items():
        ours.send((running.engine.call(plan, other), changes))
        assert ours.poll(60)
        assert (ours.recv() == "taken") == (forge == "honest")
        assert running.engine.call(answers) == before
    child.kill()
    child.join()
    for pipe in (ours, theirs):
        pipe.close()
    assert running.engine.call(answers) == before
    assert running.engine.call(send, model)["home"] == "device"
    assert torch.cuda.mem_get_info()[0] >= free
