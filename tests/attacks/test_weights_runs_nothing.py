"""A transfer in a process of its own runs no code that came with it.

The interpreter itself reports every unpickled name, every compiled text and every code object that
is run or unmarshalled (PEP 578). A first transfer does the imports; the second one is watched.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.shape.source import ROOT, package
from tests.shape.test_no_pickle import dangers

WATCHED = """
import sys, tempfile, pathlib
import torch
from clairai.errors import WeightsError
from clairai.weights import Sender
from clairai.weights.manifest import parse_manifest
from tests.support.weights import engine, weights, plan
from tests.attacks.test_weights_manifests import MANIFESTS

BANNED = {"pickle.find_class", "exec", "compile", "marshal.loads", "marshal.load", "code.__new__"}
seen, is_watching = [], False

def hook(event, _):
    if is_watching and event in BANNED:
        seen.append(event)

sys.addaudithook(hook)
torch.load = torch.jit.load = None
planted = sys.argv[1]

def transfer(folder, llm):
    Sender(llm, runtime_dir=str(folder)).send(weights(1))
    for make, _ in MANIFESTS.values():
        try:
            llm.updater.receiver.check(make(plan(epoch=llm.epoch)))
        except WeightsError:
            pass

with tempfile.TemporaryDirectory() as name, engine(pathlib.Path(name)) as llm:
    transfer(pathlib.Path(name), llm)
    import pickle, marshal
    dumped, code = pickle.dumps(weights), marshal.dumps(1)
    is_watching = True
    transfer(pathlib.Path(name), llm)
    if planted == "all":
        pickle.loads(dumped)
        marshal.loads(code)
        eval("1 + 1")
    is_watching = False
    assert llm.updater.served.version == 2
print(sorted(set(seen)))
"""


BESIDE = (
    "cli.weights_commands",
    "compat.weight_transfer",
    "server.weights_routes",
    "server.weights_upload",
    "wire.weights_messages",
)


def _watched(planted: str) -> str:
    found = subprocess.run(
        [sys.executable, "-c", WATCHED, planted],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_a_transfer_runs_no_code_that_came_with_it() -> None:
    assert _watched("nothing") == "[]"


def test_the_watcher_sees_what_it_watches_for() -> None:
    found = _watched("all")
    assert all(event in found for event in ("pickle.find_class", "marshal.loads", "exec"))


def test_no_module_of_a_transfer_can_run_bytes() -> None:
    ours = [
        module
        for module in package()
        if module.name.split(".")[0] == "weights" or module.name in BESIDE
    ]
    assert len(ours) > 15
    assert {module.name: dangers(module) for module in ours if dangers(module)} == {}


def test_the_package_says_no_word_of_torch_pickles() -> None:
    """Also not by a road that the rule above does not know."""
    folder = ROOT / "src" / "clairai" / "weights"
    words = ("pickle", "reduce_tensor", "rebuild_cuda", "ForkingPickler", "_load_global")
    found = {
        path.name: word
        for path in Path(folder).glob("*.py")
        for word in words
        if word in path.read_text()
    }
    assert found == {}
