"""What tests of new weights ask of an engine with several ranks, in the LLM's own process."""

from __future__ import annotations

import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

NUM_NEW: Final = 12
PROMPTS: Final = (tuple(range(10, 40)), tuple(range(100, 108)))


def is_query(name: str) -> bool:
    return name.endswith("q_proj.weight")


def is_attention(name: str) -> bool:
    return ".self_attn." in name


def is_no_attention(name: str) -> bool:
    return ".self_attn." not in name


def greedy(folder: Path) -> list[tuple[int, ...]]:
    """What Hugging Face's model answers to all prompts."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NUM_NEW):
            with torch.no_grad():
                logits_V = model(torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(logits_V.argmax()))
        found.append(tuple(tokens[len(prompt) :]))
    return found


def answers(llm: Any, adapter: str | None = None) -> list[tuple[int, ...]]:
    """Greedy tokens of all prompts."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    asked = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
    given = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, detokenize=False)
    lora = None if adapter is None else LoRARequest("adapter", 1, adapter)
    outputs = llm.generate(asked, given, use_tqdm=False, lora_request=lora)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def send(llm: Any, what: Any, label: str = "") -> Any:
    """Send a folder, or tensors by name, from the process that has the LLM."""
    from clairai.weights import Sender

    return Sender(llm).send(what, label=label)


def state(llm: Any) -> Any:
    from clairai.library.engine_control import ask_engine
    from clairai.wire.weights_messages import DescribeWeights, WeightsState

    return ask_engine(llm, DescribeWeights(), WeightsState)


def answers_anew(llm: Any) -> list[tuple[int, ...]]:
    """After vLLM's own calls, which leave the prefix cache to their caller."""
    llm.reset_prefix_cache()
    return answers(llm)


def send_briefly(llm: Any, folder: Path) -> Any:
    """Each tensor is in the memory of the one before; several buffers."""
    from clairai.weights import Sender

    held = pick(folder, bool)
    return Sender(llm, buffer_bytes=1 << 18).send(_reuse_memory(held))


