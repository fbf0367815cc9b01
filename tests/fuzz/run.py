"""Fuzzes all targets on several cores, up to a number of inputs or a time; writes a report."""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import platform
import resource
import struct
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.fuzz.fuzzer import Finding, Fuzzer, Outcome, shrink
from tests.fuzz.mutate import MAX_NBYTES
from tests.fuzz.target import Target

CRASHES: Final = Path(__file__).parent / "crashes"
MEMORY_LIMIT: Final = 4 << 30  # of a worker, beyond what its imports have mapped
GRACE_S: Final = 60.0  # for imports, and for shrinking what was found
_LENGTH: Final = struct.Struct("<I64s")


@dataclass(frozen=True)
class Job:
    """What one worker does: so many inputs of each target, for so many seconds in all."""

    number: int
    inputs: Mapping[str, int]
    seconds: float
    seed: int
    folder: Path

    @property
    def report(self) -> Path:
        return self.folder / f"{self.number}.json"

    @property
    def record(self) -> Path:
        return self.folder / f"{self.number}.input"


class InputRecord:
    """The input at hand, in a file that is still there when the worker is not."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_LENGTH.size + MAX_NBYTES))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self.target = b""

    def __call__(self, data: bytes) -> None:
        data = data[:MAX_NBYTES]
        _LENGTH.pack_into(self._memory, 0, len(data), self.target)
        self._memory[_LENGTH.size : _LENGTH.size + len(data)] = data

    @staticmethod
    def read(path: Path) -> tuple[str, bytes]:
        raw = path.read_bytes() if path.exists() else bytes(_LENGTH.size)
        length, target = _LENGTH.unpack_from(raw)
        return target.rstrip(b"\0").decode(), raw[_LENGTH.size : _LENGTH.size + length]


def share_inputs(total: int, targets: Iterable[Target], jobs: int) -> dict[str, int]:
    """The inputs of each target in each worker: together `total` or a little more."""
    listed = list(targets)
    whole = sum(target.share for target in listed)
    return {target.name: -int(-total * target.share // (whole * jobs)) for target in listed}


def work(job: Job) -> None:
    """Runs in: a worker, a process of its own."""
    from tests.fuzz.targets import all_targets

    _limit_memory()
    record = InputRecord(job.record)
    targets = all_targets()
    seed = job.seed * 1000 + job.number
    fuzzers = {name: Fuzzer(targets[name], seed, record) for name in job.inputs}
    deadline_s = time.monotonic() + job.seconds
    while unfinished := [one for one in fuzzers.values() if _num_left(one, job)]:
        if time.monotonic() > deadline_s:
            break
        _run_round(unfinished, job, record, deadline_s)
    outcomes = [fuzzer.outcome for fuzzer in fuzzers.values()]
    job.report.write_text(json.dumps([_as_dict(outcome, targets) for outcome in outcomes]))


def _num_left(fuzzer: Fuzzer, job: Job) -> int:
    return job.inputs[fuzzer.target.name] - fuzzer.outcome.inputs


def _run_round(fuzzers: Sequence[Fuzzer], job: Job, record: InputRecord, deadline_s: float) -> None:
    """Each target for its share of the time that is left; what it leaves is for the next."""
    begin_s, spent = time.monotonic(), 0.0
    whole = sum(fuzzer.target.share for fuzzer in fuzzers)
    for fuzzer in fuzzers:
        record.target = fuzzer.target.name.encode()
        spent += fuzzer.target.share / whole
        end_s = begin_s + (deadline_s - begin_s) * spent
        fuzzer.run(_num_left(fuzzer, job), end_s)


def _limit_memory() -> None:
    """A parser that asks for more fails with MemoryError, which is a finding."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def _as_dict(outcome: Outcome, targets: Mapping[str, Target]) -> dict[str, Any]:
    target = targets[outcome.target]
    found = [shrink(target, finding) for finding in outcome.findings]
    return {
        **vars(outcome),
        "places": sorted(outcome.places),
        "findings": [{"what": one.what, "data": one.data.hex()} for one in found],
    }


