"""The consumer that calls a function: what it is called with, and what happens when it fails."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from clairai.errors import StoreStoppedError
from clairai.store.callback import Delivery
from tests.support.consumers import ENGINE, feed, open_consumer
from tests.support.row_blocks import block, values

HERE = "tests.unit.store.test_callback"


class Recorder:
    """Stands in for the callback below and records what it is called with."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self.error: Exception | None = None
        self.is_called = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __call__(self, delivery: Delivery) -> None:
        self.is_called.set()
        assert self.may_go_on.wait(20)
        if self.error is not None:
            raise self.error
        self.deliveries.append(delivery)


receive = Recorder()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(f"{HERE}.receive", made)
    return made


def test_a_function_is_called_with_the_rows_and_their_notes(recorder: Recorder) -> None:
    consumer = feed(open_consumer("callback", call=f"{HERE}:receive"))
    consumer.flush(10)
    (delivery,) = recorder.deliveries
    assert np.array_equal(delivery.values(), values(1, np.arange(3), "post_block.3"))
    assert delivery.rows["position"].tolist() == [0, 1, 2]
    assert (delivery.about, delivery.notes[1].tags) == (ENGINE, '{"a":1}')
    assert (consumer.where, consumer.policy) == (f"{HERE}:receive", "drop")
    consumer.close()


def test_rows_with_which_a_function_failed_are_counted_as_lost(recorder: Recorder) -> None:
    recorder.error = RuntimeError("no")
    consumer = feed(open_consumer("callback", call=f"{HERE}:receive"))
    consumer.flush(10)
    assert (consumer.state.name, "RuntimeError" in consumer.state.reason) == ("stopped", True)
    assert consumer.losses(1) == 3
    recorder.error = None
    assert consumer.offer(block(2))
    consumer.flush(10)
    assert (consumer.state.name, len(recorder.deliveries)) == ("writing", 1)
    with pytest.raises(StoreStoppedError, match="3 accepted rows are lost"):
        consumer.close()


def test_a_slow_function_does_not_delay_offers(recorder: Recorder) -> None:
    recorder.may_go_on.clear()
    consumer = open_consumer("callback", call=f"{HERE}:receive", queue_mib=1)
    accepted = [consumer.offer(block(1, 20_000))]
    assert recorder.is_called.wait(20)  # the function has the first, and does not return
    accepted += [consumer.offer(block(stream, 20_000)) for stream in range(2, 6)]
    assert (accepted[0], accepted[-1]) == (True, False)
    assert consumer.losses(5) == 20_000
    recorder.may_go_on.set()
    consumer.close()
    assert len(recorder.deliveries) == sum(accepted)
