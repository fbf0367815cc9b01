"""On a GPU: weights go from a trainer's memory to the engine's by 64-byte handles, and back.

The engine core is a process of its own: CUDA opens no handle in the process that made it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import clairai
from clairai.weights import checksum as host
from clairai.weights import tensors as device
from tests.engine import weighed
from tests.engine.process import EngineProcess
from tests.gpu import forced

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

TRANSFERS = 100


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forced.model(tmp_path_factory.mktemp("weights") / "tiny")


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weighed.perturb(model, tmp_path_factory.mktemp("weights-other") / "tiny")


def _arguments(model: Path, runtime: Path) -> dict[str, Any]:
    return {
        "runtime": runtime,
        "environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 256,
        "max_num_seqs": 16,
        "gpu_memory_utilization": 0.1,
    }


@pytest.fixture(scope="module")
def engine(model: Path, runtime: Path) -> Iterator[EngineProcess]:
    with EngineProcess(
        **_arguments(model, runtime),
        weight_transfer_config={"backend": "clairai_ipc"},
        additional_config=clairai.config(points=["pre_attn.0"], runtime_dir=str(runtime)),
    ) as running:
        yield running


def answers(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    given = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": list(range(at, at + 8))} for at in (1, 40, 300)]
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, given, use_tqdm=False)]


def send(llm: Any, folder: Path, times: int = 1) -> dict[str, Any]:
    """From tensors on the GPU; what the last one says, and what the GPU had free in between."""
    from safetensors.torch import load_file

    from clairai.weights import Sender

    held = {
        name: tensor.to("cuda", torch.bfloat16)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    free, digests = [], set()
    for _ in range(times):
        sent = Sender(llm).send(held)
        digests.add(sent.digest)
        free.append(torch.cuda.mem_get_info()[0])
    return {"home": sent.home, "version": sent.version, "digests": len(digests), "free": free}


def test_both_checksums_agree_on_the_gpu() -> None:
    raw = torch.randint(0, 256, ((8 << 20) + 5,), dtype=torch.uint8)
    assert device.checksum(raw.cuda()) == host.checksum(raw.numpy().tobytes())


def test_weights_go_over_by_handle_and_come_back(
    engine: EngineProcess, model: Path, other: Path, runtime: Path
) -> None:
    before = engine.call(answers)
    there = engine.call(send, other)
    after = engine.call(answers)
    back = engine.call(send, model)
    assert there["home"] == back["home"] == "device"
    assert back["version"] == there["version"] + 1
    assert engine.call(answers) == before != after
    with EngineProcess(**_arguments(other, runtime)) as fresh:
        assert fresh.call(answers) == after


def test_a_hundred_transfers_leave_the_gpu_as_it_was(engine: EngineProcess, model: Path) -> None:
    found = engine.call(send, model, TRANSFERS)
    assert found["digests"] == 1
    assert found["free"][-1] == found["free"][1], "bytes were not given back"
