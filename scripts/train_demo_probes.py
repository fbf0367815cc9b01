"""Train the demo probes that the package ships, on the labelled texts.

Run: python -m scripts.train_demo_probes. Then: python -m scripts.demo_examples.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Final

from clairai.demo.console import say
from clairai.demo.model import NAME, smollm2
from clairai.probe import files
from clairai.train.start_engine import demo_arguments, run_engine
from clairai.train.train_probe import ProbeJob, TrainedProbe, train
from scripts import numbers
from scripts.demo_documents import CONCEPTS, documents

FOLDER: Final = Path(__file__).resolve().parent.parent / "src" / "clairai" / "demo" / "probes"
COMMAND: Final = "python -m scripts.train_demo_probes"
HEADINGS: Final = (
    *("probe", "point", "held-out documents", "held-out tokens", "AUROC", "AUROC, all tokens"),
    *("AUROC, documents", "balanced accuracy", "threshold", "calibration"),
)
EXPLANATION: Final = (
    "Rows come from vLLM through our own taps. A quarter of all texts and chats is held out, and "
    "point, penalty and threshold are chosen by cross-validation on the other three quarters. The "
    "demo model repeats itself, so that sentences of a held-out answer may also be in a training "
    "one; written texts are in one quarter only. `AUROC` is over tokens and leaves out what the "
    "chat template adds and the first four tokens of each stretch with the concept, where nothing "
    "tells yet what it will be; `AUROC, all tokens` counts those too; `AUROC, documents` compares "
    "the mean scores of documents. Balanced accuracy is at the stored threshold: 0.5, or higher "
    "where over 1 % of training tokens without the concept, left out in turn, reach that. "
    "Calibration runs from the 1st percentile of held-out tokens without the concept to the 99th "
    "of those with it. Texts: `scripts/demo_texts/`, most written for this project, and "
    "`chats.jsonl`, prompts written for it with the greedy answers of the demo model itself, "
    "sorted by hand."
)


def main() -> None:
    """Train every concept, write the files and the table."""
    started = time.monotonic()
    jobs = [ProbeJob(concept.name, documents(concept), concept.description) for concept in CONCEPTS]
    with run_engine(str(smollm2()), (), demo_arguments()) as source:
        trained = train(source, jobs, model=NAME)
    FOLDER.mkdir(exist_ok=True)
    for made in trained:
        files.save(FOLDER / f"{made.probe.name}.safetensors", made.probe)
    table = numbers.table(HEADINGS, [cells(made) for made in trained])
    sys.stdout.write(f"{table}\n")
    took = f"{time.monotonic() - started:.0f} s"
    say(took)
    numbers.write_section("Demo probes", [numbers.stamp(COMMAND, took=took), EXPLANATION, table])


def cells(made: TrainedProbe) -> tuple[str, ...]:
    probe, evaluation = made.probe, made.evaluation
    low, high = probe.calibration or (0.0, 1.0)
    return (
        f"`{probe.name}`",
        f"`{probe.point}`",
        f"{evaluation.num_documents}",
        f"{evaluation.num_tokens}",
        f"{evaluation.auroc:.3f}",
        f"{evaluation.auroc_all:.3f}",
        f"{evaluation.auroc_documents:.3f}",
        f"{evaluation.accuracy:.3f}",
        f"{probe.threshold:.2f}",
        f"{low:.2g} to {high:.2g}",
    )


if __name__ == "__main__":
    main()
