"""An independent, slow check of what an encoder decodes, in plain Python floats."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from clairai.store.codecs.base import EncodedArrays, Encoder, RowArray
from clairai.store.codecs.fp8 import Fp8
from clairai.store.codecs.full8 import Full8
from clairai.store.codecs.int4 import Int4
from clairai.store.codecs.philox import random_signs
from clairai.store.codecs.raw import Raw
from clairai.store.codecs.rp8 import Rp8
from clairai.store.codecs.topk8 import TopK8

LARGEST = float(np.finfo(np.float32).max)
# Small groups and few kept values, so that small rows reach every edge case.
ENCODERS: list[Encoder] = [
    *(Raw("float32"), Full8(), Full8(group=4), Rp8(k=7, seed=3), Rp8(k=130)),
    *(TopK8(k=3), TopK8(k=9), Fp8(), Int4(), Int4(group=4)),
]
# Among them are NaN, infinities, zeros of both signs, subnormals and the largest floats.
hostile_rows = hnp.arrays(
    np.float32,
    st.tuples(st.integers(0, 4), st.integers(1, 21)),
    elements=st.floats(width=32)
    | st.sampled_from([0.0, -0.0, 1.0, -1.0, LARGEST, -LARGEST, 1e-45]),
    fill=st.sampled_from([np.float32(0), np.float32(-3.5), np.float32(np.nan), np.float32(1e-45)]),
)


def like_a_model(num_rows: int, width: int, *, seed: int = 0) -> RowArray:
    """Rows like those of a residual stream: uneven scales, a shared offset, a few huge components.

    The first row is like that of a first token: two components hold nearly all of its norm.
    """
    rng = np.random.default_rng(seed)
    spread_D = rng.lognormal(0, 0.6, width)
    rows_ND = rng.standard_t(5, (num_rows, width)) * spread_D + rng.normal(0, 0.5, width)
    rows_ND *= rng.lognormal(0, 0.4, (num_rows, 1))
    huge = rng.choice(width, 4, replace=False)
    rows_ND[:, huge] = 40 * rng.standard_normal(4) + 8 * rng.standard_normal((num_rows, 4))
    rows_ND[0, huge[:2]] = 3000, -900
    return rows_ND.astype(np.float32)


def faults(encoder: Encoder, rows_ND: RowArray) -> list[str]:
    """What is wrong with a round trip; empty if nothing is."""
    with np.errstate(all="raise", under="ignore"):
        encoded = encoder.encode(rows_ND)
        back = encoder.decode(encoded, width=rows_ND.shape[1])
    wrong = _sizes(encoder, encoded, rows_ND)
    for row, got in zip(rows_ND.tolist(), back.tolist(), strict=True):
        expected = _expected(encoder, row)
        pairs = enumerate(zip(expected, got, strict=True))
        wrong += [
            f"{encoder}: at {place} {value!r}, give or take {bound}, came back as {number!r}"
            for place, ((value, bound), number) in pairs
            if not _is_within(value, bound, number)
        ]
    return wrong


def _sizes(encoder: Encoder, encoded: EncodedArrays, rows_ND: RowArray) -> list[str]:
    nbytes = sum(array.nbytes for array in encoded.values())
    stated = encoder.nbytes_per_row(rows_ND.shape[1]) * len(rows_ND)
    return [] if nbytes == stated else [f"{nbytes} bytes instead of {stated}"]


def _is_within(value: float, bound: float, number: float) -> bool:
    if math.isnan(value):
        return math.isnan(number)
    if bound == 0:
        return number == value and math.copysign(1, number) == math.copysign(1, value)
    # Allow the last bit of a float32 too, or the smallest float32.
    return abs(number - value) <= bound * (1 + 1e-9) + abs(value) * 2**-23 + 2**-149


Bounded = list[tuple[float, float]]  # an expected value, and by how much it may be off


def _expected(encoder: Encoder, row: list[float]) -> Bounded:
    if isinstance(encoder, Raw):
        return [(value, 0.0) for value in row]
    if isinstance(encoder, Full8):
        starts = range(0, len(row), encoder.group)
        return [pair for start in starts for pair in _ends(row[start : start + encoder.group])]
    if isinstance(encoder, Rp8):
        slack = 2**-36 * sum(map(abs, _finite(row))) / math.sqrt(encoder.k) + 2**-149
        ends = _ends(projected(encoder, row))
        return [(v, bound + slack if math.isfinite(v) else 0) for v, bound in ends]
    if isinstance(encoder, TopK8):
        return _kept(encoder, row)
    if isinstance(encoder, Fp8):
        return _eight_bit_floats(row)
    assert isinstance(encoder, Int4)
    starts = range(0, len(row), encoder.group)
    return [pair for start in starts for pair in _sevenths(row[start : start + encoder.group])]


def _finite(values: list[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _ends(values: list[float]) -> Bounded:
    low, high = min(_finite(values), default=0.0), max(_finite(values), default=0.0)
    is_exact = [value in (low, high) or not math.isfinite(value) for value in values]
    bounds = [0.0 if exact else (high - low) / 504 for exact in is_exact]
    # The sign of a zero at an end is not kept.
    return [(value + 0.0, bound) for value, bound in zip(values, bounds, strict=True)]


def projected(encoder: Rp8, row: list[float]) -> list[float]:
    """The projection with exact sums, rounded once."""
    signs_DK = random_signs(encoder.seed, len(row), encoder.k)
    return [
        _projection(row, signs_DK[:, column].tolist(), encoder.k) for column in range(encoder.k)
    ]


def _projection(row: list[float], signs_D: list[int], k: int) -> float:
    terms = [value * sign for value, sign in zip(row, signs_D, strict=True)]
    if any(map(math.isnan, terms)) or {math.inf, -math.inf} <= set(terms):
        return math.nan
    if not all(map(math.isfinite, terms)):
        return math.inf if math.inf in terms else -math.inf
    return _rounded(math.fsum(terms) / math.sqrt(k))


def _rounded(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _kept(encoder: TopK8, row: list[float]) -> Bounded:
    def rank(place: int) -> tuple[float, float, int]:
        size = abs(row[place])
        return (not math.isnan(size), -size if not math.isnan(size) else 0, place)

    places = sorted(range(len(row)), key=rank)[: encoder.k]
    sizes = _ends([abs(row[place]) for place in places])
    expected = [(0.0, 0.0)] * len(row)
    for place, (size, bound) in zip(places, sizes, strict=True):
        expected[place] = (math.copysign(size, row[place]), bound)
    return expected


def _eight_bit_floats(row: list[float]) -> Bounded:
    size = max(map(abs, _finite(row)), default=0.0)
    scale = 2.0**-149
    while size / scale > 448:
        scale *= 2
    return [
        (value, max(abs(value) / 16, scale / 1024)) if math.isfinite(value) else (math.nan, 0)
        for value in row
    ]


def _sevenths(values: list[float]) -> Bounded:
    top = max(map(abs, _finite(values)), default=0.0)
    # The signs of a group of zeros are not kept.
    return [(value + 0.0, top / 14) if math.isfinite(value) else (math.nan, 0) for value in values]
