"""Transfers by GPU memory on a toy driver: nothing stays open or allocated, however they end.

The kernels run in Triton's interpreter. The toy's GPU is memory of this process, so real bytes go
through them; it fails a test that frees what somebody has open, as CUDA would not.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from clairai.errors import ClairaiError, WeightsError, WeightsTornError
from clairai.local.gpu_memory import DeviceBlock
from clairai.weights import Sender, checksum_kernel, torch_buffers, transport
from clairai.weights.engine_client import LlmEngine
from clairai.weights.manifest import Manifest
from clairai.weights.pack import DevicePacker, open_sources
from clairai.weights.pending_transfer import TransferTracker
from clairai.weights.socket_client import BufferClient
from clairai.weights.torch_buffers import ReceivedDeviceBuffer
from clairai.wire.weights_messages import BufferFilled, BufferOffer
from tests.support.cuda import UUIDS, CUresult, ToyDriver, install
from tests.support.ring_engine import DEADLINE_S, until
from tests.support.weights import ToyLlm, ToyRanks, plan, weights

GPU = torch.device("cpu:0")  # not equal to the host's device, which has no index
SECOND_GPU = torch.device("cpu:1")
UUID, SECOND_UUID = (uuid.hex() for uuid in UUIDS)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyDriver]:
    toy = install(monkeypatch)

    def device_bytes(block: DeviceBlock, _: torch.device) -> torch.Tensor:
        raw = (ctypes.c_char * block.nbytes).from_address(block.address)
        return torch.frombuffer(raw, dtype=torch.uint8)

    monkeypatch.setattr(torch_buffers, "device_bytes", device_bytes)
    monkeypatch.setattr(transport, "choose_memory", lambda *_: (GPU, "a toy"))
    monkeypatch.setattr(BufferClient, "is_same_process", False)
    _take_turns(monkeypatch)
    for name in ("synchronize", "device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())
    yield toy
    assert (toy.opened, toy.held) == (set(), {}), "everything is freed"


def _take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sender and engine are threads here, and Triton's interpreter is not thread-safe."""
    turn = threading.Lock()
    for name in ("launch_sum", "launch_copy_and_sum"):
        launch = getattr(checksum_kernel, name)

        def alone(*given: Any, launch: Any = launch) -> None:
            with turn:
                launch(*given)

        monkeypatch.setattr(checksum_kernel, name, alone)


def open_device(handle: bytes, nbytes: int, uuid: str = UUID) -> ReceivedDeviceBuffer:
    block = DeviceBlock.attach(handle, nbytes, uuid)
    stream: Any = SimpleNamespace(device=GPU)
    return ReceivedDeviceBuffer(block, stream)


@pytest.fixture
def llm(driver: ToyDriver, tmp_path: Path) -> Iterator[ToyLlm]:
    running = ToyLlm(tmp_path, gpu=(UUID, open_device))
    yield running
    running.updater.close()
    assert driver.opened == set()


def sender(llm: ToyLlm, tmp_path: Path, **given: Any) -> Sender:
    return Sender(llm, runtime_dir=str(tmp_path), buffer_bytes=1, **given)


def is_serving(llm: ToyLlm, seed: int) -> bool:
    return all(torch.equal(llm.model[name], each) for name, each in weights(seed).items())


def is_clean(driver: ToyDriver) -> bool:
    return (driver.opened, driver.held) == (set(), {})


def test_weights_arrive_and_every_buffer_is_freed(
    llm: ToyLlm, driver: ToyDriver, tmp_path: Path
) -> None:
    for seed in (1, 2):
        sent = sender(llm, tmp_path).send(weights(seed))
        assert (sent.home, sent.version) == ("device", seed)
        assert is_serving(llm, seed)
        assert is_clean(driver)
    assert driver.asked.count("cuMemAlloc") == 2 * len(weights(0))
    assert "cuMemAllocHost" not in driver.asked, "the host reads none of it"


@pytest.fixture
def ranks(driver: ToyDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyRanks]:
    """Two ranks, each with a GPU of its own."""
    gpus = [(uuid, partial(open_device, uuid=uuid)) for uuid in (UUID, SECOND_UUID)]
    chosen = (GPU, SECOND_GPU), "a toy"
    monkeypatch.setattr(transport, "choose_memories", lambda *_: chosen)
    running = ToyRanks(tmp_path, 2, gpus)
    yield running
    running.close()
    assert driver.opened == set()


