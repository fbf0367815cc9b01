"""The digest of a tensor depends on its bytes and not on how they are cut."""

from __future__ import annotations

import hashlib

import hypothesis.strategies as st
import pytest
from hypothesis import given

from clairai.store import shard
from clairai.store.shard import chunked_digest as digest_of


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_the_digest_is_that_of_the_bytes_however_they_are_cut(pieces: list[bytes]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shard, "CHUNK_NBYTES", 16)
        whole = b"".join(pieces)
        chunks = [whole[start : start + 16] for start in range(0, len(whole), 16)]
        inner = b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)
        expected = hashlib.sha256(inner).hexdigest()
        assert digest_of([memoryview(piece) for piece in pieces]) == expected
        assert digest_of([memoryview(whole)]) == expected


def test_more_than_one_thread_computes_what_one_would(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(range(256)) * (3 * shard.CHUNK_NBYTES // 256) + b"end"
    by_many = digest_of([memoryview(data)])
    monkeypatch.setattr(shard, "MAX_DIGEST_THREADS", 1)
    assert digest_of([memoryview(data)]) == by_many
    assert digest_of([memoryview(data)[:-1]]) != by_many
