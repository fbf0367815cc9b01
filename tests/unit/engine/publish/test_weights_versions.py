"""Which version of the weights rows, records and requests belong to, as the worker counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from clairai.compat import worker as changes
from clairai.engine.publish.step_publisher import StepPublisher
from clairai.ring.attach import RingReader
from clairai.weights import Sender
from clairai.wire import ring_messages
from clairai.wire.weights_messages import DescribeWeights, FindVersions, Versions
from tests.support.probes import probe
from tests.support.toy_publisher import SECOND, WIDTH, forward, new_request, running_publisher
from tests.support.weights import ToyLlm, engine, weights


@pytest.fixture
def step_publisher(runtime: Path) -> Iterator[StepPublisher]:
    with running_publisher(runtime, weights=0) as made:
        made.install(made.bank.add([probe("p", point=SECOND)]))
        yield made


@pytest.fixture
def llm(step_publisher: StepPublisher, tmp_path: Path) -> Iterator[ToyLlm]:
    """The part of vLLM's worker that changes weights: every way is watched."""
    with engine(tmp_path, step_publisher) as running:
        running.weight_transfer_engine = SimpleNamespace(updater=running.updater)  # type: ignore[attr-defined]
        running.reload_weights = lambda: None  # type: ignore[attr-defined]
        running.reload_weights.__name__ = "reload_weights"  # type: ignore[attr-defined]
        changes.watch_weights(running, step_publisher)
        yield running


def sender(tmp_path: Path, llm: ToyLlm) -> Sender:
    return Sender(llm, runtime_dir=str(tmp_path))


def published_weights(step_publisher: StepPublisher) -> list[int | None]:
    """The weights' versions that the records in the ring name, in order."""
    with RingReader.attach(step_publisher.server.path, start="oldest") as reader:
        return [reader.bank(record.bank_version).weights for record in reader.poll()]


def step(step_publisher: StepPublisher, number: int) -> None:
    step_publisher.begin([new_request(number)], ())
    forward(step_publisher, number, start=0, count=2)


def test_records_name_the_weights_of_their_rows(
    step_publisher: StepPublisher, llm: ToyLlm, tmp_path: Path
) -> None:
    step(step_publisher, 1)
    sender(tmp_path, llm).send(weights(1))
    step(step_publisher, 2)
    sender(tmp_path, llm).send(weights(0))
    step(step_publisher, 3)
    assert published_weights(step_publisher) == [0, 1, 2]


def test_a_probe_alone_is_no_new_version_of_the_weights(
    step_publisher: StepPublisher, llm: ToyLlm, tmp_path: Path
) -> None:
    sent = sender(tmp_path, llm).send({"probe::p": torch.ones(WIDTH)})
    step(step_publisher, 1)
    assert (sent.version, published_weights(step_publisher)) == (0, [0])


def test_probes_that_come_with_weights_are_in_the_bank_that_names_them(
    step_publisher: StepPublisher, llm: ToyLlm, tmp_path: Path
) -> None:
    sent = sender(tmp_path, llm).send(weights(1) | {"probe::p": torch.ones(WIDTH)})
    bank = step_publisher.describe_bank(step_publisher.bank.version)
    assert bank is not None
    assert (sent.bank_version, sent.version) == (bank.version, bank.weights)
    assert step_publisher.bank.probes[0].direction_D.tolist() == [1.0] * WIDTH


def test_a_request_is_of_the_weights_it_began_with(
    step_publisher: StepPublisher, llm: ToyLlm, tmp_path: Path
) -> None:
    step(step_publisher, 1)
    sender(tmp_path, llm).send(weights(1))
    step(step_publisher, 2)
    streams = (1001, 1002, 1003)
    assert llm.ask(FindVersions(streams)) == Versions((0, 1, None))


def test_weights_that_vllm_itself_has_changed_are_another_version(
    step_publisher: StepPublisher, llm: ToyLlm, tmp_path: Path
) -> None:
    sender(tmp_path, llm).send(weights(1), label="step-1")
    llm.reload_weights()  # type: ignore[attr-defined]
    step(step_publisher, 1)
    state = llm.ask(DescribeWeights())
    assert (state.version, state.label, state.digest) == (2, "", "")
    assert published_weights(step_publisher) == [2]


def test_weights_in_pieces_are_a_version_of_their_own(
    step_publisher: StepPublisher, llm: ToyLlm, tmp_path: Path
) -> None:
    llm.fail_after = 2
    with pytest.raises(Exception, match="half-way"):
        sender(tmp_path, llm).send(weights(1))
    assert (llm.updater.served.version, step_publisher.weights, llm.updater.is_torn) == (1, 1, True)
    with pytest.raises(Exception, match="in pieces"):
        sender(tmp_path, llm).send({"probe::p": torch.ones(WIDTH)})
    assert step_publisher.weights == 1, "what was refused has changed nothing"
    llm.fail_after = None
    assert sender(tmp_path, llm).send(weights(1)).version == 2


def test_an_engine_that_takes_no_weights_reports_no_version(runtime: Path) -> None:
    with running_publisher(runtime) as step_publisher:
        step(step_publisher, 1)
        assert published_weights(step_publisher) == [None]
        assert step_publisher.first_weights_of(1001) is None
        bank = msgspec.msgpack.decode(msgspec.msgpack.encode(step_publisher.bank.to_message()))
        assert bank == {"type": "bank", "version": 0, "probes": []}, "as it was before"


def test_without_our_backend_changes_are_counted_all_the_same(runtime: Path) -> None:
    def update_weights() -> None:
        """Of another backend."""

    with running_publisher(runtime) as step_publisher:
        worker = SimpleNamespace(update_weights=update_weights)
        changes.watch_weights(worker, step_publisher)
        worker.update_weights()
        step(step_publisher, 1)
        assert published_weights(step_publisher) == [1]


def test_listeners_hear_of_new_weights_before_the_next_step(step_publisher: StepPublisher) -> None:
    heard: list[int] = []
    step_publisher.weights_listeners.append(heard.append)
    step_publisher.set_weights_version(5)
    assert heard == [5]
    version, probes = step_publisher.bank.version, step_publisher.bank.to_message().probes
    assert step_publisher.describe_bank(version) == ring_messages.Bank(version, probes, 5)
