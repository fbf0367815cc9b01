"""The manifest of a folder of captures: one line for each commit, checksummed and chained.

A line is `LENGTH CHECKSUM JSON\\n`: the JSON's number of bytes in 8 hex digits; the SHA-256 of
(checksum of the line before, LENGTH, JSON) in 64 hex digits; one JSON object without a raw newline.
The chain reveals a line that is missing, doubled or moved as well as one that is changed.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

import msgspec

from clairai.errors import StoreDamagedError, quote
from clairai.store.disk import is_shard
from clairai.store.row_block import Origin

MANIFEST_VERSION: Final = 1
MAX_LINE_NBYTES: Final = 1 << 24
_HEAD: Final = re.compile(rb"([0-9a-f]{8}) ([0-9a-f]{64}) ")
_HEAD_NBYTES: Final = 8 + 1 + 64 + 1
FIRST_CHAIN: Final = "0" * 64
MAX_SHARD_NBYTES: Final = 1 << 50
_STREAM: Final = re.compile("[0-9a-f]{16}")
_DIGEST: Final = re.compile("[0-9a-f]{64}")


class ShardEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One sealed shard."""

    name: str
    nbytes: int
    head_nbytes: int  # of the part of the file before the first tensor
    head_digest: str  # the SHA-256 of that part, which has the digests of the tensors
    rows: int
    requests: int
    first_stream: str  # the lowest, in 16 hex digits
    last_stream: str  # the highest
    points: tuple[str, ...]
    origin: Origin

    def __post_init__(self) -> None:
        if not is_shard(self.name) or not 0 < self.head_nbytes <= self.nbytes <= MAX_SHARD_NBYTES:
            raise ValueError("not an entry of ours")
        if not 0 <= self.requests <= self.rows <= self.nbytes:  # a row takes bytes
            raise ValueError("counts that cannot be")
        streams = (self.first_stream, self.last_stream)
        if not all(map(_STREAM.fullmatch, streams)) or not _DIGEST.fullmatch(self.head_digest):
            raise ValueError("not an entry of ours")


class CommitLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One commit: shards that became visible together. The first line of a manifest has none."""

    version: int
    sequence: int
    time_ns: int
    shards: tuple[ShardEntry, ...] = ()


@dataclass(frozen=True)
class ParsedManifest:
    """The valid lines of a manifest, and what is wrong with the rest of its bytes."""

    commits: tuple[CommitLine, ...]
    nbytes: int  # of the valid lines
    chain: str  # checksum of the last valid line
    torn_nbytes: int = 0  # of a last line that a crash interrupted
    damage: str = ""  # why the rest cannot be read; empty if there is no such rest

    @property
    def entries(self) -> tuple[ShardEntry, ...]:
        return tuple(entry for commit in self.commits for entry in commit.shards)

    def require_undamaged(self) -> None:
        if self.damage:
            raise StoreDamagedError(
                f"line {len(self.commits) + 1} of the manifest is damaged, {self.damage}; nothing "
                "was changed: restore the file from a copy, or run `clairai capture repair`"
            )


def dump_commit(commit: CommitLine, chain: str) -> tuple[bytes, str]:
    """Return the line that follows the one with the checksum `chain`, and its own checksum."""
    body = msgspec.json.encode(commit)
    assert len(body) <= MAX_LINE_NBYTES, "a commit's files and their parameters are bounded"
    length = b"%08x" % len(body)
    checksum = _checksum(chain, length, body)
    return b"%s %s %s\n" % (length, checksum.encode(), body), checksum


def _checksum(chain: str, length: bytes, body: bytes) -> str:
    return hashlib.sha256(chain.encode() + length + body).hexdigest()


def parse_manifest(data: bytes) -> ParsedManifest:
    """Parse the valid lines at the start of these bytes. Raises for no content whatever."""
    if not data:
        return ParsedManifest((), 0, FIRST_CHAIN, damage="it is not there")
    commits: list[CommitLine] = []
    offset, chain = 0, FIRST_CHAIN
    while offset < len(data):
        line = _parse_line(data, offset, chain)
        if isinstance(line, str):
            return _parse_end(tuple(commits), offset, chain, data[offset:], line)
        commit, offset, chain = line
        if commit.sequence != len(commits) or commit.version != MANIFEST_VERSION:
            damage = f"it is line {quote(commit.sequence)} of version {quote(commit.version)}"
            return ParsedManifest(tuple(commits), offset, chain, damage=damage)
        commits.append(commit)
    return ParsedManifest(tuple(commits), offset, chain)


def _parse_line(data: bytes, offset: int, chain: str) -> tuple[CommitLine, int, str] | str:
    """Return the line at `offset`, the next offset and the checksum; or what is wrong."""
    head = _HEAD.match(data, offset)
    if head is None:
        return "its start is not that of a line"
    nbytes = int(head[1], 16)
    start, end = head.end(), head.end() + nbytes
    if nbytes > MAX_LINE_NBYTES or data[end : end + 1] != b"\n":
        return "its length is wrong"
    body = data[start:end]
    checksum = _checksum(chain, head[1], body)
    if checksum != head[2].decode():
        return "its checksum is wrong"
    try:
        return msgspec.json.decode(body, type=CommitLine), end + 1, checksum
    except (msgspec.DecodeError, ValueError, RecursionError):
        return "its content is invalid"


def _parse_end(
    commits: tuple[CommitLine, ...], offset: int, chain: str, rest: bytes, damage: str
) -> ParsedManifest:
    if commits and is_torn(rest):  # the first line cannot be torn: the file is renamed into place
        return ParsedManifest(commits, offset, chain, torn_nbytes=len(rest))
    return ParsedManifest(commits, offset, chain, damage=damage)


def is_torn(rest: bytes) -> bool:
    """Whether the end of a manifest is a line that a crash interrupted.

    Lines are appended one at a time and synced before the next, so only the last can be unfinished:
    cut short, or with sectors that never reached the disk and read as zeros. A finished line with
    one flipped bit is neither: a flip cannot make its first or last byte zero, nor two bytes zero.
    """
    num_newlines = rest.count(b"\n")
    if num_newlines > 1 or (num_newlines == 1 and not rest.endswith(b"\n")):
        return False
    if rest.startswith(b"\0") or rest.endswith(b"\0") or rest.count(b"\0") >= 2:
        return True
    return num_newlines == 0 and len(rest) < _claimed_nbytes(rest)


def _claimed_nbytes(rest: bytes) -> int:
    """The length that the line states; longer than `rest` if that part is cut off."""
    if len(rest) < _HEAD_NBYTES:
        return _HEAD_NBYTES
    head = _HEAD.match(rest)
    return 0 if head is None else _HEAD_NBYTES + int(head[1], 16) + 1
