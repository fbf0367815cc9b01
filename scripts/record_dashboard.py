"""Records the moving picture of the dashboard in docs/images, from the real demo in Chromium.

Run: python -m scripts.record_dashboard
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Final

from PIL import Image

from scripts.web import prepare
from tests.web.server import running_server

PICTURE: Final = Path(__file__).parents[1] / "docs" / "images" / "dashboard.gif"
FRAME_MS: Final = 140
LAST_FRAME_MS: Final = 3000
WIDTH: Final = 900
NUM_COLOURS: Final = 128
MAX_BYTES: Final = 3 << 20


def main() -> int:
    tools = prepare()
    with tempfile.TemporaryDirectory(prefix="clairai-") as folder:
        frames = Path(folder) / "frames"
        frames.mkdir()
        with running_server(Path(folder), "demo", is_up=lambda status: status == 200) as url:
            record = ("node", "scripts/record.mjs", url, str(frames))
            done = tools.run(*record, timeout_s=240.0, CLAIRAI_URL=url)
        if done.returncode != 0:
            sys.stderr.write(done.stdout)
            return done.returncode
        nbytes = write_gif(sorted(frames.glob("*.png")))
    sys.stdout.write(f"{PICTURE.name}: {nbytes} bytes\n")
    return 0 if nbytes < MAX_BYTES else 1


def write_gif(files: list[Path]) -> int:
    """Join the frames; every frame shares the colours of the last one, which has them all."""
    frames = [_shrink(Image.open(file).convert("RGB")) for file in files]
    palette = frames[-1].quantize(NUM_COLOURS)
    drawn = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [FRAME_MS] * (len(drawn) - 1) + [LAST_FRAME_MS]
    PICTURE.parent.mkdir(exist_ok=True)
    drawn[0].save(
        PICTURE, save_all=True, append_images=drawn[1:], duration=durations, loop=0, optimize=True
    )
    return PICTURE.stat().st_size


def _shrink(frame: Image.Image) -> Image.Image:
    height = round(frame.height * WIDTH / frame.width)
    return frame.resize((WIDTH, height), Image.Resampling.LANCZOS)


if __name__ == "__main__":
    sys.exit(main())
