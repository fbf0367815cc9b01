"""An engine whose ranks Ray starts does not serve unless all have clairai and the ring is here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from clairai.compat.remote_ranks import (
    NAMES_VARIABLE,
    PREFIXES_VARIABLE,
    RUNTIME_VARIABLE,
    hand_on_environment,
    require_clairai,
    require_ring,
    wrap_initialize_kv_caches,
)
from clairai.errors import UnsupportedError
from clairai.local.private_socket import listen
from clairai.wire.control_messages import Description
from clairai.wire.ring_messages import Refusal

NO_TAPS = msgspec.msgpack.encode(Refusal("unsupported", "this worker has no taps"))


def config(*, use_ray: bool = True, asked: bool = True) -> Any:
    parallel = SimpleNamespace(use_ray=use_ray, tensor_parallel_size=2, pipeline_parallel_size=1)
    additional: dict[str, Any] = {"clairai": {}} if asked else {}
    return SimpleNamespace(parallel_config=parallel, additional_config=additional)


def executor(socket: Path) -> Any:
    described = Description(str(socket), 1, "m", 64, ("post_block.1",), 8, 0)
    replies = [msgspec.msgpack.encode(described), NO_TAPS]
    return SimpleNamespace(collective_rpc=lambda *_, **__: replies)


def test_a_ring_that_can_be_reached_from_the_engine_core_is_served(tmp_path: Path) -> None:
    with listen(tmp_path / "engine.sock"):
        require_ring(executor(tmp_path / "engine.sock"), config())


def test_a_ring_on_another_node_is_refused_with_the_way_out(tmp_path: Path) -> None:
    refused = r"rank 0, which has the ring, is on another node.*start vLLM on a node with a free"
    with pytest.raises(UnsupportedError, match=refused):
        require_ring(executor(tmp_path / "engine.sock"), config())
    listen(tmp_path / "engine.sock").close()  # a folder of the same name, and nobody listens
    with pytest.raises(UnsupportedError, match=refused):
        require_ring(executor(tmp_path / "engine.sock"), config())


def test_a_rank_without_clairai_is_refused_with_the_way_out() -> None:
    def collective_rpc(*_: Any, **__: Any) -> Any:
        raise AttributeError("'CPUWorker' object has no attribute 'clairai_control'")

    with pytest.raises(UnsupportedError, match=r"no attribute.*install the same clairai on every"):
        require_clairai(SimpleNamespace(collective_rpc=collective_rpc))


@pytest.mark.parametrize("other", [config(use_ray=False), config(asked=False)])
def test_other_engines_are_not_asked(other: Any) -> None:
    initialize = wrap_initialize_kv_caches(lambda core, config: (core, config))
    core = SimpleNamespace(model_executor=None)
    assert initialize(core, other) == (core, other)


def test_ranks_get_what_clairai_reads_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RUNTIME_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    environ = {PREFIXES_VARIABLE: "MY_, OUR_", "PROBE_MODEL": "p"}
    hand_on_environment(environ)
    hand_on_environment(environ)
    assert environ == {
        RUNTIME_VARIABLE: str(tmp_path / "clairai"),
        PREFIXES_VARIABLE: "MY_,OUR_,CLAIRAI_",
        NAMES_VARIABLE: "PROBE_MODEL,TARGET_LAYER",
        "PROBE_MODEL": "p",
    }
