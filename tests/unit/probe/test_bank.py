"""The bank of an engine: every change is whole or refused, and columns keep one order."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.errors import CapacityError, ClairaiError, ConfigError, PointError, ProbeError
from clairai.points import Point
from clairai.probe.bank import MAX_PROBES, EngineBank
from clairai.probe.model import Probe
from clairai.wire import ring_messages
from tests.support.probes import numbers, probe

FIRST, SECOND, THIRD = (Point("post_block", layer) for layer in (0, 1, 2))
MODEL = "org/Tiny-1B"


def empty(capacity: int = 2) -> EngineBank:
    return EngineBank.empty((FIRST, SECOND), capacity, 3, MODEL)


def three() -> EngineBank:
    return empty().add([probe("a", point=SECOND), probe("b", point=FIRST), probe("c", point=FIRST)])


def names(columns: EngineBank) -> list[str]:
    return [info.name for info in columns.to_message().probes]


def test_columns_are_ordered_by_site_then_slot() -> None:
    assert names(three()) == ["b", "c", "a"]
    assert three().slots == ((0, 0), (0, 1), (1, 0))
    assert [made.name for made in three().probes] == names(three())


def test_every_change_is_a_new_version_and_the_old_stays_as_it_was() -> None:
    old = three()
    new = old.remove(["b"])
    assert (old.version, new.version) == (1, 2)
    assert (names(old), names(new)) == (["b", "c", "a"], ["c", "a"])
    assert new.to_message().version == 2


def test_a_removed_probe_leaves_a_slot_that_the_next_one_takes() -> None:
    columns = three().remove(["b"]).add([probe("d", point=FIRST)])
    assert names(columns) == ["d", "c", "a"]
    assert columns.slots == ((0, 0), (0, 1), (1, 0))


def test_a_probe_replaced_at_its_site_keeps_its_slot() -> None:
    columns = three().remove(["b"]).replace(probe("c", point=FIRST, bias=1.0))
    assert columns.slots == ((0, 1), (1, 0))  # not slot 0, though it is free
    assert columns.probes[0].bias == 1.0


def test_a_probe_replaced_elsewhere_moves_and_frees_its_slot() -> None:
    columns = three().replace(probe("b", point=SECOND))
    assert names(columns) == ["c", "a", "b"]
    assert columns.slots == ((0, 1), (1, 0), (1, 1))


def test_new_directions_of_all_probes_leave_their_columns_as_they_were_placed() -> None:
    old = three()
    rows_PD = np.arange(1, 10, dtype=np.float32).reshape(3, 3)
    new = old.redirect(old.names, rows_PD).redirect(old.names, 2 * rows_PD)
    assert (new.version, new.slots, new.names) == (3, old.slots, old.names)
    assert new.placed is old.placed
    assert [made.direction_D.tolist() for made in new.probes] == (2 * rows_PD).tolist()
    assert new.probes[0] is new.by_name["b"]


def test_new_directions_of_some_probes_and_later_changes_keep_the_others() -> None:
    rows_PD = np.arange(1, 10, dtype=np.float32).reshape(3, 3)
    redirected = three().redirect(three().names, rows_PD)
    new = redirected.redirect(["c"], 5 * rows_PD[:1]).add([probe("d", point=SECOND)])
    found = {made.name: made.direction_D.tolist() for made in new.probes}
    assert [found["b"], found["a"]] == [rows_PD[0].tolist(), rows_PD[2].tolist()]
    assert found["c"] == [5.0, 10.0, 15.0]
    assert new.names == ("b", "c", "a", "d")


def test_two_probes_can_change_places_in_a_full_bank() -> None:
    full = empty(1).add([probe("a", point=FIRST), probe("b", point=SECOND)])
    swapped = full.replace(probe("a", point=SECOND), probe("b", point=FIRST))
    assert names(swapped) == ["b", "a"]
    assert swapped.version == full.version + 1


def test_the_last_slot_is_usable_and_one_more_is_refused_with_the_bound() -> None:
    full = empty().add([probe("a", point=FIRST), probe("b", point=FIRST)])
    with pytest.raises(CapacityError, match=r"all 2 slots at post_block\.0 .*raise `capacity`"):
        full.add([probe("c", point=FIRST)])
    assert full.add([probe("c", point=SECOND)]).slots[-1] == (1, 0)


def test_points_that_are_one_tensor_share_its_slots() -> None:
    same = {Point("post_block", 0): "mid", Point("pre_attn", 1): "mid"}
    columns = EngineBank.empty((*same, THIRD), 2, 3, MODEL, same)
    assert columns.sites == ("mid", "post_block.2")
    taken = columns.add([probe(str(i), point=point) for i, point in enumerate(same)])
    assert taken.slots == ((0, 0), (0, 1))
    assert taken.to_message().probes[1].point == "pre_attn.1"
    with pytest.raises(CapacityError, match="at mid"):
        taken.add([probe("x", point=Point("pre_attn", 1))])


def test_a_point_that_is_the_same_tensor_as_a_tapped_one_is_served() -> None:
    same = {FIRST: "mid", Point("pre_attn", 1): "mid", THIRD: "untapped"}
    columns = EngineBank.empty((FIRST,), 2, 3, MODEL, same)
    assert columns.add([probe(point=Point("pre_attn", 1))]).slots == ((0, 0),)
    with pytest.raises(PointError):
        columns.add([probe(point=THIRD)])


REFUSED: list[tuple[Callable[[EngineBank], EngineBank], type[ClairaiError], str]] = [
    (lambda c: c.add([probe("d", direction_D=numbers(1))]), ProbeError, "width 1 and .* has 3"),
    (lambda c: c.add([probe("d", model="org/Other")]), ProbeError, "made for 'org/Other'"),
    (
        lambda c: c.add([probe("d", point=THIRD)]),
        PointError,
        "tapped are post_block.0, post_block.1",
    ),
    (lambda c: c.add([probe("a")]), ProbeError, "named a; use replace"),
    (lambda c: c.add([probe("d"), probe("d")]), ProbeError, "d was given twice"),
    (lambda c: c.add([probe("d"), probe("e")]), CapacityError, "all 2 slots"),
    (lambda c: c.add([probe("d"), probe("e", point=THIRD)]), PointError, "not tapped"),
    (lambda c: c.replace(probe("d")), ProbeError, "no probe named 'd'; it has a, b, c"),
    (lambda c: c.replace(probe("a", point=FIRST)), CapacityError, "all 2 slots"),
    (lambda c: c.replace(probe("a", point=THIRD)), PointError, "not tapped"),
    (lambda c: c.replace(probe("a", direction_D=numbers(1))), ProbeError, "width"),
    (lambda c: c.replace(probe("a"), probe("a")), ProbeError, "given twice"),
    (lambda c: c.remove(["a", "d"]), ProbeError, "no probe named 'd'"),
    (lambda c: c.remove(["x" * 10**6]), ProbeError, "no probe named"),
]


@pytest.mark.parametrize(("change", "error", "words"), REFUSED)
def test_a_refused_change_leaves_the_bank_untouched(
    change: Callable[[EngineBank], EngineBank], error: type[ClairaiError], words: str
) -> None:
    columns = three()
    before = (columns.to_message(), columns.slots, columns.probes)
    with pytest.raises(error, match=words) as caught:
        change(columns)
    assert (columns.to_message(), columns.slots, columns.probes) == before
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("model", ["org/Tiny-1B", "tiny-1b", "/models/TINY-1B/", "other/tiny-1B"])
def test_a_model_is_known_by_the_last_part_of_its_name(model: str) -> None:
    assert names(empty().add([probe(model=model)])) == ["p"]


def test_a_long_list_of_tapped_points_is_shortened() -> None:
    columns = EngineBank.empty([Point("post_block", layer) for layer in range(100)], 1, 3, MODEL)
    with pytest.raises(PointError, match="and 92 more"):
        columns.add([probe(point=Point("pre_attn", 0))])


def test_a_bank_without_points_or_slots_is_refused() -> None:
    with pytest.raises(PointError, match="at least one"):
        EngineBank.empty((), 1, 3, MODEL)
    with pytest.raises(ConfigError, match="capacity is 0"):
        empty(0)


def test_the_fullest_bank_fits_one_message_and_one_more_probe_is_refused() -> None:
    point = Point("post_block", 99_999)
    ends = (-3.4028234663852886e29, 3.4028234663852886e29)
    widest = [
        probe(f"{index:_>128}", point=point, threshold=ends[0], calibration=ends)
        for index in range(MAX_PROBES)
    ]
    columns = EngineBank.empty((point,), MAX_PROBES + 1, 3, MODEL).add(widest)
    assert len(msgspec.json.encode(columns.to_message())) <= ring_messages.MAX_MESSAGE_BYTES
    with pytest.raises(CapacityError, match="2049 probes, and a bank holds 2048"):
        columns.add([probe("one-more", point=point)])
    assert columns.replace(widest[0]).version == 2


changes = st.tuples(
    st.sampled_from(["add", "replace", "remove"]),
    st.sampled_from("abcdef"),
    st.sampled_from([FIRST, SECOND, THIRD]),
)


def changed(columns: EngineBank, verb: str, made: Probe) -> EngineBank:
    if verb == "remove":
        return columns.remove([made.name])
    return columns.add([made]) if verb == "add" else columns.replace(made)


def is_allowed(held: dict[str, Point], verb: str, made: Probe) -> bool:
    if (made.name in held) == (verb == "add"):
        return False
    others = [point for name, point in held.items() if name != made.name]
    return verb == "remove" or (made.point != THIRD and others.count(made.point) < 2)


@settings(max_examples=200, deadline=None)
@given(st.lists(changes, max_size=25))
def test_any_history_of_changes_ends_as_a_plain_dict_would(
    history: list[tuple[str, str, Point]],
) -> None:
    columns, held = empty(), dict[str, Point]()
    for verb, name, point in history:
        made = probe(name, point=point)
        if not is_allowed(held, verb, made):
            with pytest.raises((ProbeError, PointError)):
                changed(columns, verb, made)
            continue
        columns = changed(columns, verb, made)
        held.pop(name, None)
        held |= {} if verb == "remove" else {name: point}
        assert {made.name: made.point for made in columns.probes} == held
        assert list(columns.slots) == sorted(set(columns.slots))
        assert all(site < 2 and slot < 2 for site, slot in columns.slots)
