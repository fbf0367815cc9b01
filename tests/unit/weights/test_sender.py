"""A whole transfer between a sender and an engine without vLLM, including its failures."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from clairai.errors import EngineGoneError, UnsupportedError, WeightsError, WeightsTornError
from clairai.weights import Sender, Sent
from clairai.weights.socket_client import BufferClient
from clairai.wire.weights_messages import DescribeWeights, ListTensors
from tests.support.footprint import nothing_left_behind
from tests.support.ring_engine import until
from tests.support.weights import SHAPES, ToyLlm, engine, weights


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[ToyLlm]:
    with engine(tmp_path) as running:
        yield running


def sender(llm: ToyLlm, tmp_path: Path, **given: Any) -> Sender:
    return Sender(llm, runtime_dir=str(tmp_path), **given)


def is_serving(llm: ToyLlm, expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(llm.model[name], tensor) for name, tensor in expected.items())


class Module(torch.nn.Module):  # type: ignore[misc]
    """A parameter for each tensor of the toy model."""

    def __init__(self, held: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._held = held

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, torch.nn.Parameter(tensor)) for name, tensor in self._held.items())


def _folder(held: dict[str, torch.Tensor], folder: Path) -> Path:
    folder.mkdir()
    names = list(held)
    for number, part in enumerate((names[:2], names[2:])):
        held_here = {name: held[name] for name in part}
        save_file(held_here, folder / f"{number}.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["mapping", "pairs", "generator", "module", "folder"])
def test_weights_come_from_modules_mappings_pairs_and_folders(
    llm: ToyLlm, tmp_path: Path, kind: str
) -> None:
    new = weights(1)
    given: Any = {  # type: ignore[no-untyped-call]
        "mapping": lambda: new,
        "pairs": lambda: list(new.items()),
        "generator": lambda: (pair for pair in new.items()),
        "module": lambda: Module(new),
        "folder": lambda: _folder(new, tmp_path / "shards"),
    }[kind]()
    sent = sender(llm, tmp_path).send(given, label="step-7")
    assert is_serving(llm, new)
    assert sent == Sent(
        version=1,
        digest=llm.updater.served.digest,
        bank_version=None,
        vectors_version=None,
        num_tensors=len(SHAPES),
        nbytes=sum(4 * tensor.numel() for tensor in new.values()),
        home="host",
        why="the engine has no GPU",
        seconds=sent.seconds,
        packed_s=sent.packed_s,
        load_s=sent.load_s,
    )
    assert llm.ask(DescribeWeights()).label == "step-7"
    assert llm.resets == 1, "blocks of the old weights must not be used"
    assert sent.bytes_per_s > 0


def test_many_buffers_and_another_type_arrive_as_well(llm: ToyLlm, tmp_path: Path) -> None:
    new = {name: tensor.bfloat16() for name, tensor in weights(2).items()}
    told: list[tuple[int, int]] = []
    sender(llm, tmp_path, buffer_bytes=1).send(
        new, progress=lambda done, total: told.append((done, total))
    )
    assert is_serving(llm, new)
    assert [done for done, _ in told] == [(index + 1) * (2 << 20) for index in range(len(SHAPES))]
    assert {total for _, total in told} == {told[-1][0]}


def test_a_tensor_that_is_not_contiguous_arrives_in_order(llm: ToyLlm, tmp_path: Path) -> None:
    new = weights(3)
    new["model.layers.0.w"] = new["model.layers.0.w"].t()
    sender(llm, tmp_path).send(new)
    assert is_serving(llm, new)


def test_versions_count_transfers_of_the_model(llm: ToyLlm, tmp_path: Path) -> None:
    versions = [sender(llm, tmp_path).send(weights(seed)).version for seed in (1, 2, 1)]
    assert versions == [1, 2, 3]
    digests = {sender(llm, tmp_path).send(weights(1)).digest for _ in range(2)}
    assert len(digests) == 1, "equal content, equal digest"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model.layers.0.b": torch.zeros(15)}, "has shape"),
        ({"model.layers.0.b": torch.zeros(16, dtype=torch.float64)}, "has dtype"),
        ({"model.layers.1.b": torch.zeros(16)}, "engine takes"),
        ({"model.layers.0.b": torch.zeros(16).to_sparse()}, "dense"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_packed(
    llm: ToyLlm, tmp_path: Path, change: dict[str, torch.Tensor], reason: str
) -> None:
    old = dict(llm.model)
    for ask in (sender(llm, tmp_path).send, sender(llm, tmp_path).check):
        with pytest.raises(WeightsError, match=reason):
            ask(weights(1) | change)
    assert is_serving(llm, old)
    assert llm.ask(DescribeWeights()).version == 0


def test_a_dry_run_says_how_much_it_would_be_and_disturbs_nobody(
    llm: ToyLlm, tmp_path: Path
) -> None:
    old = dict(llm.model)
    assert sender(llm, tmp_path).check(weights(1)) == 4 * (50 * 16 + 16 * 16 + 16 + 1)
    assert is_serving(llm, old)


def test_a_tensor_that_changes_its_shape_while_it_is_sent_is_refused(
    llm: ToyLlm, tmp_path: Path
) -> None:
    class Shifting(torch.Tensor):  # type: ignore[misc]
        def full_tensor(self) -> torch.Tensor:
            return torch.zeros(3)

    shifting = torch.zeros(16).as_subclass(Shifting)
    with pytest.raises(WeightsError, match="do not change it"):
        sender(llm, tmp_path).send(weights(1) | {"model.layers.0.b": shifting})
    assert llm.ask(DescribeWeights()).version == 0


def test_a_load_that_fails_half_way_is_reported_and_repaired_by_the_next(
    llm: ToyLlm, tmp_path: Path
) -> None:
    llm.fail_after = 2
    with pytest.raises(WeightsTornError, match="half-way"):
        sender(llm, tmp_path).send(weights(1))
    assert llm.ask(DescribeWeights()).is_torn
    with pytest.raises(WeightsTornError, match="has shape"):
        # Planned, and refused at the commit, as by an engine that has restarted.
        llm.updater.receive(_wrong_manifest(llm))
    llm.fail_after = None
    assert sender(llm, tmp_path).send(weights(2)).version == 1
    assert is_serving(llm, weights(2))
    assert not llm.ask(DescribeWeights()).is_torn


def _wrong_manifest(llm: ToyLlm) -> bytes:
    from clairai.weights.manifest import encode_manifest
    from tests.support.weights import altered, plan

    return encode_manifest(altered(plan(epoch=llm.epoch), 1, shape=(1,)))


def test_what_can_be_sent_is_listed(llm: ToyLlm) -> None:
    listed = llm.ask(ListTensors()).tensors
    assert {tensor.name: tensor.shape for tensor in listed} == dict(SHAPES)


def test_a_hundred_transfers_leave_nothing_behind(llm: ToyLlm, tmp_path: Path) -> None:
    sender(llm, tmp_path).send(weights(0))
    with nothing_left_behind():
        digests = {sender(llm, tmp_path).send(weights(5)).digest for _ in range(100)}
    gc.collect()
    assert "memfd:clairai-weights" not in Path("/proc/self/maps").read_text()
    assert len(digests) == 1
    assert llm.updater.served.version == 101


def test_a_dead_engine_is_reported(llm: ToyLlm, tmp_path: Path) -> None:
    with pytest.raises(EngineGoneError, match="own machine"):
        BufferClient(tmp_path, "00000000000000ff")
    llm.updater.close()
    assert not llm.updater.receiver.path.exists()


def test_an_engine_without_taps_is_reported(tmp_path: Path) -> None:
    class Plain:
        def collective_rpc(self, method: str, **_: Any) -> list[bytes]:
            raise AttributeError(f"no {method}")

    with pytest.raises(UnsupportedError, match="no taps"):
        Sender(Plain(), runtime_dir=str(tmp_path)).send(weights(1))


def test_a_sender_that_is_killed_leaves_the_old_weights_and_the_next_one_succeeds(
    llm: ToyLlm, tmp_path: Path
) -> None:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_die_half_way, args=(str(tmp_path), llm.epoch, theirs))
    child.start()
    assert ours.poll(60)
    manifest = ours.recv_bytes()
    from clairai.wire.weights_messages import PlanWeights

    llm.ask(PlanWeights(manifest))
    ours.send("go")
    assert ours.poll(60)
    assert ours.recv() == "one buffer is over"
    child.kill()
    child.join()
    child.close()
    until(lambda: llm.updater.receiver._tracker._expected is None)
    assert is_serving(llm, weights(0))
    assert sender(llm, tmp_path).send(weights(6)).version == 1
    ours.close()
    theirs.close()


def _die_half_way(folder: str, epoch: str, pipe: Any) -> None:
    """Deliver one of four buffers, and then do nothing more."""
    import time
    from contextlib import ExitStack

    from clairai.weights.manifest import encode_manifest
    from clairai.weights.pack import HostPacker, open_sources
    from clairai.weights.transport import HostTransport
    from tests.support.weights import plan

    with BufferClient(Path(folder), epoch) as client:
        made = plan(epoch=epoch, buffer_bytes=1)
        pipe.send_bytes(encode_manifest(made))
        pipe.recv()
        packed = HostPacker(open_sources(weights(9), ExitStack()), made).pack(0)
        HostTransport(client, "a test")._deliver(made, 0, packed)
        pipe.send("one buffer is over")
        time.sleep(600)


def test_a_sender_frees_its_buffers_once_the_engine_has_released_them(
    llm: ToyLlm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A commit may still be reading the sender's GPU after the sender has stopped waiting."""
    from clairai.weights import socket_client as ports
    from tests.support.weights import plan

    made = plan(epoch=llm.epoch)
    llm.planned(made)
    tracker = llm.updater.receiver._tracker
    taken = tracker.take(made.transfer)  # as a commit does while it loads
    caplog.set_level("DEBUG", "clairai.weights.socket_client")
    monkeypatch.setattr(ports, "LOAD_TIMEOUT_S", 0.05)
    _offered(llm, tmp_path, made.transfer).close()
    assert "has not released" in caplog.text
    assert not tracker.release(made.transfer, 0.0)
    taken.close()
    caplog.clear()
    monkeypatch.setattr(ports, "LOAD_TIMEOUT_S", 60.0)
    _offered(llm, tmp_path, made.transfer).close()
    assert "has not released" not in caplog.text


def _offered(llm: ToyLlm, tmp_path: Path, transfer: str) -> BufferClient:
    """A client whose offer to this transfer has been refused."""
    from clairai.wire.weights_messages import BufferOffer

    client = BufferClient(tmp_path, llm.epoch)
    with pytest.raises(WeightsError, match="refused"):
        client.offer(BufferOffer(transfer, 0, 1, "host"), ())
    return client
