"""Modes and versions that are not served are refused with the reason and the way out."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from clairai.capture.capture_settings import CaptureSettings
from clairai.compat import check_engine, engine_core, worker
from clairai.compat.check_engine import (
    REFUSED_MODES,
    check_core_settings,
    check_device,
    check_modes,
    check_version,
    check_weights_mode,
    find_refused_device,
    list_refused_modes,
)
from clairai.errors import UnsupportedError
from clairai.settings import ResolvedSettings, Settings


def config(path: str = "", value: object = None) -> Any:
    """A VllmConfig as vLLM 0.26 and 0.32 have it for two ranks, with one attribute changed.

    One rank if it speculates, which several cannot.
    """
    parts: dict[str, dict[str, object]] = {
        "parallel_config": {
            "tensor_parallel_size": 1 if path == "speculative_config" else 2,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "enable_dbo": False,
            "ubatch_size": 0,
        },
        "cache_config": {"kv_sharing_fast_prefill": False, "enable_prefix_caching": True},
        "model_config": {
            "enable_prompt_embeds": False,
            "runner_type": "generate",
            "is_encoder_decoder": False,
        },
    }
    passes = {"enable_sp": False, "enable_sequence_parallelism": None}
    holder, _, name = path.rpartition(".")
    if holder == "pass_config":
        passes[name] = bool(value)
    elif holder:
        parts[holder][name] = value
    compilation = SimpleNamespace(pass_config=SimpleNamespace(**passes))
    return SimpleNamespace(
        **{part: SimpleNamespace(**attributes) for part, attributes in parts.items()},
        compilation_config=compilation,
        speculative_config=value if path == "speculative_config" else None,
        device_config=SimpleNamespace(device_type="cpu"),
    )


EXPERTS = "data parallelism of a model with experts"
MODES = [
    (
        "parallel_config.data_parallel_size",
        2,
        "data parallelism over several machines, or of several LLMs",
    ),
    ("parallel_config.data_parallel_backend", "ray", "data parallelism with Ray"),
    ("parallel_config.enable_elastic_ep", True, "elastic expert parallelism"),
    ("parallel_config.use_sequence_parallel_moe", True, "sequence-parallel residuals"),
    ("parallel_config.nnodes", 2, "ranks on several machines that vLLM starts itself"),
    ("parallel_config.prefill_context_parallel_size", 2, "prefill context parallelism"),
    ("parallel_config.enable_dbo", True, "dual batch overlap"),
    ("parallel_config.ubatch_size", 2, "dual batch overlap"),
    ("pass_config.enable_sp", True, "sequence-parallel residuals"),
    ("pass_config.enable_sequence_parallelism", True, "sequence-parallel residuals"),
    ("speculative_config", SimpleNamespace(method="medusa"), "speculative decoding by a method"),
    ("parallel_config.use_ray", True, "a Ray executor that is not vLLM's own"),
    ("cache_config.kv_sharing_fast_prefill", True, "KV-sharing fast prefill"),
    ("model_config.enable_prompt_embeds", True, "prompt embeddings"),
    ("model_config.runner_type", "pooling", "pooling models"),
    ("model_config.runner_type", "draft", "pooling models"),
    ("model_config.is_encoder_decoder", True, "encoder-decoder models"),
]


@pytest.mark.parametrize(("path", "value", "mode"), MODES)
def test_a_mode_that_would_give_wrong_rows_is_refused_with_the_way_out(
    path: str, value: object, mode: str
) -> None:
    (reason,) = list_refused_modes(config(path, value))
    assert reason.startswith(mode)
    with pytest.raises(UnsupportedError, match=f"{mode}.*turn it off, or remove the clairai key"):
        check_modes(config(path, value))


def by_ray(path: str = "", value: object = None) -> Any:
    found = config(path, value)
    found.parallel_config.use_ray = True
    found.parallel_config.distributed_executor_backend = "ray"
    return found


def test_both_ray_executors_are_served_on_a_cpu_and_the_newer_one_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpu = by_ray()
    on_gpu.device_config.device_type = "cuda"
    assert list_refused_modes(by_ray()) == list_refused_modes(on_gpu) == []
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    assert list_refused_modes(by_ray()) == []
    (reason,) = list_refused_modes(on_gpu)
    assert reason.startswith("vLLM's Ray executor on compiled graphs with a GPU")
    assert "leave VLLM_USE_RAY_V2_EXECUTOR_BACKEND unset" in reason


def test_what_was_not_tried_with_ray_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    staged = by_ray("parallel_config.pipeline_parallel_size", 2)
    speculating = by_ray("speculative_config", SimpleNamespace(method="ngram"))
    connected = by_ray()
    connected.kv_transfer_config = SimpleNamespace(kv_connector="ExampleConnector")
    for found, mode in (
        (staged, "pipeline parallelism with vLLM's Ray executor"),
        (speculating, "speculative decoding with vLLM's Ray executor"),
        (connected, "a KV connector with vLLM's Ray executor"),
    ):
        (reason,) = list_refused_modes(found)
        assert reason.startswith(mode)
    with pytest.raises(UnsupportedError, match="new weights were not tried with vLLM's Ray exec"):
        check_weights_mode(by_ray())
    monkeypatch.setattr(check_engine, "vllm_version", lambda: "0.31.2")
    (reason,) = list_refused_modes(by_ray())
    assert reason.startswith("vLLM's Ray executor before vLLM 0.32")


def test_stages_are_served_on_a_cpu_and_refused_on_a_gpu() -> None:
    staged = config("parallel_config.pipeline_parallel_size", 2)
    assert list_refused_modes(staged) == []
    staged.device_config.device_type = "cuda"
    (reason,) = list_refused_modes(staged)
    assert reason.startswith("pipeline parallelism on a GPU")


def test_cores_of_a_model_with_experts_are_refused() -> None:
    several = config("parallel_config.data_parallel_size", 2)
    several.parallel_config.data_parallel_size_local = 2
    several.model_config.is_moe = True
    (reason,) = list_refused_modes(several)
    assert reason.startswith(EXPERTS)


def test_every_refused_mode_is_listed_here() -> None:
    modes = tuple({mode for *_, mode in MODES})
    elsewhere = (
        EXPERTS,
        "pipeline parallelism on a GPU",
        "speculative decoding on a GPU with the V1 model runner",
        "speculative decoding with adaptive verification",
        "speculative decoding with pipeline parallelism",
        "speculative decoding with vLLM before 0.32",
        "vLLM's Ray executor before vLLM 0.32",
        "vLLM's Ray executor on compiled graphs with a GPU",
        "pipeline parallelism with vLLM's Ray executor",
        "speculative decoding with vLLM's Ray executor",
        "a KV connector with vLLM's Ray executor",
    )
    others = [reason for reason, _ in REFUSED_MODES if not reason.startswith(modes)]
    assert sorted(reason.partition(" (")[0] for reason in others) == sorted(elsewhere)


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle", "mtp"])
def test_speculation_is_served_by_methods_runners_and_releases_that_were_tried(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_engine, "vllm_version", lambda: "0.32.0+cpu")
    speculating = config("speculative_config", SimpleNamespace(method=method))
    assert list_refused_modes(speculating) == []
    speculating.device_config.device_type = "cuda"
    (reason,) = list_refused_modes(speculating)
    assert reason.startswith("speculative decoding on a GPU with the V1 model runner")
    speculating.use_v2_model_runner = True
    assert list_refused_modes(speculating) == []
    monkeypatch.setattr(check_engine, "vllm_version", lambda: "0.31.2")
    (reason,) = list_refused_modes(speculating)
    assert reason.startswith("speculative decoding with vLLM before 0.32")


def test_a_plain_engine_is_served_and_tensor_parallelism_with_it() -> None:
    assert list_refused_modes(config()) == []
    check_modes(config())


def test_engine_cores_of_one_machine_are_served_and_capture_with_consumers_that_are_known() -> None:
    several = config("parallel_config.data_parallel_size", 2)
    several.parallel_config.data_parallel_size_local = 2
    check_modes(several)
    check_core_settings(several, None)
    check_core_settings(several, CaptureSettings.parse({"folder": "c"}))
    others = CaptureSettings.parse({"consumers": {"mine": {"kind": "queue", "folder": "c"}}})
    with pytest.raises(UnsupportedError, match="consumer 'mine' of kind 'queue' does not go with"):
        check_core_settings(several, others)


@pytest.mark.parametrize("balancer", ["data_parallel_external_lb", "data_parallel_hybrid_lb"])
def test_an_api_server_of_its_own_counts_its_own_engine_cores(balancer: str) -> None:
    one = config("parallel_config.data_parallel_size", 8)
    setattr(one.parallel_config, balancer, True)
    check_modes(one)
    check_core_settings(one, CaptureSettings.parse({"folder": "c"}))


def test_an_attribute_that_a_release_does_not_have_counts_as_off() -> None:
    assert list_refused_modes(SimpleNamespace()) == []
    assert list_refused_modes(SimpleNamespace(parallel_config=None, model_config=None)) == []


def test_all_reasons_are_given_at_once() -> None:
    both = config("speculative_config", SimpleNamespace(method="suffix"))
    both.parallel_config.data_parallel_size = 4
    with pytest.raises(UnsupportedError, match=r"data parallelism .*; speculative decoding"):
        check_modes(both)


@pytest.mark.parametrize(
    "version", ["0.26", "0.26.0", "0.26.0rc1", "0.29.3", "0.32.0+cpu", "0.32.1", "0.32.1.dev7+g1"]
)
def test_a_release_of_the_tested_range_is_served(version: str) -> None:
    check_version(version, allow_untested=False)


@pytest.mark.parametrize(
    "version",
    ["0.25.9", "0.2", "0.33.0", "0.33.0rc1", "1.26.0", "0.260.0", "", "dev", "v0.30", "-"],
)
def test_any_other_release_is_refused_unless_the_user_takes_the_risk(version: str) -> None:
    with pytest.raises(UnsupportedError, match=r'0\.26 to 0\.32; .*"allow_untested_vllm": true'):
        check_version(version, allow_untested=False)
    check_version(version, allow_untested=True)


EXAMPLE = SimpleNamespace(kv_connector="ExampleConnector", kv_connector_module_path=None)
ANOTHERS_EXAMPLE = SimpleNamespace(
    kv_connector="ExampleConnector", kv_connector_module_path="theirs"
)
OFFLOADING = SimpleNamespace(kv_connector="OffloadingConnector", kv_connector_module_path=None)
LMCACHE = SimpleNamespace(kv_connector="LMCacheConnectorV1", kv_connector_module_path=None)


def test_speculation_goes_with_several_ranks_and_not_with_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check_engine, "vllm_version", lambda: "0.32.0+cpu")
    speculating = config("speculative_config", SimpleNamespace(method="eagle"))
    speculating.parallel_config.tensor_parallel_size = 2
    assert list_refused_modes(speculating) == []
    speculating.parallel_config.pipeline_parallel_size = 2
    (reason,) = list_refused_modes(speculating)
    assert reason.startswith("speculative decoding with pipeline parallelism")


class FoundDevice:
    """vLLM's current_platform, of one kind."""

    def __init__(self, kind: str, device_name: str) -> None:
        self._kind, self.device_name = kind, device_name

    def __getattr__(self, name: str) -> Callable[[], bool]:
        return lambda: name == f"is_{self._kind}"


