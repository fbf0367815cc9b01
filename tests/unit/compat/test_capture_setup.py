"""Captures in vLLM: plans that reach the workers, prefix-cache hits, names of the weights."""

from __future__ import annotations

import copy
import json
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from clairai.capture.capture_settings import CaptureSettings
from clairai.compat import capture_setup
from clairai.compat.admission import Admission
from clairai.compat.capture_setup import fingerprint_weights, wrap_get_computed_blocks
from clairai.compat.extra_args import CAPTURE_KEY, read_capture_plan
from clairai.engine.capture.capture_plan import KeepThreshold
from clairai.engine.capture.capture_resolver import CaptureResolver
from clairai.engine.core_control import CoreControl
from clairai.errors import CaptureOffError, UnsupportedError
from clairai.fields.request_fields import request
from clairai.settings import ResolvedSettings, Settings
from tests.support.capture_parts import capture_plan
from tests.support.capture_rig import rig
from tests.unit.engine.capture.test_capture_resolver import ENGINE


def incoming(capture: Any, adapter: str | None = None) -> Any:
    params = SimpleNamespace(
        extra_args=request(capture=capture, stream=5), skip_reading_prefix_cache=None, n=1
    )
    return SimpleNamespace(
        request_id="0-abcdef12",
        external_req_id="0",
        sampling_params=params,
        prompt_token_ids=[1] * 100,
        lora_request=None if adapter is None else SimpleNamespace(lora_name=adapter),
    )


def marked(capture: Any, adapter: str | None = None) -> Any:
    resolver = CaptureResolver(CaptureSettings.parse({"folder": "x"}), ENGINE)
    given = incoming(capture, adapter)
    Admission(CoreControl(None, ()), resolver).prepare(given)
    return given


def test_a_plan_reaches_the_worker_in_another_process_too() -> None:
    given = marked({"positions": {"from": 70}, "points": ["post_block.0"]}, "poet")
    params = given.sampling_params
    found = read_capture_plan(params)
    assert found is not None
    assert (found.points, found.ranges[0][0], found.adapter) == (("post_block.0",), 70, "poet")
    assert read_capture_plan(copy.deepcopy(params)) == found
    assert type(pickle.loads(pickle.dumps(params.extra_args[CAPTURE_KEY]))) is bytes  # noqa: S301
    assert read_capture_plan(pickle.loads(pickle.dumps(params))) == found  # noqa: S301


def test_a_plan_that_a_client_sends_is_dropped() -> None:
    given = incoming(None)
    given.sampling_params.extra_args[CAPTURE_KEY] = b"anything"
    Admission(CoreControl(None, ())).prepare(given)
    assert read_capture_plan(given.sampling_params) is None


def test_an_engine_without_captures_refuses_and_remembers_why() -> None:
    core_control = CoreControl(None, ())
    with pytest.raises(CaptureOffError):
        Admission(core_control).prepare(incoming(True))
    with pytest.raises(CaptureOffError):
        Admission(core_control, CaptureResolver(None, ENGINE)).prepare(incoming(True))
    assert 5 in core_control._refusals


