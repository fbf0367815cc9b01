"""Every command of ours in docs/coming-from.md runs as written, and does what the page says.

Folders with the names that the page uses hold a tiny random model. What is changed: ports, vLLM's
eager mode and its type, so that a test of a page does not take minutes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest

import clairai
from clairai.points import Point
from clairai.vector.gguf_format import dumps as dump_gguf
from tests.engine import models
from tests.engine.process import ENVIRONMENT, ChildProcess, choose_context
from tests.engine.server import CPU, free_port
from tests.fidelity.oracle import hidden_states, relative_error
from tests.support.ring_engine import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = (ROOT / "docs" / "coming-from.md").read_text()
WIDTH: Final = 64
NUM_LAYERS: Final = 28
LLAMA: Final = "meta-llama/Meta-Llama-3.1-8B-Instruct"
FOLDERS: Final = (LLAMA, "Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-7B-Instruct")
READY_S: Final = 600.0
END_S: Final = 300.0

_BLOCK: Final = re.compile(r"^## ([^\n]+)$|^```(python|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _blocks(page: str) -> dict[str, list[str]]:
    """Our blocks, by section; those before the first section are under no name."""
    found: dict[str, list[str]] = {"": []}
    section = ""
    for title, _, body in _BLOCK.findall(page):
        if title:
            section = title
        else:
            found.setdefault(section, []).append(body)
    return found


BLOCKS: Final = _blocks(PAGE)
# What the tests below run, in the page's order.
RUN: Final = {
    "": 1,
    "The first clairai: probes, sidecar, proxy": 4,
    "Activation capture by `VLLM_ACT_CAPTURE`": 1,
    "vLLM's IPC weight transfer": 1,
    "RhizoNymph's fork: steering and capture": 2,
    "vllm-lens": 2,
    "nnsight": 2,
    "EasySteer": 1,
    "repeng": 1,
}


def test_every_block_of_the_page_has_a_test() -> None:
    assert {section: len(blocks) for section, blocks in BLOCKS.items()} == RUN


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a reader of the page works in."""
    folder = tmp_path_factory.mktemp("reader")
    model = models.tiny(
        "llama",
        folder / LLAMA,
        num_hidden_layers=NUM_LAYERS,
        vocab_size=49152,
        max_position_embeddings=2048,
    )
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models.real() / file, model)
    for name in FOLDERS[1:]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(model)
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((NUM_LAYERS, WIDTH)).astype(np.float32)
    np.save(folder / "direction.npy", rows[0])
    probes = folder / "src" / "probes" / "Llama-3.1-8B-Instruct"
    probes.mkdir(parents=True)
    for name, row in (("calm", rows[1]), ("french", rows[2])):
        (probes / f"enc_19_{name}.json").write_text(json.dumps({"vector": row.tolist()}))
    (folder / "vectors").mkdir()
    points = {Point("post_block", layer): rows[layer] for layer in range(1, NUM_LAYERS)}
    for path in (folder / "vectors" / "happy_diffmean.gguf", folder / "trippy.gguf"):
        path.write_bytes(dump_gguf(clairai.Vector(path.stem, points)))
    return folder


@contextmanager
def _python(workspace: Path, runtime: Path) -> Iterator[dict[str, Any]]:
    """The names that the page's Python blocks share."""
    os.environ.update(ENVIRONMENT | {"CLAIRAI_RUNTIME_DIR": str(runtime)})
    os.chdir(workspace)
    import vllm

    vllm.LLM = _make_small_class(vllm.LLM)
    names: dict[str, Any] = {}
    yield names
    names["llm"].llm_engine.engine_core.shutdown()


def _make_small_class(original: type[Any]) -> type[Any]:
    class Small(original):  # type: ignore[misc]  # known when the test runs
        def __init__(self, model: str, **arguments: Any) -> None:
            small = {"enforce_eager": True, "dtype": "float32", "max_model_len": 128}
            super().__init__(model, max_num_seqs=4, **small, **arguments)

        def generate(self, *given: Any, **named: Any) -> Any:  # 0.32 needs a bar, or none asked for
            return super().generate(*given, **{"use_tqdm": False, **named})

    return Small