@pytest.mark.parametrize("kind", ["cuda", "cpu", "unspecified"])
def test_a_device_that_rows_were_checked_on_is_served(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform", FoundDevice(kind, kind))
    assert find_refused_device() == ""
    check_device()


@pytest.mark.parametrize(
    ("kind", "device_name", "reason"),
    [
        ("rocm", "rocm", r"AMD GPUs \(ROCm\): the GPU publishes rows by a store of NVIDIA's"),
        ("xpu", "xpu", "xpu: no row of such a device"),
        ("out_of_tree", "npu", "npu: no row of such a device"),
    ],
)
def test_any_other_device_is_refused_by_name_with_the_reason_and_the_way_out(
    kind: str, device_name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform", FoundDevice(kind, device_name))
    with pytest.raises(UnsupportedError, match=f"does not serve {reason}.*; run vLLM on an NVIDIA"):
        check_device()


def test_a_worker_on_an_amd_gpu_is_refused_at_start_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform", FoundDevice("rocm", "rocm"))
    monkeypatch.setattr(check_engine, "vllm_version", lambda: "0.32.0")
    with_key = SimpleNamespace(additional_config={"clairai": {"points": ["post_block.1"]}})
    with pytest.raises(UnsupportedError, match="ROCm"):
        worker.prepare(SimpleNamespace(vllm_config=with_key))


@pytest.mark.attack(121)
def test_steering_does_not_go_with_a_kv_connector() -> None:
    """One that keys by token ids would give the KV of steered tokens to others."""
    check_engine.check_steering_mode(SimpleNamespace(kv_transfer_config=None))
    check_engine.check_steering_mode(SimpleNamespace())
    for connector in (LMCACHE, SimpleNamespace(kv_connector=None), ANOTHERS_EXAMPLE):
        with pytest.raises(UnsupportedError, match="steering does not go with the KV connector"):
            check_engine.check_steering_mode(SimpleNamespace(kv_transfer_config=connector))
    check_engine.check_steering_mode(SimpleNamespace(kv_transfer_config=EXAMPLE))


def test_steering_goes_with_vllms_offloading_since_the_release_it_was_tried_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = SimpleNamespace(kv_transfer_config=OFFLOADING)
    monkeypatch.setattr(check_engine, "vllm_version", lambda: "0.32.0")
    check_engine.check_steering_mode(engine)
    monkeypatch.setattr(check_engine, "vllm_version", lambda: "0.31.0")
    with pytest.raises(UnsupportedError, match=r"OffloadingConnector: .* use one of Example"):
        check_engine.check_steering_mode(engine)


def test_new_weights_do_not_go_with_any_kv_connector() -> None:
    """Whatever it is keyed by, it keeps KV of the old ones."""
    check_engine.check_weights_mode(SimpleNamespace(kv_transfer_config=None))
    with pytest.raises(UnsupportedError, match="the KV cache of the old ones"):
        check_engine.check_weights_mode(SimpleNamespace(kv_transfer_config=EXAMPLE))


def test_an_engine_that_shall_steer_is_checked_before_it_has_a_registry() -> None:
    steering = ResolvedSettings(Settings(steering=True), (), (), ())
    config = SimpleNamespace(kv_transfer_config=LMCACHE)
    with pytest.raises(UnsupportedError, match="or start without steering"):
        engine_core.make_registry(config, steering)
    without = ResolvedSettings(Settings(), (), (), ())
    assert engine_core.make_registry(config, without) is None
