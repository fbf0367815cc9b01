"""Frames are found however the bytes of a connection are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clairai.wire.exchange_frames import (
    MAX_CONTENT_BYTES,
    Frame,
    FrameError,
    FrameReader,
    make_frame,
)

FRAMES = st.lists(st.builds(Frame, st.integers(0, 2**32 - 1), st.integers(0, 255), st.binary()))


@given(FRAMES, st.data())
def test_frames_come_out_as_they_went_in_wherever_they_are_cut(
    sent: list[Frame], data: st.DataObject
) -> None:
    raw = b"".join(make_frame(*frame) for frame in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)))))
    reader = FrameReader()
    pairs = zip([0, *cuts], [*cuts, len(raw)], strict=True)
    assert [one for begin, end in pairs for one in reader.read(raw[begin:end])] == sent


def test_a_frame_longer_than_any_may_be_is_refused_before_it_is_held() -> None:
    header = make_frame(1, 2, b"")[4:]
    with pytest.raises(FrameError, match=str(MAX_CONTENT_BYTES)):
        FrameReader().read((MAX_CONTENT_BYTES + 1).to_bytes(4, "little") + header)