class Cache:
    """Like vLLM's KVCacheManager: the longest hit in blocks of 32."""

    def get_computed_blocks(self, asked: Any) -> int:
        assert asked.block_hashes == "hashes"
        return int((asked.num_tokens - 1) // 32 * 32)


@pytest.mark.parametrize(
    ("capture", "hit"),
    [(None, 96), (True, 0), ("generated", 96), ("last_prompt", 96), ({"from": 70}, 64)],
)
def test_a_prefix_cache_hit_ends_before_the_first_captured_row(capture: Any, hit: int) -> None:
    wish = capture if capture in (None, True) else {"positions": capture}
    given = marked(wish)
    running = SimpleNamespace(
        sampling_params=given.sampling_params, num_tokens=100, block_hashes="hashes"
    )
    assert wrap_get_computed_blocks(Cache.get_computed_blocks)(Cache(), running) == hit
    assert running.num_tokens == 100


def test_a_prompt_that_a_rule_scores_is_forwarded_whole() -> None:
    assert capture_plan(ranges=[(90, 95)]).first_position == 90
    assert capture_plan(ranges=[(90, 95)], hold=KeepThreshold("anger", 1.0)).first_position == 0


def test_weights_have_a_fingerprint_that_changes_with_them() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    before = fingerprint_weights(model)
    assert before == fingerprint_weights(copy.deepcopy(model))
    with torch.no_grad():
        model.weight[3, 3] += 1
    assert fingerprint_weights(model) != before
    assert (
        len({fingerprint_weights(model.to(dtype)) for dtype in (torch.float32, torch.float16)}) == 2
    )


def test_the_weights_of_all_stages_are_in_the_name() -> None:
    model = torch.nn.Linear(4, 4)

    def name(earlier: str) -> str:
        runner = SimpleNamespace(get_model=lambda: model)
        worker = SimpleNamespace(model_runner=runner, **{capture_setup.EARLIER_WEIGHTS: earlier})
        return capture_setup.name_weights(worker, None)

    own = fingerprint_weights(model)
    assert name("") == own
    assert len({own, name("a"), name("b")}) == 3
    assert name("a") == name("a")


def test_rows_name_the_weights_that_computed_them() -> None:
    model = torch.nn.Linear(4, 4)
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    with rig() as made:
        made.enter("a", 1, capture_plan())
        made.step(("a", 0, 2))
        capture_setup._rename_weights(worker, made.backend, 7)
        made.step(("a", 2, 1))
        assert made.found(1).rows == 3
    weights = {
        int(at): block.origin.weights
        for block in made.consumers["toy"].blocks
        for at in block.rows_N["position"]
    }
    assert weights == {0: "w", 1: "w", 2: f"7-{fingerprint_weights(model)}"}


def _config(**changes: Any) -> Any:
    model = SimpleNamespace(
        dtype=torch.bfloat16,
        hf_text_config=SimpleNamespace(num_hidden_layers=2),
        get_hidden_size=lambda: 64,
    )
    return SimpleNamespace(model_config=model, **changes)


def test_engines_whose_rows_would_be_missing_do_not_start() -> None:
    capturing = ResolvedSettings(Settings(capture={"folder": "x"}), ENGINE.points, ())
    without = ResolvedSettings(Settings(), ENGINE.points, ())
    capture_setup.make_capture_resolver(_config(kv_transfer_config=None), capturing)
    nixl = SimpleNamespace(kv_connector="NixlConnector", kv_connector_module_path=None)
    with pytest.raises(UnsupportedError, match="captures do not go with the KV connector Nixl"):
        capture_setup.make_capture_resolver(_config(kv_transfer_config=nixl), capturing)
    capture_setup.make_capture_resolver(_config(kv_transfer_config=nixl), without)
    odd = _config(kv_transfer_config=None)
    odd.model_config.dtype = torch.float64
    with pytest.raises(UnsupportedError, match="float64"):
        capture_setup.make_capture_resolver(odd, capturing)


def test_the_adapter_stays_beside_the_steering_when_that_changes() -> None:
    with rig() as made:
        made.enter("a", 1, replace_adapter(capture_plan(), "poet"))
        made.collector.amend((1, 0), json.dumps({"applied": []}))
        made.step(("a", 0, 1))
        assert made.found(1).rows == 1
    begun = [told[3] for told in made.consumers["toy"].told if told[0] == "begin"]
    assert begun == [{"adapter": "poet"}, {"applied": [], "adapter": "poet"}]


def replace_adapter(given: Any, name: str) -> Any:
    import msgspec

    return msgspec.structs.replace(given, adapter=name)


def test_the_stash_keeps_the_rows_of_every_step_only_for_captures() -> None:
    from clairai.engine.score.score_tables import ScoreTables

    for is_capturing in (False, True):
        tables = ScoreTables(
            ["a"],
            width=4,
            capacity=1,
            max_tokens=8,
            device="cpu",
            stash_rows=8,
            is_capturing=is_capturing,
        )
        rows_TD = torch.arange(12.0).reshape(3, 4) + 1
        tables.site("a").read(rows_TD)
        assert np.array_equal(tables.stash_SRD[0, :3].numpy(), rows_TD.numpy()) == is_capturing
