"""What every process of a service holds over time, and whether that stays flat."""

from __future__ import annotations

import csv
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Final

import numpy as np

MAX_SLOPE_MIB_PER_MIN: Final = 1.0
MIN_JUDGED_S: Final = 300.0  # of samples: on fewer, a slope says nothing
MAX_MORE_DESCRIPTORS: Final = 4  # connections that are kept open for the next request
MAX_MORE_THREADS: Final = 2  # of pools that grow up to a bound when they are used
# pyzmq starts a collector, once, when a process first sends 64 KiB without a copy, as vLLM's core
# does (zmq/utils/garbage.py): a context with its two threads, and a thread of Python.
_COLLECTOR: Final = "thread ZMQbg/Reaper"
_COLLECTOR_THREADS: Final = 3
_COLLECTOR_DESCRIPTORS: Final = 7
MAX_SHARDS: Final = 256  # store/read.py: MAX_OPEN
_PROC: Final = Path("/proc")
_ROLES: Final = (
    ("capture writer", re.compile("capture.writer_process|capture_writer")),
    ("process guard", re.compile("process_guard")),
    ("completion process", re.compile(r"processes\.completion_process")),
    ("engine core", re.compile("EngineCore")),
    ("worker", re.compile("VLLM::Worker")),
    ("API server", re.compile(r"vllm serve|vllm\.entrypoints|APIServer|launch\.")),
    ("proxy", re.compile(r"clairai(\.cli)? demo|clairai\.cli")),
    ("resource tracker", re.compile("resource_tracker")),
)
# What a process is that multiprocessing has spawned, by what its parent is.
_SPAWNED: Final = {"API server": "engine core", "engine core": "worker"}


@dataclass(frozen=True)
class Sample:
    """One process at one moment; `anon_kib` is its own memory, without mapped files."""

    at_s: float
    role: str
    pid: int
    rss_kib: int
    anon_kib: int
    descriptors: int  # without those of shards
    threads: int
    shards: int = 0  # of captures, that are mapped
    # How many of each kind of descriptor, and of each name of a thread.
    held: Mapping[str, int] = field(default_factory=dict, compare=False)


def find_tree(root: int) -> dict[int, int]:
    """A process and all that descend from it, parents first, each with its parent."""
    children: dict[int, list[int]] = {}
    for folder in _PROC.iterdir():
        if folder.name.isdecimal() and (parent := _parent(folder)) is not None:
            children.setdefault(parent, []).append(int(folder.name))
    found, unseen = {root: 0}, [root]
    for pid in unseen:
        found |= dict.fromkeys(children.get(pid, []), pid)
        unseen += children.get(pid, [])
    return found


def _parent(folder: Path) -> int | None:
    try:
        stat = (folder / "stat").read_text()
    except OSError:
        return None  # it has just ended
    return int(stat.rpartition(")")[2].split()[1])


def take_samples(root: int, begun_s: float) -> list[Sample]:
    """One of each process of the tree; processes that end meanwhile are left out."""
    found: dict[int, Sample] = {}
    for pid, parent in find_tree(root).items():
        parent_role = found[parent].role if parent in found else ""
        sample = _take_sample(pid, time.monotonic() - begun_s, parent_role)
        found |= {} if sample is None else {pid: sample}
    return [*found.values()]


def _take_sample(pid: int, at_s: float, parent_role: str) -> Sample | None:
    folder = _PROC / str(pid)
    try:
        status = (folder / "status").read_text()
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        paths = [_target(link) for link in (folder / "fd").iterdir()]
        names = [(task / "comm").read_text().strip() for task in (folder / "task").iterdir()]
    except OSError:
        return None
    told = dict(line.partition(":")[::2] for line in status.splitlines())
    if "VmRSS" not in told:
        return None  # it has ended and waits for its parent
    rss_kib, anon_kib = (int(told[name].split()[0]) for name in ("VmRSS", "RssAnon"))
    shards = sum(path.endswith((".safetensors", ".npz")) for path in paths)
    return Sample(
        at_s=round(at_s, 1),
        role=find_role(command or told["Name"].strip(), parent_role),
        pid=pid,
        rss_kib=rss_kib,
        anon_kib=anon_kib,
        descriptors=len(paths) - shards,
        threads=int(told["Threads"]),
        shards=shards,
        held=Counter([*(_kind(path) for path in paths), *(f"thread {name}" for name in names)]),
    )