def _reuse_memory(held: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    import torch

    memory_N = torch.empty(max(tensor.numel() for tensor in held.values()))
    for name, tensor in held.items():
        gathered = memory_N[: tensor.numel()].view(tensor.shape)
        gathered.copy_(tensor)
        yield name, gathered
    memory_N.fill_(float("nan"))


def send_part(llm: Any, folder: Path, chosen: Callable[[str], bool]) -> Any:
    return send(llm, pick(folder, chosen))


def send_with_probe(llm: Any, folder: Path, probe: dict[str, Any]) -> Any:
    return send(llm, pick(folder, bool) | probe)


def send_bank(llm: Any, directions: dict[str, Any]) -> Any:
    """All probes as one tensor; those that are not given get the direction they have."""
    import numpy as np

    from clairai import ProbeBank
    from clairai.weights import bank

    names = [info.name for info in ProbeBank(llm).list()]
    assert names == list(directions)
    return send(llm, bank(names, np.stack(list(directions.values()))))


def score(llm: Any, prompts: Any = PROMPTS) -> list[tuple[list[int], list[str], Any, Any]]:
    """Tokens that were forwarded, names of the probes, scores of every token, weight versions."""
    from vllm import SamplingParams

    import clairai

    params = SamplingParams(
        max_tokens=NUM_NEW,
        ignore_eos=True,
        temperature=0.0,
        detokenize=False,
        extra_args=clairai.request(prompt_scores=True),
    )
    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(given, params, use_tqdm=False)
    found = []
    for output, (scores,) in zip(outputs, clairai.scores(llm, outputs), strict=True):
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        found.append((tokens, list(scores.names), scores.scores_NP[: len(tokens)], scores.weights))
    return found


def without_attention(folder: Path, target: Path) -> Path:
    """The same model, in which no token hears of another."""
    import shutil

    from safetensors.numpy import load_file, save_file

    shutil.copytree(folder, target)
    held = load_file(folder / "model.safetensors")
    kept = {name: held[name] * (not name.endswith("o_proj.weight")) for name in held}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    return target


def train_while_answering(llm: Any, folder: Path, names: list[str]) -> dict[int, tuple[Any, Any]]:
    """One round of vLLM's trainer while requests run; tokens and scores of all rows, by version."""
    import numpy as np

    from clairai.library.engine_control import ask_engine
    from clairai.ring.attach import RingReader
    from clairai.wire import control_messages, ring_messages

    described = ask_engine(llm, control_messages.Describe(), control_messages.Description)
    rows: dict[int, list[Any]] = {}
    with RingReader.attach(Path(described.socket), start="newest") as reader:

        def read() -> None:
            for record in reader.poll():
                bank = reader.bank(record.bank_version)
                columns = [[probe.name for probe in bank.probes].index(name) for name in names]
                forwarded = record.rows["phase"] <= ring_messages.DECODE
                tokens_R = record.rows["token_id"][forwarded]
                found = (tokens_R, record.scores_RC[forwarded][:, columns])
                assert bank.weights is not None
                rows.setdefault(bank.weights, []).append(found)

        def has_both() -> bool:
            """Whether there are many rows of the new weights, too."""
            return len(rows) > 1 and sum(len(tokens_R) for tokens_R, _ in rows[max(rows)]) > 200

        _begin(llm)
        _step(llm, 8)
        train_by_ray(llm, folder)
        while llm.llm_engine.has_unfinished_requests() and not has_both():
            _step(llm, 1)
            read()
        _end(llm)
        ask_engine(llm, control_messages.Describe(), control_messages.Description)  # all published
        read()
        assert reader.statistics().lost == 0
    found: dict[int, tuple[Any, Any]] = {}
    for version, parts in rows.items():
        tokens, scores = zip(*parts, strict=True)
        found[version] = np.concatenate(tokens), np.concatenate(scores)
    return found


def refuse_while_answering(llm: Any, folder: Path) -> tuple[str, str]:
    """A Sender changes nothing under a request that has begun."""
    _begin(llm)
    _step(llm, 2)
    refused = refuse(llm, str(folder))
    _end(llm)
    return refused


def _begin(llm: Any) -> None:
    """Add requests whose answers take ten thousand steps; the engine does not wait for `step`."""
    import numpy as np
    from vllm import SamplingParams

    rng = np.random.default_rng(6)
    params = SamplingParams(max_tokens=96, ignore_eos=True, temperature=1.0, detokenize=False)
    for number in range(400):
        prompt = {"prompt_token_ids": rng.integers(5, 512, 24).tolist()}
        llm.llm_engine.add_request(f"long-{number}", prompt, params)


def _end(llm: Any) -> None:
    """Abort what is left, and answer once: a step then tells the ranks."""
    from tests.engine.asks import drop_unfinished

    drop_unfinished(llm)
    answers(llm)


def _step(llm: Any, count: int) -> None:
    for _ in range(count):
        llm.llm_engine.step()


def add_probe(llm: Any, name: str, width: int) -> None:
    import numpy as np

    from clairai import Probe, ProbeBank
    from clairai.points import Point

    direction_D = np.ones(width, np.float32)
    ProbeBank(llm).add(Probe(name, Point.parse("post_block.1"), direction_D))


def refuse_part(llm: Any, folder: Path, chosen: Callable[[str], bool]) -> tuple[str, str]:
    return refuse(llm, pick(folder, chosen))


def refuse(llm: Any, what: Any) -> tuple[str, str]:
    """The kind and the text of the error with which it is refused."""
    from clairai.errors import ClairaiError

    try:
        send(llm, what)
    except ClairaiError as error:
        return type(error).__name__, str(error)
    raise AssertionError("it was accepted")


def cannot_answer(llm: Any) -> bool:
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        answers(llm)
    except EngineDeadError:
        return True
    return False


def pick(folder: Path, chosen: Callable[[str], bool]) -> dict[str, Any]:
    from safetensors.torch import load_file

    held = load_file(folder / "model.safetensors")
    return {name: tensor for name, tensor in held.items() if chosen(name)}


def plant(llm: Any, rank: int, where: str) -> None:
    """Let one rank fail, once: `prepare` refuses, `load` raises, `kill` ends its process."""
    llm.collective_rpc(_plant, args=(rank, where))


def _plant(worker: Any, rank: int, where: str) -> None:
    if worker.rank != rank:
        return
    updater = worker.weight_transfer_engine.updater
    name = {"prepare": "prepare", "load": "_load", "kill": "apply"}[where]
    original = getattr(updater, name)

    def fail(*args: Any) -> Any:
        setattr(updater, name, original)
        if where == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if where == "prepare":
            from clairai.errors import WeightsRoomError

            raise WeightsRoomError("planted")
        if where == "load":
            original(args[0][:3])
            raise RuntimeError("planted")

    setattr(updater, name, fail)


class _Module:
    """A trainer's module, as vLLM's ModuleSource reads it."""

    def __init__(self, folder: Path) -> None:
        self._held = pick(folder, bool)

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        yield from self._held.items()


def train(client: Any, folder: Path, runtime: str | None, *, rank: int = 0) -> None:
    """One round of vLLM's own trainer, with the backend's name."""
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from clairai.weights import TrainerInitInfo

    trainer = WeightTransferTrainerFactory.trainer_init(
        TrainerInitInfo(rank=rank, runtime_dir=runtime),
        client=client,
        source=ModuleSource(_Module(folder)),
    )
    trainer.send_weights()


def train_over_http(_: Any, url: str, folder: Path, runtime: str) -> None:
    """By vLLM's own client for its routes."""
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    train(HTTPVLLMWeightSyncClient(url), folder, runtime)


def train_with_arguments(
    _: Any, folder: Path, arguments: dict[str, Any], chosen: Callable[[str], bool] = bool
) -> None:
    """The call of older trainers, as their framework finds it: by the backend's name."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from clairai.compat.install import register_backend

    register_backend()
    backend = WeightTransferEngineFactory._registry["clairai_ipc"]()
    backend.trainer_send_weights(iter(pick(folder, chosen).items()), arguments)


def train_by_ray(llm: Any, folder: Path) -> None:
    """By vLLM's own client for Ray; the actor is in this process."""
    from vllm.distributed.weight_transfer.clients import RayVLLMWeightSyncClient

    _stand_in_for_ray()
    train(RayVLLMWeightSyncClient(_Actor(llm)), folder, None)


def train_by_ray_with_arguments(llm: Any, folder: Path) -> None:
    _stand_in_for_ray()
    llm.start_weight_update()
    train_with_arguments(llm, folder, {"mode": "ray", "llm_handle": _Actor(llm)})
    llm.finish_weight_update()


def train_on_another_rank(llm: Any, folder: Path) -> None:
    """A trainer's second rank gathers, and sends nothing."""
    train(None, folder, None, rank=1)
    del llm


def _stand_in_for_ray() -> None:
    """Calls a method at once, where Ray would send the call to the actor's process."""
    sys.modules["ray"] = types.ModuleType("ray")
    sys.modules["ray"].get = lambda result, **_: result  # type: ignore[attr-defined]


class _Actor:
    """An LLM with the calls of a Ray actor."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return types.SimpleNamespace(remote=getattr(self._llm, name))
