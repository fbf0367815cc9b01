"""The official SDKs, unmodified, with and without our fields: Python 2.x and 3.x, and Node."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.http.answers import expected
from tests.http.fake import answering
from tests.http.world import World

ROOT = Path(__file__).parents[2]
HELLO, BYE = [72, 101, 108, 108, 111], [66, 121, 101]
REASON = "clairai: probe token >= 100 for 1 token"
NODE_MODULES = ROOT / "web" / "node_modules"


def run(w: World, command: list[str], **variables: str) -> dict[str, Any]:
    w.upstream.script = answering(HELLO, BYE, finish="stop", stop_reason=REASON)
    done = subprocess.run(
        [*command, w.url],
        env=os.environ | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def rows(ids: list[int]) -> list[list[float | None]]:
    return [list(row.values()) for row in expected(ids)]


def check(found: dict[str, Any]) -> None:
    assert found["models"] == ["toy"]
    assert found["whole"] == found["scored"] == "Hello"
    assert found["scored_extra"][:2] == ["probe_scores", "prompt_scores"]
    assert found["stream"] == {"texts": {"0": "Hello", "1": "Bye"}, "scores": {}}
    for name in ("stream_scored", "completion"):
        assert found[name]["texts"] == {"0": "Hello", "1": "Bye"}
        assert found[name]["scores"] == {"0": rows(HELLO), "1": rows(BYE)}
    assert found["error"] == [400, "request", "clairai"]


def check_python(found: dict[str, Any]) -> None:
    check(found)
    assert not {"probe_scores", "prompt_scores"} & set(found["whole_extra"])
    assert found["asynchronous"] == found["stream_scored"]
    assert found["assembled"] == "Hello"
    assert found["usage"] == len(HELLO) + len(BYE)
    (entry,) = found["steered"]["steering"]
    assert (entry["vector"], entry["scale"], entry["when"]) == ("calm", 2.0, "generation")
    assert found["steered"]["stop"][0]["probe"] == "token"
    assert found["stop_reason"] == REASON
    assert found["stream_steered"][0] == found["steered"]
    assert set(map(type, found["stream_steered"][1:])) == {type(None)}


@pytest.fixture(scope="session")
def older_sdk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """openai 2.x in a folder of its own, on top of what the newer one depends on."""
    folder = tmp_path_factory.mktemp("openai2")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    done = subprocess.run(
        [*pip, "openai>=2.25,<3", "distro"], capture_output=True, text=True, timeout=50, check=False
    )
    if done.returncode != 0:
        pytest.skip("pip has no openai 2.x for us")
    return folder


def test_the_python_sdk_that_is_installed_works_unmodified(w: World) -> None:
    found = run(w, [sys.executable, "-m", "tests.http.sdk_calls"])
    assert found["version"] == openai.__version__
    check_python(found)


@pytest.mark.skipif(openai.__version__.startswith("2."), reason="openai 2.x is the installed one")
def test_the_python_sdk_of_the_version_before_works_unmodified(w: World, older_sdk: Path) -> None:
    found = run(w, [sys.executable, "-m", "tests.http.sdk_calls"], PYTHONPATH=str(older_sdk))
    assert found["version"].startswith("2.")
    check_python(found)


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node here")
@pytest.mark.skipif(
    not (NODE_MODULES / "openai").is_dir(),
    reason="web/node_modules has no openai; `npm ci` in web/ brings it",
)
def test_the_node_sdk_works_unmodified(w: World, tmp_path: Path) -> None:
    # Node looks for packages beside the script, not where it is started.
    script = tmp_path / "node_sdk.mjs"
    shutil.copy(Path(__file__).parent / "node_sdk.mjs", script)
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    node = shutil.which("node")
    assert node is not None
    check(run(w, [node, str(script)]))
