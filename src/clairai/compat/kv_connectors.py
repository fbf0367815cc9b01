"""Keeps a KV connector from giving requests the KV cache of tokens that were steered otherwise.

ExampleConnector             distributed/kv_transfer/kv_connector/v1/example_connector.py  0.26:84
                                                                                           0.32:83
OffloadingConnector          the same folder, offloading_connector.py                      0.32:53
Scheduler.connector          v1/core/sched/scheduler.py                         0.26:138   0.32:176
get_num_new_matched_tokens   v1/core/sched/scheduler.py, for each new request   0.26:767   0.32:979

The example connector names what it stores after the prompt's tokens and the identifiers of its
media. A steered request gets one more identifier: what acts on the tokens that are stored, by
content. So engines that share its folder share steered KV, too, and only with requests that are
steered the same. The offloading connector is keyed by vLLM's block hashes, which have the plan in
them. Other connectors are refused with steering and captures (check_engine.py).
Runs in: the engine core.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, Final

from clairai.compat.extra_args import read_cache_keys, read_capture_plan
from clairai.errors import UnsupportedError

# Their keys have the identifiers of media, to which a plan is added.
_KEYED_BY_MEDIA: Final = ("ExampleConnector",)
# Keys of these carry the steering plan; tried since which vLLM.
KEYED_CONNECTORS: Final = {"ExampleConnector": (0, 26), "OffloadingConnector": (0, 32)}
CAPTURED_CONNECTORS: Final = ("ExampleConnector",)  # captures were tried with these
_IDENTIFIER: Final = "clairai-steering-"


def find_other_connector(vllm_config: Any, served: Sequence[str]) -> str | None:
    """The engine's KV connector if it is none of these of vLLM's own; None if it has none.

    config/kv_transfer.py, 0.26:26 and 62, 0.32:60 and 81
    """
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    if transfer is None:
        return None
    name = getattr(transfer, "kv_connector", None)
    is_vllms_own = getattr(transfer, "kv_connector_module_path", None) is None
    return None if is_vllms_own and name in served else str(name)


def connect(scheduler: Any) -> None:
    """Wrap the scheduler's connector, if it has one, before it sees the first request."""
    connector = getattr(scheduler, "connector", None)
    if connector is None:
        return
    if type(connector).__name__ in _KEYED_BY_MEDIA:
        _add_plans_to_keys(connector)
    connector.get_num_new_matched_tokens = _wrap_matched(connector.get_num_new_matched_tokens)


def _wrap_matched(original: Any) -> Any:
    """Tokens that the connector brings are not forwarded: none may cover a row that is wanted."""

    @functools.wraps(original)
    def get_num_new_matched_tokens(request: Any, num_computed: int, *more: Any) -> Any:
        found = original(request, num_computed, *more)
        return found if not found[0] or _can_skip(request, num_computed + found[0]) else (0, False)

    return get_num_new_matched_tokens


def _can_skip(request: Any, num_tokens: int) -> bool:
    """True if nobody asked for rows of the request's first `num_tokens` tokens."""
    if getattr(request, "skip_reading_prefix_cache", False):  # 0.31 and later look too
        return False
    plan = read_capture_plan(request.sampling_params)
    return plan is None or num_tokens <= plan.first_position


class _PlanFeature:
    """Stands among a prompt's media; the connector reads its identifier and nothing else."""

    def __init__(self, key: str) -> None:
        self.identifier = _IDENTIFIER + key


class _KeyedRequest:
    """A request with a plan's identifier among its media; everything else is the request's own."""

    def __init__(self, request: Any, mm_features: list[Any]) -> None:
        self._request = request
        self.mm_features = mm_features

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def _add_plans_to_keys(connector: Any) -> None:
    _check_names(connector)
    block_size = connector._block_size
    for name in ("get_num_new_matched_tokens", "update_state_after_alloc"):
        setattr(connector, name, _with_keyed_request(getattr(connector, name), block_size))
    connector.build_connector_meta = _with_keyed_output(connector.build_connector_meta, block_size)


def _check_names(connector: Any) -> None:
    """Refuse an example connector whose names do not depend on the identifiers of media."""
    import torch

    tokens = torch.zeros(1, dtype=torch.int64)
    names = {connector._generate_foldername_debug(tokens, found) for found in ([], ["a"], ["b"])}
    if len(names) != 3:
        raise UnsupportedError(
            "this vLLM's example KV connector does not name what it stores after a prompt's media, "
            "so its keys cannot carry a steering plan; remove kv_transfer_config"
        )


def _with_keyed_request(original: Any, block_size: int) -> Any:
    @functools.wraps(original)
    def wrapped(request: Any, *more: Any) -> Any:
        features = _list_features(request, block_size)
        return original(_KeyedRequest(request, features), *more)

    return wrapped


def _with_keyed_output(original: Any, block_size: int) -> Any:
    """build_connector_meta(scheduler_output) gets a copy: the workers get what it was."""

    @functools.wraps(original)
    def build_connector_meta(scheduler_output: Any) -> Any:
        shown = copy.copy(scheduler_output)
        shown.scheduled_new_reqs = [
            _KeyedRequest(new, _list_features(new, block_size))
            for new in scheduler_output.scheduled_new_reqs
        ]
        return original(shown)

    return build_connector_meta


def _list_features(request: Any, block_size: int) -> list[Any]:
    """Its media, and what acts on its stored tokens: whole blocks, and never the last token."""
    keys = read_cache_keys(request.sampling_params)
    stored = (len(request.prompt_token_ids or ()) - 1) // block_size * block_size
    key = None if keys is None else keys.key(stored)
    return list(request.mm_features) + ([] if key is None else [_PlanFeature(key)])
