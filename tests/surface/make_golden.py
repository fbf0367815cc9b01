"""Writes files of every format that clairai keeps, for the test that later versions read them.

`python -m tests.surface.make_golden FOLDER`; the files in golden/ are of version 0.1.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import clairai
from clairai.store.write import Writer
from clairai.vector import files as vector_files
from tests.support.row_blocks import block

POINTS = ("pre_attn.0", "post_block.3")
ENCODERS = ("raw", "fp8", "int4")


def main(folder: Path) -> None:
    row = np.linspace(-1, 1, 16, dtype=np.float32)
    probe = clairai.Probe(name="joy", point=clairai.Point.parse("post_block.3"), direction_D=row)
    clairai.save(folder / "joy.safetensors", probe)
    vector = clairai.Vector(name="calm", rows={clairai.Point.parse("post_block.3"): row})
    vector_files.save(vector, folder / "calm.safetensors")
    with Writer(folder / "captures") as writer:
        for stream, encoder in enumerate(ENCODERS, start=1):
            writer.begin(stream, tags={"encoder": encoder})
            for point in POINTS:
                writer.offer(block(stream, 4, point=point, encoder=encoder))
            writer.finish(stream)
        writer.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
