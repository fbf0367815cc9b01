"""Numbers that are finite, and overflow where the worker divides, scales or casts them.

T = tokens in this step, D = model width.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from clairai.engine.steer.steer_tables import SteerTables
from clairai.engine.steer.steering_plan import SteeringPlan
from clairai.engine.steer.steering_registry import SteeringLimits, SteeringRegistry
from clairai.engine.steer.worker_steering import WorkerSteering
from clairai.engine.step import StepBatch
from clairai.errors import ClairaiError, RequestError
from clairai.fields.row_growth import row_limits
from clairai.fields.steer import parse_entries
from clairai.points import Point
from clairai.probe.model import Probe
from clairai.vector import files
from clairai.vector.model import Vector
from tests.support.random_plans import row
from tests.support.steering_plans import action, gate, plan

WIDTH = 4
POINTS = ("pre_attn.0", "post_block.0", "post_block.1")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SUBNORMAL = np.array([1e-40, 0, 0, 0], "<f4")


def packed(values_D: np.ndarray, *points: str) -> dict[str, Any]:
    text = base64.b64encode(np.asarray(values_D, "<f4").tobytes()).decode()
    return {"points": dict.fromkeys(points or POINTS[:1], text)}


def registry(dtype: str = "float32") -> SteeringRegistry:
    return SteeringRegistry(
        map(Point.parse, POINTS), WIDTH, SteeringLimits(rows=256, programs=256), dtype=dtype
    )


def steered_rows(made: SteeringPlan, rows_TD: torch.Tensor) -> torch.Tensor:
    """What the worker makes of rows that pass all points under this plan."""
    tables = SteerTables(
        POINTS, width=WIDTH, max_tokens=8, gate_slots=4, rows=256, programs=256, vocabulary=8,
        device="cpu", dtype=rows_TD.dtype,
    )  # fmt: skip
    tables.use_token_ids(torch.zeros(8, dtype=torch.int32))
    steering = WorkerSteering(tables, dict(zip(POINTS, POINTS, strict=True)))
    steering.add("r", made)
    num = len(rows_TD)
    steering.place(StepBatch(["r"], np.array([num], np.int32), np.zeros(1, np.int32)))
    stream_TD = rows_TD.clone()
    for point in POINTS:
        tables.site(point).apply(stream_TD, None)
    return stream_TD


@pytest.mark.attack(100)
@pytest.mark.parametrize("number", [1e-45, 1e-40, 1e-38, 1e-16, 1e16, 3e38])
def test_an_inline_row_whose_length_overflows_when_divided_by_is_refused_at_the_door(
    number: float,
) -> None:
    (entry,) = parse_entries([{"vector": packed(np.array([number, 0, 0, 0]))}], what="steer")
    with pytest.raises(ClairaiError, match=r"has length .*scale it to a length of 1e-15 to 1e"):
        registry().resolve([entry], prompt_len=3)


@pytest.mark.attack(101)
def test_a_file_with_such_a_row_is_refused_before_it_has_a_name_or_a_tier() -> None:
    data = files.dumps(Vector("v", {Point.parse(POINTS[0]): np.ones(WIDTH, np.float32)}))
    ones, spoiled = np.ones(WIDTH, "<f4").tobytes(), SUBNORMAL.tobytes()
    assert data.count(ones) == 1
    with pytest.raises(ClairaiError, match=r"has length 1e-40"):
        files.loads(data.replace(ones, spoiled), source="upload")


@pytest.mark.attack(102)
@pytest.mark.parametrize(
    "made",
    [
        plan(action((0, 9), rows=(row(POINTS[0], SUBNORMAL),))),
        plan(action((0, 9), rows=(row(POINTS[0], [1e16, 0, 0, 0]),))),
        plan(action((0, 9), rows=(row(POINTS[0], [float("nan"), 0, 0, 0]),))),
        plan(action((0, 9), rows=(row(POINTS[0], [1, 0, 0, 0]),), scale=1e39)),
        plan(action((0, 9), rows=(row(POINTS[0], [1, 0, 0, 0]),), scale=float("nan"))),
        plan(action((0, 9), rows=(row(POINTS[0], [1, 0, 0, 0]),), op="clamp", low=-1e39)),
        plan(
            action((0, 9), rows=(row(POINTS[0], [1, 0, 0, 0]),), gate=0),
            gates=(gate(row=row(POINTS[0], [1, 0, 0, 0]), bias=1e39),),
        ),
        plan(
            action((0, 9), rows=(row(POINTS[0], [1, 0, 0, 0]),), gate=0),
            gates=(gate(row=row(POINTS[0], [1, 0, 0, 0]), sharpness=1e-40),),
        ),
    ],
    ids=["short", "long", "NaN", "scale", "NaN scale", "clamp", "bias", "sharpness"],
)
def test_the_worker_refuses_a_plan_that_no_door_would_have_admitted(made: SteeringPlan) -> None:
    with pytest.raises(RequestError, match="should have been refused at admission"):
        steered_rows(made, torch.ones(2, WIDTH))


sizes = st.sampled_from([0.0, 1e-45, 1e-40, 1e-20, 1e-15, 1e-7, 1.0, 3.0, 1e5, 1e12, 1e15, 1e38])
signed = st.builds(lambda size, sign: size * sign, sizes, st.sampled_from([1, -1]))
vectors = st.builds(
    lambda values, points: packed(np.array(values), *points),
    st.lists(signed, min_size=WIDTH, max_size=WIDTH),
    st.lists(st.sampled_from(POINTS), min_size=1, max_size=3, unique=True),
)
gates = st.fixed_dictionaries(
    {"probe": st.sampled_from(["large", "small"]), "threshold": signed},
    optional={"sharpness": signed, "latch": st.booleans()},
)
entries = st.fixed_dictionaries(
    {"vector": vectors, "scale": signed, "op": st.sampled_from(["add", "ablate", "replace"])},
    optional={"gate": gates},
) | st.fixed_dictionaries(
    {"vector": vectors, "scale": signed}, optional={"match_norm": st.just(True), "gate": gates}
) | st.fixed_dictionaries(
    {"vector": vectors, "scale": signed, "op": st.just("clamp"), "low": signed},
)  # fmt: skip


def admitted(asked: list[dict[str, Any]], known: SteeringRegistry) -> SteeringPlan | None:
    """The plan of as many of the entries as the door lets in."""
    point = Point.parse(POINTS[0])
    probes = [
        Probe("large", point, np.full(WIDTH, 4.9e14, np.float32), bias=1e30),
        Probe("small", point, np.full(WIDTH, 6e-16, np.float32), bias=-1e30, activation="sigmoid"),
    ]
    known.set_probes({probe.name: probe for probe in probes})
    kept: list[dict[str, Any]] = []
    made: SteeringPlan | None = None
    for one in asked:
        try:
            made = known.resolve(parse_entries([*kept, one], what="steer"), prompt_len=3)
        except ClairaiError:
            continue
        kept.append(one)
    return made


@pytest.mark.attack(103)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(entries, min_size=4, max_size=8), st.lists(signed, min_size=12, max_size=12))
def test_whatever_the_door_admits_the_worker_takes_and_finite_rows_stay_finite(
    dtype: str, asked: list[dict[str, Any]], numbers: list[float]
) -> None:
    made = admitted(asked, registry(dtype))
    assume(made is not None)
    assert made is not None
    rows_TD = torch.tensor(numbers, dtype=torch.float64).reshape(3, WIDTH)
    usual = row_limits(dtype).usual
    lengths_T1 = torch.linalg.vector_norm(rows_TD, dim=1, keepdim=True)
    rows_TD = rows_TD * (usual / lengths_T1.clamp_min(usual))
    steered_TD = steered_rows(made, rows_TD.to(DTYPES[dtype]))
    assert torch.isfinite(steered_TD).all()
    assert torch.isfinite(torch.linalg.vector_norm(steered_TD.float(), dim=1)).all()
