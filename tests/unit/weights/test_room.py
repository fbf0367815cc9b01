"""The room that a transfer needs is compared with what is free, and a refusal has both numbers."""

from __future__ import annotations

import pytest

from clairai.errors import WeightsRoomError
from clairai.weights import room
from clairai.weights.room import (
    LoadNeeds,
    fit_buffer_bytes,
    require_engine_room,
    require_sender_room,
)

MIB = 1 << 20


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_memory_bytes", lambda: 1000 * MIB)


@pytest.mark.parametrize("promised", [0, 300 * MIB])
def test_buffers_and_loading_together_must_fit_beside_what_is_promised(promised: int) -> None:
    fitting = 900 * MIB - promised
    needs = LoadNeeds(host_nbytes=100 * MIB, promised_nbytes=promised)
    require_engine_room(fitting, needs)
    with pytest.raises(WeightsRoomError) as caught:
        require_engine_room(fitting + 1, needs)
    for number in (fitting + 1 + 100 * MIB, fitting + 1, 1000 * MIB - promised, promised):
        assert f"{number}" in caught.value.reason
    assert "VLLM_CPU_KVCACHE_SPACE" in caught.value.reason


def test_more_may_be_promised_than_is_free() -> None:
    with pytest.raises(WeightsRoomError, match=r"and 0 are free"):
        require_engine_room(1, LoadNeeds(promised_nbytes=2000 * MIB))


def test_loading_must_fit_on_the_gpu() -> None:
    require_engine_room(0, LoadNeeds(gpu_nbytes=5, gpu_free_nbytes=5))
    with pytest.raises(WeightsRoomError, match=r"needs 6 bytes on the GPU .* and 5 are free"):
        require_engine_room(0, LoadNeeds(gpu_nbytes=6, gpu_free_nbytes=5))


def test_a_sender_needs_room_for_all_buffers() -> None:
    require_sender_room(1000 * MIB)
    with pytest.raises(WeightsRoomError, match=f"take {1000 * MIB + 1} bytes .* {1000 * MIB} are"):
        require_sender_room(1000 * MIB + 1)


def test_buffers_are_smaller_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for free_mib in (8000, 400, 1):
        monkeypatch.setattr(room, "free_memory_bytes", lambda free_mib=free_mib: free_mib * MIB)
        sizes.append(fit_buffer_bytes(128 * MIB, 8 * MIB) // MIB)
    assert sizes == [128, 50, 8]
