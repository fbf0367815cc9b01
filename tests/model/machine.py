"""Explores every state that a ring's writer and reader can reach, and finds the first wrong one.

Memory is as weak as the protocol may meet it. Every block of the writer has a store buffer that
drains in any order (a GPU, ARM) or oldest first (x86-64); stores to one address stay in order. A
release store drains after all older ones, and lets younger ones pass. Records of a GPU are kernels
on one stream: the next begins when the last one's blocks are done. The reader copies the words of a
batch in any order. Its loads of the counter are ordered as `loads` says. All see one memory, which
is so on x86-64 and ARMv8 (both multi-copy atomic), and not on POWER.

Forbidden outcomes:
    torn        a record is delivered with a word of another record, or with one never written
    order       a record is delivered twice, or after a later one
    count       all is read, and delivered + lost is not what was published
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

Op = Literal[
    "take_seq",  # the record's number is given by value
    "load_head",  # the record's number is read from memory (all that a CUDA graph allows)
    "store_intent",
    "store_words",
    "fence",
    "draw_ticket",  # all but the last block stop here
    "only_block_0",  # all but block 0 stop here
    "reset_ticket",
    "store_head",
    "store_head_release",  # visible after what was stored before it
    "release_head",  # the same, and before what is stored after it
]
Forbidden = Literal["torn", "order", "count"]

T = TypeVar("T")

HEAD, INTENT, TICKET, WORDS = 0, 1, 2, 3  # addresses
EMPTY = -1  # a word that was never written


@dataclass(frozen=True)
class Protocol:
    """A writer's program, run by each block for each record, and a reader's rule."""

    program: tuple[Op, ...]
    slots: int
    blocks: int
    records: int  # or launches, of `ahead` records each
    words: int = 1  # per block and slot
    ahead: int = 1  # records that are written at once and published by one store
    drain: Literal["any", "oldest"] = "any"
    is_kernel: bool = True  # buffers are empty before the next record begins
    counter: int = HEAD  # what the reader loads after the copy
    reach: int | None = None  # it accepts counter - seq < reach; None: it accepts all
    batch: int = 2  # records per poll
    reader: Literal["exact", "jumps", "rewinds"] = "exact"
    # ordered: copies are after the first load and before the second (x86-64, load_word() in C)
    # acquire: copies are after the first load, the second may come before them
    # plain: copies of the next record may also come before the first load
    loads: Literal["ordered", "acquire", "plain"] = "ordered"

    @property
    def width(self) -> int:
        """Words in a slot."""
        return self.blocks * self.words

    def address(self, seq: int, word: int) -> int:
        """Where a word of a record lies."""
        return WORDS + seq % self.slots * self.width + word


class Store(NamedTuple):
    """A store that is not visible yet."""

    address: int
    value: int
    is_release: bool = False


class Block(NamedTuple):
    """One block of the writer, part way through its program."""

    pc: int
    seq: int
    buffer: tuple[Store, ...]


class Poll(NamedTuple):
    """The reader; `copied` is empty between polls, and holds None for a word not copied yet."""

    next: int
    copied: tuple[int | None, ...]
    accounted: int  # delivered + lost
    newest: int  # last record delivered
    counted: int | None = None  # what the second load gave, if it came early
    early: tuple[int | None, ...] = ()  # words of record `next` that were copied before the poll


class State(NamedTuple):
    """Everything."""

    memory: tuple[int, ...]
    record: int
    blocks: tuple[Block, ...]
    poll: Poll


class Wrong(NamedTuple):
    """A forbidden outcome."""

    outcome: Forbidden


Move = tuple[str, State | Wrong]


@dataclass(frozen=True)
class Exploration:
    """What came of trying every interleaving; `trace` leads to the forbidden outcome."""

    num_states: int
    outcome: Forbidden | None
    trace: tuple[str, ...]


def explore(protocol: Protocol) -> Exploration:
    """Breadth first, so the trace is a shortest one."""
    start = _start(protocol)
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    frontier = deque([start])
    while frontier:
        state = frontier.popleft()
        for label, after in _moves(protocol, state):
            if isinstance(after, Wrong):
                return Exploration(len(came_from), after.outcome, _trace(came_from, state, label))
            if after not in came_from:
                came_from[after] = (state, label)
                frontier.append(after)
    return Exploration(len(came_from), None, ())


def resized(protocol: Protocol, slots: int, blocks: int, records: int) -> Protocol:
    """The same protocol on another ring; its reach keeps its distance to the number of slots."""
    reach = None if protocol.reach is None else protocol.reach - protocol.slots + slots
    return replace(protocol, slots=slots, blocks=blocks, records=records, reach=reach)


def _start(protocol: Protocol) -> State:
    memory = (0, 0, 0) + (EMPTY,) * (protocol.slots * protocol.width)
    blocks = (Block(0, 0, ()),) * protocol.blocks
    return State(memory, 0, blocks, Poll(0, (), 0, -1))


def _trace(
    came_from: dict[State, tuple[State, str] | None], state: State, label: str
) -> tuple[str, ...]:
    labels = [label]
    while (step := came_from[state]) is not None:
        state, label = step
        labels.append(label)
    return tuple(reversed(labels))


def _moves(protocol: Protocol, state: State) -> Iterator[Move]:
    is_over = True
    for move in _all_moves(protocol, state):
        is_over = False
        yield move
    if is_over and state.poll.accounted != protocol.records * protocol.ahead:
        yield "end", Wrong("count")


def _all_moves(protocol: Protocol, state: State) -> Iterator[Move]:
    for index, block in enumerate(state.blocks):
        yield from _drains(protocol, state, index, block)
        if block.pc < len(protocol.program):
            yield from _steps(protocol, state, index, block)
    yield from _next_record(protocol, state)
    yield from _reads(protocol, state)


def _drains(protocol: Protocol, state: State, index: int, block: Block) -> Iterator[Move]:
    reachable = block.buffer[:1] if protocol.drain == "oldest" else block.buffer
    passed: set[int] = set()
    for position, (address, value, is_release) in enumerate(reachable):
        if address in passed:
            continue  # an older store to the same address goes first
        passed.add(address)
        if is_release and position:
            continue  # all older stores go first
        rest = block.buffer[:position] + block.buffer[position + 1 :]
        memory = _put(state.memory, address, value)
        after = _with_block(state, index, block._replace(buffer=rest))
        yield f"block {index} drains [{address}] = {value}", after._replace(memory=memory)


def _steps(protocol: Protocol, state: State, index: int, block: Block) -> Iterator[Move]:
    op = protocol.program[block.pc]
    if op in ("fence", "release_head") and block.buffer:
        return  # waits for its buffer
    memory, after = state.memory, block._replace(pc=block.pc + 1)
    if op == "take_seq":
        after = after._replace(seq=state.record * protocol.ahead)
    elif op == "load_head":
        after = after._replace(seq=memory[HEAD])
    elif op == "draw_ticket":
        memory = _put(memory, TICKET, memory[TICKET] + 1)
        after = after if memory[TICKET] == protocol.blocks else _stopped(protocol, after)
    elif op == "only_block_0":
        after = after if index == 0 else _stopped(protocol, after)
    elif op == "release_head":
        memory = _put(memory, HEAD, block.seq + protocol.ahead)
    else:
        after = after._replace(buffer=block.buffer + _stores(protocol, state, index, op))
    yield f"block {index} {op}", _with_block(state, index, after)._replace(memory=memory)


def _stores(protocol: Protocol, state: State, index: int, op: Op) -> tuple[Store, ...]:
    seq = state.blocks[index].seq
    if op == "store_words":
        first = index * protocol.words
        words = range(first, first + protocol.words)
        written = state.record * protocol.ahead - seq  # the value is the record's true number
        return tuple(
            Store(protocol.address(at, word), at + written)
            for at in range(seq, seq + protocol.ahead)
            for word in words
        )
    if op == "store_intent":
        return (Store(INTENT, seq + 1),)
    if op in ("store_head", "store_head_release"):
        is_release = op == "store_head_release"
        return (Store(HEAD, seq + protocol.ahead, is_release),)
    return (Store(TICKET, 0),) if op == "reset_ticket" else ()


def _stopped(protocol: Protocol, block: Block) -> Block:
    return block._replace(pc=len(protocol.program))


def _next_record(protocol: Protocol, state: State) -> Iterator[Move]:
    is_done = all(block.pc == len(protocol.program) for block in state.blocks)
    is_drained = not any(block.buffer for block in state.blocks)
    if is_done and (is_drained or not protocol.is_kernel) and state.record + 1 < protocol.records:
        blocks = tuple(Block(0, 0, block.buffer) for block in state.blocks)
        yield "next record", state._replace(record=state.record + 1, blocks=blocks)


def _reads(protocol: Protocol, state: State) -> Iterator[Move]:
    poll = state.poll
    if not poll.copied:
        yield from _early_copies(protocol, state)
        if state.memory[HEAD] > poll.next:
            yield "reader polls", state._replace(poll=_begun(protocol, state))
        return
    if protocol.loads != "ordered" and poll.counted is None:
        counted = state.memory[protocol.counter]
        yield "reader loads the counter", state._replace(poll=poll._replace(counted=counted))
    if None in poll.copied:
        for word, value in _copies(protocol, state, poll.copied):
            words = _put(poll.copied, word, value)
            yield f"reader copies {word}", state._replace(poll=poll._replace(copied=words))
    elif protocol.loads == "ordered" or poll.counted is not None:
        after = _finished(protocol, state)
        yield (
            "reader checks",
            after if isinstance(after, Wrong) else state._replace(poll=after),
        )


def _copies(
    protocol: Protocol, state: State, copied: tuple[int | None, ...]
) -> Iterator[tuple[int, int]]:
    """Each word that is not copied yet, and what it is now."""
    for word, value in enumerate(copied):
        if value is None:
            seq = state.poll.next + word // protocol.width
            yield word, state.memory[protocol.address(seq, word % protocol.width)]


def _early_copies(protocol: Protocol, state: State) -> Iterator[Move]:
    """What a CPU may load before the head: it guesses that the next record is there."""
    if protocol.loads != "plain":
        return
    early = state.poll.early or (None,) * protocol.width
    for word, value in _copies(protocol, state, early):
        poll = state.poll._replace(early=_put(early, word, value))
        yield f"reader copies {word} early", state._replace(poll=poll)


def _begun(protocol: Protocol, state: State) -> Poll:
    poll, head = state.poll, state.memory[HEAD]
    oldest = head - (protocol.reach or protocol.slots) + 1
    first = max(poll.next, head - 1 if protocol.reader == "jumps" else oldest)
    lost = 0 if protocol.reader == "jumps" else first - poll.next
    num_words = (min(head, first + protocol.batch) - first) * protocol.width
    early = poll.early if first == poll.next else ()
    copied = early + (None,) * (num_words - len(early))
    return poll._replace(next=first, copied=copied, accounted=poll.accounted + lost, early=())


def _finished(protocol: Protocol, state: State) -> Poll | Wrong:
    poll, width = state.poll, protocol.width
    num_records = len(poll.copied) // width
    newest = poll.newest
    counter = state.memory[protocol.counter] if poll.counted is None else poll.counted
    for index in range(num_records):
        seq = poll.next + index
        if protocol.reach is not None and counter - seq >= protocol.reach:
            continue  # lost, and accounted for below
        if any(word != seq for word in poll.copied[index * width : (index + 1) * width]):
            return Wrong("torn")
        if seq <= newest:
            return Wrong("order")
        newest = seq
    back = 1 if protocol.reader == "rewinds" else 0
    return Poll(poll.next + num_records - back, (), poll.accounted + num_records, newest)


def _put(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _with_block(state: State, index: int, block: Block) -> State:
    return state._replace(blocks=_put(state.blocks, index, block))
