"""On a GPU: rows are encoded there into the bytes that the codecs make on a CPU.

No engine is started here.
"""

from __future__ import annotations

import pytest
import torch

from clairai.engine.capture.encode import encode
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.registry import named

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

DTYPES = ("bfloat16", "float16", "float32")
ENCODERS: tuple[tuple[str, dict[str, int]], ...] = (
    ("full8", {}),
    ("rp8", {"k": 512, "seed": 3}),
    ("rp8", {"k": 65, "seed": 1}),
    ("topk8", {}),
    ("fp8", {}),
    ("int4", {}),
)


def rows(num_rows: int, width: int, dtype: str) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(num_rows)
    made = torch.randn(num_rows, width, generator=generator, device="cuda")
    if num_rows > 4:
        made[1] = 0
        made[2, 5], made[3, 7] = torch.inf, torch.nan
        made[4, 5], made[4, 9] = torch.inf, -torch.inf
    return made.to(getattr(torch, dtype))


def differing(found: dict[str, torch.Tensor], encoder: Encoder, given: torch.Tensor) -> list[str]:
    expected = encoder.encode(given.float().cpu().numpy())
    return [
        name for name in expected if found[name].cpu().numpy().tobytes() != expected[name].tobytes()
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "parameters"), ENCODERS, ids=str)
def test_the_bytes_are_those_of_the_codec(
    name: str, parameters: dict[str, int], dtype: str
) -> None:
    encoder = named(name, parameters)
    for num_rows, width in ((1, 576), (7, 576), (64, 4096), (300, 4096)):
        given = rows(num_rows, width, dtype)
        assert differing(encode(given, encoder), encoder, given) == [], (num_rows, width)