def test_each_rank_opens_buffers_on_its_own_gpu_alone(
    ranks: ToyRanks, driver: ToyDriver, tmp_path: Path
) -> None:
    for seed, given in ((1, weights(1)), (2, iter(weights(2).items()))):
        sent = sender(ranks, tmp_path).send(given)
        assert (sent.home, sent.version) == ("device", seed)
        assert [is_serving(rank, seed) for rank in ranks.ranks] == [True, True]
        assert is_clean(driver)
    assert driver.asked.count("cuMemAlloc") == 2 * 2 * len(weights(0))


def test_a_tensor_is_gathered_once_whatever_the_number_of_gpus(
    ranks: ToyRanks, tmp_path: Path
) -> None:
    gathered: list[str] = []

    class Shard(torch.Tensor):  # type: ignore[misc]
        def full_tensor(self) -> torch.Tensor:
            gathered.append("once")
            return self.as_subclass(torch.Tensor)

    shards = {name: tensor.as_subclass(Shard) for name, tensor in weights(1).items()}
    sender(ranks, tmp_path).send(shards)
    assert len(gathered) == len(shards)
    assert is_serving(ranks.ranks[1], 1)


def test_a_failed_load_frees_every_buffer(llm: ToyLlm, driver: ToyDriver, tmp_path: Path) -> None:
    llm.fail_after = 2
    with pytest.raises(WeightsTornError):
        sender(llm, tmp_path).send(weights(1))
    assert is_clean(driver)


@pytest.mark.parametrize(
    "call", ["cuMemAlloc", "cuIpcGetMemHandle", "cuIpcOpenMemHandle", "cuPointerGetAttribute"]
)
def test_a_failing_driver_leaves_the_old_weights_and_nothing_else(
    llm: ToyLlm, driver: ToyDriver, tmp_path: Path, call: str
) -> None:
    driver.failing[call] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(ClairaiError, match="OUT_OF_MEMORY"):
        sender(llm, tmp_path).send(weights(1))
    assert is_clean(driver)
    assert is_serving(llm, 0)
    driver.failing.clear()
    assert sender(llm, tmp_path).send(weights(2)).version == 1


