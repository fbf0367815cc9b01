"""VLLM_ACT_* on stock vLLM: an .npz for each sequence and layer, whose values decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import clairai
from clairai.store.codecs.registry import named
from clairai.store.read import open as open_store
from tests.engine.process import EngineProcess

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NUM_LAYERS = 4
K = 256
PROMPT = [*range(10, 40)]


def _answers(llm: Any) -> dict[str, Any]:
    """One prompt captured by default, then the same prompt captured raw."""
    from vllm import SamplingParams

    found: dict[str, Any] = {}
    for name, extra in (("usual", None), ("raw", clairai.request(capture={"encoder": "raw"}))):
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, extra_args=extra)
        outputs = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        ((capture,),) = clairai.captures(llm, outputs)
        found[name] = (capture.id, capture.state, capture.lost, capture.report.rows)
    return found


def test_the_variables_without_any_setting_capture_every_sequence_and_layer(
    cut_model: Path, runtime: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "acts"
    environment = {
        "VLLM_ACT_CAPTURE": "1",
        "VLLM_ACT_MODE": "rp8",
        "VLLM_ACT_RP_K": str(K),
        "VLLM_ACT_RETURN": "gathered",
        "VLLM_ACT_OUTDIR": str(folder),
    }
    with EngineProcess(
        runtime=runtime,
        environment=environment,
        model=str(cut_model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
    ) as engine:
        found = engine.call(_answers)
    for name in ("usual", "raw"):
        id, state, lost, num_rows = found[name]
        assert (state, lost) == ("kept", 0)
        assert num_rows >= NUM_LAYERS * (len(PROMPT) + 3)
        names = sorted(path.name for path in folder.glob(f"*-{id}-*.npz"))
        layers = [part.split("-")[-1] for part in names]
        assert layers == [f"post_block.{layer}.npz" for layer in range(NUM_LAYERS)]
    for layer in range(NUM_LAYERS):
        _check(folder, found["usual"][0], found["raw"][0], f"post_block.{layer}")


def _check(folder: Path, usual: str, raw: str, point: str) -> None:
    """The decoded projection is that of the raw rows."""
    (path,) = folder.glob(f"*-{usual}-{point}.npz")
    encoder = named("rp8", {"k": K, "seed": 0})
    with np.load(path) as file:
        arrays = {name: file[f"rows.{name}"] for name in ("codes", "low", "high")}
        got = encoder.decode(arrays, width=576)
    rows: NDArray[np.float32] = np.asarray(open_store(folder).rows(int(raw, 16), point=point))
    expected = encoder.decode(encoder.encode(rows), width=576)
    both = min(len(got), len(expected))
    dots = (got[:both] * expected[:both]).sum(axis=1)
    lengths = np.linalg.norm(got[:both], axis=1) * np.linalg.norm(expected[:both], axis=1)
    assert (dots / lengths).min() > 0.999
