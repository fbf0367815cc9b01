"""The ring's protocol is right in every interleaving; known-bad variants of it are caught."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.model.machine import INTENT, Exploration, Forbidden, Op, Protocol, explore, resized

TICKET_PROGRAM: tuple[Op, ...] = (
    "load_head",
    "store_words",
    "fence",
    "draw_ticket",
    "reset_ticket",
    "release_head",
)
BY_VALUE_PROGRAM: tuple[Op, ...] = ("take_seq", *TICKET_PROGRAM[1:])

DEVICE = Protocol(TICKET_PROGRAM, slots=2, blocks=2, records=4, reach=2)
DEVICE_BY_VALUE = replace(DEVICE, program=BY_VALUE_PROGRAM)
INTENT_COUNTER = replace(
    DEVICE,
    program=("load_head", "store_intent", "fence", *TICKET_PROGRAM[1:]),
    counter=INTENT,
    reach=3,
)
# What writer.py does: slot header, payload, trailer, head, each a plain store of one x86-64 core.
HOST = Protocol(
    ("take_seq", "store_words", "store_head"),
    slots=2,
    blocks=1,
    records=4,
    words=3,
    drain="oldest",
    is_kernel=False,
    reach=2,
)
# What writer.py does on ARM: store_word() in local/shared_words.h is a release store and a fence.
ARM = replace(HOST, program=("take_seq", "store_words", "store_head_release", "fence"), drain="any")

# What engine/publish/publish_kernel.py does: several records in one launch, published by one store.
COMMIT = replace(DEVICE_BY_VALUE, slots=4, records=3, ahead=2, reach=3)

HOLDING = {
    "commit 4x2x3, two ahead": COMMIT,
    "commit 3x1x4, two ahead": replace(COMMIT, slots=3, blocks=1, records=4, reach=2),
    "commit 5x2x3, three ahead": replace(COMMIT, slots=5, ahead=3, reach=3, batch=1),
    "device 2x1x6": resized(DEVICE, 2, 1, 6),
    "device 2x2x6": resized(DEVICE, 2, 2, 6),
    "device 3x2x6": resized(DEVICE, 3, 2, 6),
    "device 4x2x6": resized(DEVICE, 4, 2, 6),
    "device 2x3x4": resized(DEVICE, 2, 3, 4),
    "device 4x3x6": replace(resized(DEVICE, 4, 3, 6), batch=1),
    "device by value 3x3x5": replace(resized(DEVICE_BY_VALUE, 3, 3, 5), batch=1),
    "intent counter 2x2x4": INTENT_COUNTER,
    "host 2x1x6": resized(HOST, 2, 1, 6),
    "host 3x1x6": resized(HOST, 3, 1, 6),
    "host 4x1x6": resized(HOST, 4, 1, 6),
    "ARM 2x1x6": resized(ARM, 2, 1, 6),
    "ARM 3x1x6": resized(ARM, 3, 1, 6),
    "ARM 4x1x6": resized(ARM, 4, 1, 6),
}

KNOWN_BAD: dict[str, tuple[Protocol, Forbidden]] = {
    "block 0 bumps the head, the reader does not check": (
        replace(
            DEVICE,
            program=("load_head", "store_words", "fence", "only_block_0", "release_head"),
            reach=None,
        ),
        "torn",
    ),
    "block 0 bumps the head, the reader checks": (
        replace(
            DEVICE, program=("load_head", "store_words", "fence", "only_block_0", "release_head")
        ),
        "torn",
    ),
    "ticket, the reader does not check": (replace(DEVICE, reach=None), "torn"),
    "ticket, the reader accepts head - seq <= slots": (replace(DEVICE, reach=3), "torn"),
    "ticket without a fence before it": (
        replace(DEVICE, program=("load_head", "store_words", *TICKET_PROGRAM[3:])),
        "torn",
    ),
    "two records at once, the reader gives up one slot": (replace(COMMIT, reach=4), "torn"),
    "intent counter without a fence after it": (
        replace(INTENT_COUNTER, program=("load_head", "store_intent", *TICKET_PROGRAM[1:])),
        "torn",
    ),
    "ticket that is never reset": (
        replace(DEVICE, program=(*TICKET_PROGRAM[:4], "release_head")),
        "count",
    ),
    "host writer on a CPU without total store order": (replace(HOST, drain="any"), "torn"),
    "ARM, a release store without a fence after it": (
        replace(ARM, program=("take_seq", "store_words", "store_head_release")),
        "torn",
    ),
    "ARM, a plain store with a fence after it": (
        replace(ARM, program=("take_seq", "store_words", "store_head", "fence")),
        "torn",
    ),
    "ARM, acquire loads without a fence before the second": (replace(ARM, loads="acquire"), "torn"),
    "ARM, plain loads": (replace(ARM, loads="plain"), "torn"),
    # With more slots than records nothing is overwritten, so what is torn was never written.
    "ARM, plain loads of a ring that is not full": (
        replace(ARM, loads="plain", slots=5, reach=5),
        "torn",
    ),
    "host writer that publishes the head first": (
        replace(HOST, program=("take_seq", "store_head", "store_words")),
        "torn",
    ),
    "host writer, the reader accepts head - seq <= slots": (replace(HOST, reach=3), "torn"),
    "reader that jumps to the newest record without counting": (
        replace(DEVICE, reader="jumps"),
        "count",
    ),
    "reader that goes back one record": (replace(DEVICE, reader="rewinds"), "order"),
}


def test_the_chosen_protocols_hold_in_every_interleaving() -> None:
    explored = {name: explore(protocol) for name, protocol in HOLDING.items()}
    wrong = {name: found for name, found in explored.items() if found.outcome is not None}
    assert not wrong, _story(wrong)
    assert sum(found.num_states for found in explored.values()) >= 100_000


@pytest.mark.parametrize("name", KNOWN_BAD)
def test_pitfall_16_a_known_bad_protocol_is_caught(name: str) -> None:
    protocol, outcome = KNOWN_BAD[name]
    found = explore(protocol)
    assert found.outcome == outcome
    assert found.trace[-1] in ("reader checks", "end")


def _story(wrong: dict[str, Exploration]) -> str:
    return "\n".join(
        f"{name}: {found.outcome}\n  " + "\n  ".join(found.trace) for name, found in wrong.items()
    )
