"""Probes and vectors in a transfer reach their banks together with the weights, or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from clairai.engine.core_control import CoreControl
from clairai.engine.steer.steering_registry import SteeringLimits, SteeringRegistry
from clairai.errors import ClairaiError, WeightsError
from clairai.vector.model import Vector
from clairai.weights import Sender
from clairai.weights.manifest import encode_manifest
from clairai.weights.pack import TensorSpec
from clairai.wire.ring_messages import Refusal
from tests.support import toy_publisher
from tests.support.probes import probe
from tests.support.weights import ToyLlm, engine, plan, weights


def sender(llm: ToyLlm, tmp_path: Path) -> Sender:
    return Sender(llm, runtime_dir=str(tmp_path))


def is_serving(llm: ToyLlm, expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(llm.model[name], tensor) for name, tensor in expected.items())


def test_a_probe_is_replaced_and_the_model_is_left_alone(tmp_path: Path) -> None:
    with toy_publisher.running_publisher(tmp_path) as step_publisher:
        first = probe("p", point=toy_publisher.SECOND)
        step_publisher.install(step_publisher.bank.add([first]))
        with engine(tmp_path, step_publisher) as llm:
            before = step_publisher.bank.version
            new_D = np.array([4.0, 5.0, 6.0], np.float32)
            sent = sender(llm, tmp_path).send({"probe::p": new_D})
            assert (sent.version, sent.bank_version) == (0, before + 1)
            assert step_publisher.bank.probes[0].direction_D.tolist() == [4.0, 5.0, 6.0]
            assert step_publisher.bank.probes[0].bias == first.bias
            with pytest.raises(WeightsError, match="nothing named"):
                sender(llm, tmp_path).send({"probe::q": new_D})
            both = sender(llm, tmp_path).send(weights(4) | {"probe::p": 2 * new_D})
            assert (both.version, both.bank_version) == (1, before + 2)
            assert is_serving(llm, weights(4))


def test_a_probe_that_the_bank_refuses_leaves_the_model_too(tmp_path: Path) -> None:
    with toy_publisher.running_publisher(tmp_path) as step_publisher:
        step_publisher.install(step_publisher.bank.add([probe("p", point=toy_publisher.SECOND)]))
        with engine(tmp_path, step_publisher) as llm:
            held = toy_publisher.state_of(step_publisher)
            with pytest.raises(Exception, match="NaN"):
                sender(llm, tmp_path).send(
                    weights(1) | {"probe::p": np.full(3, np.nan, np.float32)}
                )
            assert toy_publisher.state_of(step_publisher) == held
            assert is_serving(llm, weights(0))


def _steering() -> CoreControl:
    registry = SteeringRegistry(
        toy_publisher.POINTS, toy_publisher.WIDTH, SteeringLimits(rows=8, programs=8)
    )
    rows = {point: np.ones(toy_publisher.WIDTH, np.float32) for point in toy_publisher.POINTS}
    registry.put([Vector("calm", rows, description="kept")])
    return CoreControl(registry, ())


def test_a_vector_is_replaced_where_names_are_known(tmp_path: Path) -> None:
    core_control = _steering()
    with engine(tmp_path, core_control=core_control) as llm:
        rows_PD = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
        sent = sender(llm, tmp_path).send(weights(3) | {"steer::calm": rows_PD})
        assert (sent.version, sent.vectors_version) == (1, core_control.registry.state().version)
        held = core_control.registry.vector("calm")
        assert [row_D.tolist() for row_D in held.rows.values()] == rows_PD.tolist()
        assert held.description == "kept"
        assert is_serving(llm, weights(3))
        before = core_control.registry.state().version
        for wrong in (rows_PD[:1], np.full((2, 3), np.inf, np.float32)):
            with pytest.raises(ClairaiError):
                sender(llm, tmp_path).send(weights(4) | {"steer::calm": wrong})
        assert core_control.registry.state().version == before
        assert is_serving(llm, weights(3))


def test_gates_use_a_new_probe(tmp_path: Path) -> None:
    """The engine core has its own probes, for stop rules and gates."""
    with toy_publisher.running_publisher(tmp_path) as step_publisher:
        first = probe("p", point=toy_publisher.SECOND)
        step_publisher.install(step_publisher.bank.add([first]))
        core_control = CoreControl(None, (first,))
        with engine(tmp_path, step_publisher, core_control) as llm:
            sender(llm, tmp_path).send({"probe::p": np.array([7, 8, 9], np.float32)})
        assert core_control._probes["p"].direction_D.tolist() == [7.0, 8.0, 9.0]


def test_vllms_own_routes_cannot_name_a_bank(tmp_path: Path) -> None:
    """They call the worker directly, so that nothing would install the probes."""
    with toy_publisher.running_publisher(tmp_path) as step_publisher:
        step_publisher.install(step_publisher.bank.add([probe("p", point=toy_publisher.SECOND)]))
        with engine(tmp_path, step_publisher) as llm:
            sender(llm, tmp_path).check({"probe::p": np.ones(3, np.float32)})
            manifest = plan([TensorSpec("probe::p", "F32", (3,))], epoch=llm.epoch)
            assert not isinstance(llm.planned(manifest), Refusal)
            with pytest.raises(WeightsError, match="nothing named"):
                llm.update_weights({"manifest": encode_manifest(manifest).decode()})