def run_jobs(jobs: Sequence[Job]) -> list[list[dict[str, Any]]]:
    """The reports of all workers; one that died is reported as a finding of its last input."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(job,)) for job in jobs]
    for process in processes:
        process.start()
    deadline_s = time.monotonic() + max(job.seconds for job in jobs) + GRACE_S
    for process in processes:
        process.join(max(deadline_s - time.monotonic(), 0.0))
    return [_read_report(*pair) for pair in zip(jobs, processes, strict=True)]


def _read_report(job: Job, process: Any) -> list[dict[str, Any]]:
    if process.is_alive():
        process.kill()
        process.join()
    if job.report.exists():
        found: list[dict[str, Any]] = json.loads(job.report.read_text())
        return found
    target, data = InputRecord.read(job.record)
    what = f"worker ended with {process.exitcode} in this input or one before"
    died = Outcome(target or "none", num_findings=1)
    return [{**vars(died), "places": [], "findings": [{"what": what, "data": data.hex()}]}]


def merge(reports: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One report of each target, from those of all workers."""
    merged: dict[str, dict[str, Any]] = {}
    for one in (one for report in reports for one in report):
        known = merged.setdefault(one["target"], {"target": one["target"]})
        for name in ("inputs", "accepted", "kept", "num_findings", "seconds"):
            known[name] = known.get(name, 0) + one[name]
        known["peak_nbytes"] = max(known.get("peak_nbytes", 0), one["peak_nbytes"])
        known["places"] = sorted({*known.get("places", []), *one["places"]})
        known["findings"] = _different([*known.get("findings", []), *one["findings"]])
    return list(merged.values())


def _different(findings: list[dict[str, str]]) -> list[dict[str, str]]:
    """The shortest input of each kind."""
    found: dict[str, dict[str, str]] = {}
    for one in sorted(findings, key=lambda one: len(one["data"])):
        found.setdefault(one["what"][:60], one)
    return list(found.values())


def keep_findings(merged: Iterable[dict[str, Any]], folder: Path) -> list[Path]:
    """Write each input to a file, which the test suite parses again from then on."""
    written = []
    for one in merged:
        for found in one["findings"]:
            finding = Finding(one["target"], found["what"], bytes.fromhex(found["data"]))
            path = folder / finding.target / finding.file_name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(finding.data)
            written.append(path)
    return written


def as_table(merged: Sequence[dict[str, Any]]) -> str:
    """The report in Markdown."""
    lines = ["| target | inputs | accepted | refused at | kept | peak KiB | findings |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|"]
    total = {name: sum(one[name] for one in merged) for name in ("inputs", "kept", "num_findings")}
    for one in merged:
        share = one["accepted"] / max(one["inputs"], 1)
        lines.append(
            f"| {one['target']} | {one['inputs']:,} | {share:.1%} | {len(one['places'])} places "
            f"| {one['kept']} | {one['peak_nbytes'] >> 10:,} | {one['num_findings']} |"
        )
    lines.append(f"| all | {total['inputs']:,} | | | {total['kept']} | | {total['num_findings']} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    from tests.fuzz.targets import all_targets

    known = all_targets()
    chosen = [known[name] for name in options.target or known]
    inputs = share_inputs(options.inputs, chosen, options.jobs)
    begin_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        jobs = [
            Job(number, inputs, options.seconds, options.seed, Path(folder))
            for number in range(options.jobs)
        ]
        merged = merge(run_jobs(jobs))
    result = {
        "inputs": sum(one["inputs"] for one in merged),
        "asked": options.inputs,
        "seconds": round(time.perf_counter() - begin_s, 1),
        "jobs": options.jobs,
        "seed": options.seed,
        "python": platform.python_version(),
        "findings": sum(one["num_findings"] for one in merged),
        "targets": merged,
    }
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(as_table(merged))
    asked = f"{result['inputs']:,} of {options.inputs:,} inputs"
    print(f"{asked} in {result['seconds']} s on {options.jobs} cores")
    for path in keep_findings(merged, options.crashes):
        print(f"found: {path}", file=sys.stderr)
    for one in merged:
        for found in one["findings"]:
            print(f"{one['target']}: {found['what']}", file=sys.stderr)
    return 1 if result["findings"] else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="in all")
    parser.add_argument("--seconds", type=float, default=600.0, help="stop by then")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other inputs")
    parser.add_argument("--target", action="append", help="only this one; may be repeated")
    parser.add_argument("--out", type=Path, help="the report as JSON")
    parser.add_argument("--crashes", type=Path, default=CRASHES, help="where findings are kept")
    return parser.parse_args(arguments)
