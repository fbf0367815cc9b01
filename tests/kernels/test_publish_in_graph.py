"""A captured graph publishes the step whose turn it is, and no other, however late it runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from clairai.engine.publish.header_layout import NUM_HEADERS
from clairai.engine.step import ForwardInputs
from clairai.errors import EngineGoneError
from tests.kernels.publishers import WIDE, Way, inputs_of, publishers, rows_in
from tests.kernels.test_publish_kernel import PER_RECORD, WAYS, follow
from tests.support.engine_steps import Plan


def test_a_step_of_several_parts_is_not_for_a_graph() -> None:
    num_rows = 2 * WIDE.ahead * PER_RECORD + 3
    with publishers(max_tokens=num_rows) as both:
        _, expected = both.engine.step(Plan(new=[(num_rows, 0, 0)], counts=[num_rows]))
        inputs = inputs_of(expected, num_rows)
        assert both.device.announce(both.builder.last, 1)
        both.launch.replay(inputs)
        assert both.device_ring.poll() == []
        both.device.finish(lambda: inputs)
        assert rows_in(both.device_ring.poll(1 << 20)) == expected


@pytest.mark.parametrize("way", WAYS)
def test_a_step_of_several_parts_is_published_once_however_it_ran(way: Way) -> None:
    num_rows = 2 * WIDE.ahead * PER_RECORD + 3
    with publishers(max_tokens=num_rows) as both:
        for _ in range(2):
            follow(both, [Plan(new=[(num_rows, 0, 0)], counts=[num_rows], finish=[])], [way])
            both.step(Plan(finish=[0], counts=[]), "sent")
            both.poll()


def test_a_graph_that_is_replayed_without_a_step_publishes_nothing() -> None:
    with publishers() as both:
        inputs = inputs_of([], both.tables.max_tokens)
        both.launch.replay(inputs)
        assert both.poll() == ([], [])
        follow(both, [Plan(new=[(3, 0, 0)], counts=[3])], ["graph"])
        follow(both, [Plan(counts=[1])] * NUM_HEADERS, ["graph"])
        both.launch.replay(inputs)  # where the next header will be, an old one lies
        assert both.poll() == ([], [])
        assert both.launch.turn.item() == 1 + NUM_HEADERS


@pytest.mark.parametrize("is_graph", [True, False])
def test_a_dummy_run_leaves_the_next_step_alone(is_graph: bool) -> None:
    """It is replayed when the next step's header is written already: the host is ahead."""
    with publishers() as both:
        inputs = inputs_of([], both.tables.max_tokens)
        for at in range(2 * NUM_HEADERS + 1):
            both.device.before_dummy_run()
            if not is_graph:
                both.device.forward_ran(lambda: inputs)
            both.device.after_dummy_run()
            late = both.launch.replay
            replays = [partial(late, inputs)] if is_graph else []

            def replayed(
                inputs: ForwardInputs, first: list[Any] = replays, late: Any = late
            ) -> None:
                for one in [*first, partial(late, inputs)]:
                    one()

            both.launch.replay = replayed  # type: ignore[assignment,method-assign]
            follow(both, [Plan(new=[(3, 0, 0)], counts=[3, *[1] * at])], ["graph"])
            both.launch.replay = late  # type: ignore[method-assign]


def test_a_step_that_no_graph_has_published_is_noticed_as_soon_as_anybody_looks() -> None:
    """As if a graph had been captured without what publishes: the next would take its header."""
    with publishers() as both:
        both.engine.step(Plan(new=[(3, 0, 0)], counts=[3]))
        inputs = inputs_of([], both.tables.max_tokens)
        both.device.flush()
        assert both.device.announce(both.builder.last, 1)
        both.device.finish(lambda: inputs)
        with pytest.raises(EngineGoneError, match="has not published the last"):
            both.device.flush()
        both.launch.replay(inputs)
        both.device.flush()