def test_a_commit_that_is_refused_frees_nothing_that_the_engine_has_open(
    llm: ToyLlm, driver: ToyDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All buffers are mapped then; the toy driver refuses to free mapped memory."""

    def refused(*_: Any) -> None:
        assert len(driver.opened) == len(weights(0))
        raise WeightsError("planted")

    monkeypatch.setattr(LlmEngine, "commit", refused)
    with pytest.raises(WeightsError, match="planted"):
        sender(llm, tmp_path).send(weights(1))
    assert is_clean(driver)


def test_memory_smaller_than_the_plan_says_is_refused(
    llm: ToyLlm, driver: ToyDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def claimed(_: ToyDriver, _attribute: str, address: int) -> tuple[Any, ...]:
        return CUresult.CUDA_SUCCESS, len(driver.held[address]) - 1

    monkeypatch.setattr(ToyDriver, "cuPointerGetAttribute", claimed)
    with pytest.raises(WeightsError, match="bytes, peer claims"):
        sender(llm, tmp_path).send(weights(1))
    assert is_clean(driver)


def test_what_changed_between_packing_and_reading_is_refused(
    llm: ToyLlm, driver: ToyDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TransferTracker.read_full

    def spoiled(self: TransferTracker, full: Any) -> Any:
        landed: Any = self.peek(full.transfer).buffers[full.index]
        landed.bytes_N[0] ^= 1
        return original(self, full)

    monkeypatch.setattr(TransferTracker, "read_full", spoiled)
    with pytest.raises(WeightsError, match="another checksum"):
        sender(llm, tmp_path).send(weights(1))
    assert is_clean(driver)
    assert is_serving(llm, 0)


def noted(monkeypatch: pytest.MonkeyPatch, *methods: tuple[type, str]) -> list[str]:
    """The names of these methods, in the order in which calls returned."""
    order: list[str] = []
    for owner, name in methods:
        original = getattr(owner, name)

        def ended(*given: Any, name: str = name, original: Any = original) -> Any:
            found = original(*given)
            order.append(name)
            return found

        monkeypatch.setattr(owner, name, ended)
    return order


def test_a_buffer_is_opened_before_it_is_full_and_read_after(
    llm: ToyLlm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the content of the full buffer counts, not that at the time it is opened."""
    order = noted(
        monkeypatch,
        (TransferTracker, "accept_offer"),
        (DevicePacker, "_finish"),
        (TransferTracker, "read_full"),
    )
    offer_early = BufferClient.offer_early

    def shown(self: BufferClient, offer: Any) -> None:
        offer_early(self, offer)
        until(lambda: order.count("accept_offer") == offer.index + 1)

    monkeypatch.setattr(BufferClient, "offer_early", shown)
    sender(llm, tmp_path).send(weights(1))
    assert is_serving(llm, 1)
    assert order[:3] == ["accept_offer", "accept_offer", "_finish"], (
        "the second is filled before the first is read"
    )
    assert order.count("read_full") == len(weights(0))


def test_what_has_to_be_gathered_is_gathered_for_one_buffer_at_a_time(
    llm: ToyLlm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a trainer with sharded weights, whose GPU has no memory for two buffers."""
    order = noted(monkeypatch, (DevicePacker, "begin"), (DevicePacker, "_finish"))
    monkeypatch.setattr(torch.Tensor, "full_tensor", lambda shard: shard, raising=False)
    sender(llm, tmp_path).send(weights(1))
    assert order == ["begin", "_finish"] * len(weights(0))
    assert is_serving(llm, 1)


@pytest.mark.parametrize(("index", "reason"), [(1, "1 have come and 0 of them were read"), (0, "")])
def test_buffers_are_finished_in_order(
    llm: ToyLlm, tmp_path: Path, index: int, reason: str
) -> None:
    with begun(llm, tmp_path) as (made, client):
        if not reason:
            client.finish(BufferFilled(made.transfer, index), made.buffers[index])
            index, reason = 0, "1 have come and 1 of them were read"  # a second time
        with pytest.raises(WeightsError, match=reason):
            client.finish(BufferFilled(made.transfer, index), made.buffers[index])
    assert is_serving(llm, 0)


def test_a_buffer_that_was_offered_and_not_filled_does_not_count(
    llm: ToyLlm, tmp_path: Path
) -> None:
    with begun(llm, tmp_path) as (made, _):
        tracker = llm.updater.receiver._tracker
        until(lambda: len(tracker.peek(made.transfer).buffers) == 1)
        summed = (msgspec.structs.replace(each, checksum="0" * 16) for each in made.tensors)
        refusal = llm.committed(msgspec.structs.replace(made, tensors=tuple(summed)))
        assert "0 of 4 buffers have come" in refusal.reason
    assert is_serving(llm, 0)


def test_a_new_plan_waits_until_the_old_one_is_no_longer_read(
    llm: ToyLlm, driver: ToyDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing memory that a kernel reads would kill the engine's process."""
    is_reading, may_go_on = threading.Event(), threading.Event()
    original = ReceivedDeviceBuffer.checksums

    def slow(self: ReceivedDeviceBuffer, wanted: Any) -> list[str]:
        is_reading.set()
        assert may_go_on.wait(DEADLINE_S)
        assert driver.opened, "it is open while it is read"
        return original(self, wanted)

    monkeypatch.setattr(ReceivedDeviceBuffer, "checksums", slow)
    with begun(llm, tmp_path) as (made, client), ThreadPoolExecutor(2) as threads:
        read = threads.submit(client.finish, BufferFilled(made.transfer, 0), made.buffers[0])
        assert is_reading.wait(DEADLINE_S)
        replaced = threads.submit(llm.updater.receiver._tracker.drop)
        until(lambda: llm.updater.receiver._tracker._expected is None)
        assert not replaced.done()
        may_go_on.set()
        with pytest.raises(WeightsError, match="another plan has come"):
            read.result(DEADLINE_S)
        replaced.result(DEADLINE_S)


def test_the_engine_answers_before_it_closes_what_it_read(
    llm: ToyLlm, driver: ToyDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing a buffer takes time for which the sender waits, and not the requests."""
    commit, opened = LlmEngine.commit, []

    def committed(self: LlmEngine, manifest: bytes) -> Any:
        answer = commit(self, manifest)
        opened.append(len(driver.opened))
        return answer

    monkeypatch.setattr(LlmEngine, "commit", committed)
    sender(llm, tmp_path).send(weights(1))
    assert opened == [len(weights(0))]
    assert is_clean(driver)
    assert is_serving(llm, 1)


@contextlib.contextmanager
def begun(llm: ToyLlm, tmp_path: Path) -> Iterator[tuple[Manifest, BufferClient]]:
    """A plan of four buffers, of which the first is filled and offered."""
    made = plan(epoch=llm.epoch, device=UUID, buffer_bytes=1)
    llm.planned(made)
    packer = DevicePacker(open_sources(weights(1), contextlib.ExitStack()), made, GPU)
    with contextlib.closing(packer), BufferClient(tmp_path, llm.epoch) as client:
        first = packer.begin(0)
        client.offer_early(BufferOffer(made.transfer, 0, made.buffers[0], "device", first.handle))
        first.finish()
        yield made, client