def _run(names: dict[str, Any], block: str, *wanted: str) -> list[Any]:
    exec(compile(block, "docs/coming-from.md", "exec"), names)  # noqa: S102  # our own page
    return [names[name] for name in wanted]


def _texts(names: dict[str, Any], block: str, wanted: str, prompts: list[str]) -> Any:
    """The token ids that a block made, and those of the same prompts without steering."""
    from vllm import SamplingParams

    (outputs,) = _run(names, block, wanted)
    length = len(outputs[0].outputs[0].token_ids)
    params = SamplingParams(max_tokens=length, temperature=0.0)
    plain = names["llm"].generate(prompts, params, use_tqdm=False)
    return [[list(one.outputs[0].token_ids) for one in many] for many in (outputs, plain)]


def _prompt(names: dict[str, Any], text: str) -> list[int]:
    ids: list[int] = names["llm"].get_tokenizer().encode(text)
    return ids


@pytest.fixture(scope="module")
def shared(workspace: Path, runtime: Path) -> Iterator[ChildProcess]:
    """One engine for all Python blocks but the one that asks by the environment."""
    prepare = partial(_python, workspace, runtime)
    with ChildProcess(choose_context({}), prepare) as process:
        process.call(_run, BLOCKS[""][0])
        yield process


def _captured(names: dict[str, Any], block: str, text: str, value: str) -> Any:
    """What a block read, with the tokens that were forwarded."""
    rows, capture = _run(names, block, value, "capture")
    return np.asarray(rows), capture.positions.tolist(), _prompt(names, text)


def test_new_weights_are_sent(shared: ChildProcess) -> None:
    sent = shared.call(_sent, BLOCKS["vLLM's IPC weight transfer"][0])
    assert sent == (1, "host")


def _sent(names: dict[str, Any], block: str) -> tuple[int, str]:
    (sent,) = _run(names, block, "sent")
    return sent.version, sent.home


def test_the_forks_fields_steer_and_capture(shared: ChildProcess, workspace: Path) -> None:
    steer, capture = BLOCKS["RhizoNymph's fork: steering and capture"]
    steered, plain = shared.call(_texts, steer, "steered", ["Hello"])
    assert steered != plain
    text = "Why is the sky blue?"
    row_D, positions, prompt = shared.call(_captured, capture, text, "last_prompt")
    assert positions == [len(prompt) - 1]
    truth_TD = hidden_states(str(workspace / LLAMA), prompt)["post_block.12"]
    assert relative_error(row_D[None], truth_TD[-1:]).max() <= 1e-4


def test_vllm_lens_users_read_and_steer(shared: ChildProcess, workspace: Path) -> None:
    capture, steer = BLOCKS["vllm-lens"]
    rows_LTD, positions, prompt = shared.call(_captured, capture, "Hello world", "activations")
    assert positions == [*range(len(prompt))]
    truth = hidden_states(str(workspace / LLAMA), prompt)
    for rows_TD, point in zip(rows_LTD, ("post_block.15", "post_block.20"), strict=True):
        assert relative_error(rows_TD, truth[point]).max() <= 1e-4
    steered, plain = shared.call(_texts, steer, "steered_at_one", ["Hello world"])
    assert steered != plain


def test_nnsight_users_read_and_probe(shared: ChildProcess, workspace: Path) -> None:
    capture, probe = BLOCKS["nnsight"]
    text = "The Eiffel Tower is in"
    rows_TD, positions, prompt = shared.call(_captured, capture, text, "hidden")
    assert positions == [*range(len(prompt) + 2)]  # the third new token is never forwarded
    truth_TD = hidden_states(str(workspace / LLAMA), prompt)["post_block.8"]
    assert relative_error(rows_TD[: len(prompt)], truth_TD).max() <= 1e-4
    (first_T, second_T), (one, two) = shared.call(_probed, probe)
    for scores_T, prompt in ((first_T, one), (second_T, two)):
        stream_TD = hidden_states(str(workspace / LLAMA), prompt)["post_block.16"]
        expected_T = stream_TD @ np.load(workspace / "direction.npy")
        size = np.abs(expected_T).max()
        found_T = scores_T[: len(prompt)]
        is_scored = ~np.isnan(found_T)  # the first prompt's blocks may be in the prefix cache
        assert is_scored[-1]
        assert np.abs(found_T - expected_T)[is_scored].max() <= 1e-4 * size


