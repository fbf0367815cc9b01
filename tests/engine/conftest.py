"""Running engines of the demo model, each started once for all tests that use it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import clairai
from tests.engine import full_disk, hooked, models, sampling, steering
from tests.engine.process import EngineProcess


@pytest.fixture(scope="session")
def cut_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 4 of the real model's 30 layers: real embeddings, a seventh of the time."""
    return models.cut(models.real(), 4, tmp_path_factory.mktemp("cut") / "SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def capture_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engine keeps what requests ask it to capture."""
    return tmp_path_factory.mktemp("captures") / "store"


@pytest.fixture(scope="session")
def engine(
    cut_model: Path, runtime: Path, capture_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    """Small on purpose: 64 tokens a step cut prompts up, 26 blocks of 32 tokens run out."""
    packages = tmp_path_factory.mktemp("packages")
    full_disk.install(packages)
    with EngineProcess(
        runtime=runtime,
        plant=full_disk.Found(packages),
        model=str(cut_model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=32,
        max_num_batched_tokens=64,
        block_size=32,
        num_gpu_blocks_override=26,
        enable_prefix_caching=True,
        logits_processors=[sampling.LOGITS_PROCESSOR],
        additional_config=clairai.config(
            points=["pre_attn.0", "post_attn.1", "post_block.3"],
            capacity=8,
            ring_mib=64,
            steering=True,
            capture={
                "consumers": {
                    "fs": {"folder": str(capture_folder)},
                    "npz": {"folder": str(capture_folder.with_name("npz"))},
                    "full": {
                        "kind": full_disk.KIND,
                        "folder": str(capture_folder.with_name("full")),
                    },
                },
                "to": ["fs"],
            },
        ),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def steered(engine: EngineProcess) -> Iterator[EngineProcess]:
    """The engine with some named vectors, for as long as a module's tests run."""
    engine.call(steering.put, [hooked.vector_file(*item) for item in hooked.ROWS.items()])
    yield engine
    engine.call(steering.remove_all)
