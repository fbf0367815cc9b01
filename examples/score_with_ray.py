"""Score many prompts on a Ray cluster, with the demo model and its probes.

Run: python examples/score_with_ray.py PROMPTS.txt OUT [ADDRESS]
Each line of PROMPTS.txt is a prompt; OUT becomes a folder of Parquet files.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray
import ray.data


class ScorePrompts:
    """One engine; Ray Data makes one in each of its workers."""

    def __init__(self) -> None:
        from vllm import LLM

        import clairai
        from clairai.demo import model

        self.llm = LLM(
            str(model.smollm2()),
            max_model_len=512,
            enforce_eager=True,
            gpu_memory_utilization=0.3,
            additional_config=clairai.config(probes=Path(model.__file__).parent / "probes"),
        )

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams

        import clairai

        params = SamplingParams(max_tokens=16, temperature=0.0, extra_args=clairai.request())
        outputs = self.llm.generate(list(batch["text"]), params, use_tqdm=False)
        found = [one for (one,) in clairai.scores(self.llm, outputs, reduce="max")]
        batch["answer"] = [output.outputs[0].text for output in outputs]
        for name in found[0].names:
            batch[name] = [float(one[name]) for one in found]
        return batch


def main(prompts: str, out: str, address: str | None = None) -> None:
    ray.init(address=address, log_to_driver=False)
    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    ray.data.read_text(prompts).map_batches(
        ScorePrompts,
        batch_size=256,
        concurrency=num_gpus or 1,
        num_gpus=1 if num_gpus else 0,
    ).write_parquet(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
