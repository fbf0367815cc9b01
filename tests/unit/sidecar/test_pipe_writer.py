"""What the sidecar's output does when it takes no more."""

from __future__ import annotations

import os

import pytest

from clairai.errors import ConfigError
from clairai.sidecar.pipe_writer import PipeWriter


@pytest.mark.attack(811)
def test_a_full_disk_ends_the_output_with_the_reason() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        writer = PipeWriter(full.fileno(), stop=lambda: False)
        with pytest.raises(ConfigError, match=r"takes no more .No space left on device.*make room"):
            writer.write(b"a row\n")


def test_a_reader_that_has_gone_is_told_apart() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        writer = PipeWriter(writing, stop=lambda: False)
        assert writer.is_reader_gone()
        with pytest.raises(BrokenPipeError):
            writer.write(b"a row\n")
    finally:
        os.close(writing)
