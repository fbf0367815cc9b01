"""Score every token of two answers, offline, with the demo model and its probes.

Run: python examples/offline.py
"""

from __future__ import annotations

from pathlib import Path

import clairai
from clairai.demo import model


def main() -> None:
    from vllm import LLM, SamplingParams

    probes = Path(model.__file__).parent / "probes"
    llm = LLM(
        str(model.smollm2()),
        max_model_len=512,
        max_num_seqs=8,
        enforce_eager=True,
        gpu_memory_utilization=0.3,
        additional_config=clairai.config(probes=probes),
    )
    chats = [
        [{"role": "user", "content": "Write a Python function that adds two numbers."}],
        [{"role": "user", "content": "Traduis en anglais : « Le chat dort sur la chaise. »"}],
    ]
    params = SamplingParams(max_tokens=24, temperature=0.0, extra_args=clairai.request())
    outputs = llm.chat(chats, params, use_tqdm=False)
    for output, (scores,) in zip(outputs, clairai.scores(llm, outputs), strict=True):
        print(repr(output.outputs[0].text))
        for name in scores.names:
            # The last sampled token is never forwarded: it has no score.
            mean = scores[name][scores.num_prompt : -1].mean()
            print(f"  {name:20} mean over the answer {mean:.3f}")


if __name__ == "__main__":
    main()
