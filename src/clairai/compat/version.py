"""Takes the installed vLLM; gives its version, or the reason why it is not served."""

from __future__ import annotations

import re
from typing import Final

from clairai.errors import UnsupportedError

# 0.26.0 was run on a GPU (docs/numbers.md), 0.27.1 to 0.32.0 on a CPU (docs/matrix.md).
FIRST: Final = (0, 26)
LAST: Final = (0, 32)


def vllm_version() -> str:
    import vllm

    return str(vllm.__version__)


def check_version(version: str, *, allow_untested: bool) -> None:
    """Refuse a vLLM outside the tested range, unless the user takes the risk."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    served = numbers is not None and FIRST <= tuple(map(int, numbers.groups())) <= LAST
    if served or allow_untested:
        return
    raise UnsupportedError(
        f"vLLM {version} is outside the tested range "
        f"{FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}; install one of those, or set "
        f'"allow_untested_vllm": true in the clairai config to try (taps are still proven at start)'
    )
