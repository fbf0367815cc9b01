"""Takes the bytes of a tensor, in pieces; gives their digest, computed by several threads at once.

The digest is the SHA-256, in hex, of the SHA-256s (32 bytes each) of every 4 MiB: one thread alone
computes SHA-256 more slowly than good disks write.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

CHUNK_NBYTES: Final = 4 << 20
MAX_THREADS: Final = 4

Chunk = list[memoryview]


def digest(pieces: Sequence[memoryview]) -> str:
    """However the bytes are cut into pieces, the digest is the same."""
    chunks = list(_chunks(pieces))
    num_threads = min(len(chunks), MAX_THREADS, os.cpu_count() or 1)
    if num_threads < 2:
        return _joined(map(_one, chunks))
    with ThreadPoolExecutor(num_threads) as pool:
        return _joined(pool.map(_one, chunks))


def _joined(digests: Iterator[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _chunks(pieces: Sequence[memoryview]) -> Iterator[Chunk]:
    chunk: Chunk = []
    room = CHUNK_NBYTES
    for piece in pieces:
        offset = 0
        while offset < len(piece):
            part = piece[offset : offset + room]
            chunk.append(part)
            offset, room = offset + len(part), room - len(part)
            if not room:
                yield chunk
                chunk, room = [], CHUNK_NBYTES
    if chunk:
        yield chunk


def _one(chunk: Chunk) -> bytes:
    found = hashlib.sha256()
    for part in chunk:
        found.update(part)
    return found.digest()