def _probed(names: dict[str, Any], block: str) -> Any:
    outputs, readouts = _run(names, block, "outputs", "readouts")
    return readouts, [list(output.prompt_token_ids) for output in outputs]


def test_easysteer_users_steer_with_their_vector(shared: ChildProcess) -> None:
    text = "Alice's dog has passed away. Please comfort her."
    happy, plain = shared.call(_texts, BLOCKS["EasySteer"][0], "happy", [text])
    assert happy != plain


def test_repeng_users_choose_a_strength_for_each_prompt(shared: ChildProcess) -> None:
    text = "Give me a one-sentence pitch for a TV show."
    pitches, plain = shared.call(_texts, BLOCKS["repeng"][0], "pitches", [text])
    answers = [tuple(pitch) for pitch in (*pitches, *plain)]
    assert len(set(answers)) == 4


def test_the_variables_of_activation_capture_are_enough(workspace: Path, runtime: Path) -> None:
    (block,) = BLOCKS["Activation capture by `VLLM_ACT_CAPTURE`"]
    with ChildProcess(choose_context({}), partial(_python, workspace, runtime)) as process:
        state, lost, layers = process.call(_act, block)
    assert (state, lost) == ("kept", 0)
    assert layers == {f"post_block.{layer}" for layer in range(NUM_LAYERS)}


def _act(names: dict[str, Any], block: str) -> tuple[str, int, set[str]]:
    (capture,) = _run(names, block, "capture")
    files = Path("acts").glob(f"*-{capture.id}-*.npz")
    return capture.state, capture.lost, {file.stem.split("-")[-1] for file in files}


class Terminal:
    """A shell in the reader's folder, and what it has printed."""

    def __init__(self, script: str, *, workspace: Path, runtime: Path, log: Path) -> None:
        self.log = log
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        variables = os.environ | CPU | {"CLAIRAI_RUNTIME_DIR": str(runtime), "PATH": path}
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                ["bash", "-ec", script],
                cwd=workspace,
                env=variables,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> int:
        return self._process.wait(timeout=END_S)

    def close(self) -> None:
        if self.is_running():
            os.killpg(self._process.pid, signal.SIGINT)
        try:
            self._process.wait(timeout=END_S)
        finally:
            if self.is_running():
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


def test_the_three_terminals_of_the_first_clairai(workspace: Path, tmp_path: Path) -> None:
    serve, sidecar, proxy, ask = BLOCKS["The first clairai: probes, sidecar, proxy"]
    ports = {"8000": str(free_port()), "6969": str(free_port())}
    serve = f"{serve.rstrip()} --port 8000 --enforce-eager --dtype float32"
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    opened: list[Terminal] = []

    def start(script: str) -> Terminal:
        for port, free in ports.items():
            script = script.replace(port, free)
        log = tmp_path / f"terminal-{len(opened)}"
        opened.append(Terminal(script, workspace=workspace, runtime=runtime, log=log))
        return opened[-1]

    try:
        rows, engine = start(sidecar), start(serve)
        until(lambda: _answers(f"http://127.0.0.1:{ports['8000']}/health", engine), READY_S)
        (line,) = [line for line in engine.said().splitlines() if "clairai taps" in line]
        assert "at post_block.19: 2 probes" in line
        assert f"readers attach in {runtime}" in line
        door = start(proxy)
        until(lambda: _answers(f"http://127.0.0.1:{ports['6969']}/health/ready", door), READY_S)
        client = start(ask)
        assert client.wait() == 0
        chunks = [json.loads(line[6:]) for line in client.said().splitlines() if "{" in line]
        scored = [
            choice["probe_scores"]
            for chunk in chunks
            for choice in chunk["choices"]
            if "probe_scores" in choice
        ]
        assert {name for part in scored for name in part["names"]} == {"calm", "french"}
        assert sum(len(part["scores"]) for part in scored) == 8
        assert not any("lost" in part for part in scored)
        until(lambda: '"scores"' in rows.said(), END_S)
    finally:
        for terminal in reversed(opened):
            terminal.close()


def _answers(url: str, terminal: Terminal) -> bool:
    assert terminal.is_running(), terminal.said()[-4000:]
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False