def _kind(path: str) -> str:
    """What a descriptor is of: a socket and a pipe have numbers, which are left out."""
    return path.partition(":[")[0] if path.startswith(("socket:", "pipe:")) else path


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""  # closed meanwhile


def find_role(command: str, parent_role: str = "") -> str:
    if "spawn_main" in command:
        return _SPAWNED.get(parent_role, "other")
    return next((role for role, pattern in _ROLES if pattern.search(command)), "other")


def slope_mib_per_min(samples: Sequence[Sample]) -> float:
    """The median of the slopes between all pairs: a few outliers do not move it."""
    at_N = np.array([sample.at_s for sample in samples]) / 60
    mib_N = np.array([sample.anon_kib for sample in samples]) / 1024
    first, second = np.triu_indices(len(samples), k=1)
    if not len(first):
        return 0.0
    is_apart = at_N[second] > at_N[first]
    first, second = first[is_apart], second[is_apart]
    return float(np.median((mib_N[second] - mib_N[first]) / (at_N[second] - at_N[first])))


def by_process(samples: Iterable[Sample]) -> dict[tuple[str, int], list[Sample]]:
    found: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        found.setdefault((sample.role, sample.pid), []).append(sample)
    return found


def judge_memory(samples: Sequence[Sample]) -> tuple[dict[str, float], list[str]]:
    """The slope of each process, and the faults; `samples` are those after the warm-up."""
    slopes, faults = {}, []
    for (role, pid), own in by_process(samples).items():
        if own[-1].at_s - own[0].at_s < MIN_JUDGED_S:
            continue
        name = f"{role} ({pid})"
        slopes[name] = round(slope_mib_per_min(own), 3)
        if slopes[name] > MAX_SLOPE_MIB_PER_MIN:
            faults.append(
                f"memory of {name} grows by {slopes[name]} MiB a minute, "
                f"may grow by {MAX_SLOPE_MIB_PER_MIN}"
            )
    return slopes, faults


def judge_rest(before: Sequence[Sample], after: Sequence[Sample]) -> list[str]:
    """Faults in what two idle moments hold: processes, descriptors, threads."""
    known = {sample.pid: sample for sample in before}
    faults = [f"{one.role} ({one.pid}) is new" for one in after if one.pid not in known]
    left = known.keys() - {sample.pid for sample in after}
    faults += [f"{known[pid].role} ({pid}) has ended" for pid in sorted(left)]
    for one in after:
        first = known.get(one.pid, one)
        collectors = min(1, one.held.get(_COLLECTOR, 0) - first.held.get(_COLLECTOR, 0))
        descriptors = one.descriptors - collectors * _COLLECTOR_DESCRIPTORS
        threads = one.threads - collectors * _COLLECTOR_THREADS
        if descriptors > first.descriptors + MAX_MORE_DESCRIPTORS:
            faults.append(
                f"{one.role}: {first.descriptors} to {one.descriptors} descriptors; "
                f"{_more_held(first, one)}"
            )
        if threads > first.threads + MAX_MORE_THREADS:
            faults.append(
                f"{one.role}: {first.threads} to {one.threads} threads; {_more_held(first, one)}"
            )
        if one.shards > MAX_SHARDS:
            faults.append(f"{one.role}: {one.shards} shards are mapped, may be {MAX_SHARDS}")
    return faults


def _more_held(first: Sample, last: Sample) -> str:
    more = Counter(last.held) - Counter(first.held)
    return f"more: {', '.join(f'{count} {name}' for name, count in sorted(more.items()))}"


def write_csv(path: Path, samples: Iterable[Sample]) -> None:
    names = [one.name for one in fields(Sample) if one.name != "held"]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(map(asdict, samples))
