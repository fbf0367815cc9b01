"""Proves that every tap runs once in every forward: at start-up of every size, then in every step.

A model may choose by the size of a batch whether it calls a norm: vLLM's fused all-reduce takes the
norm's place in small ones (models/common/ops/fused_allreduce_rms_norm.py, 0.32:40). A decode would
then publish the scores of an earlier step, and not be steered. Or it may call a norm twice (that of
NanoChat normalises the embedding, too), and both would be steered.

So each site notes that its op ran. Until start-up is over, hooks of the model look at each forward
of profiling, warm-up and graph capture; afterwards the worker asks after each step. A replay of a
CUDA graph runs no Python and notes nothing: it runs what was looked at when it was captured. Runs
in: the worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from clairai.engine.score.fused_norm import FusedNormSite
from clairai.engine.score.score_tables import ScoreSite
from clairai.engine.steer.steer_tables import SteerSite
from clairai.errors import TapMissingError

_SITES: Final = (ScoreSite, FusedNormSite, SteerSite)


class TapProof:
    """Watches the sites of one engine."""

    def __init__(self, named: MutableMapping[str, Any], prefix: str, *, has_graphs: bool) -> None:
        """`named` are the engine's layers by name; our sites begin with `prefix`.

        `has_graphs`: pieces of a forward may be replays of graphs, in which no op of ours is seen.
        """
        self._has_graphs = has_graphs
        self._named = named
        self._sites = {
            name: site
            for name, site in named.items()
            if name.startswith(f"{prefix}.") and isinstance(site, _SITES)
        }
        self._ran: Counter[str] = Counter()  # in this forward, or since the last step
        self._faults: dict[int, list[str]] = {}  # by its number of tokens: taps that did not run
        self._repeated: dict[str, int] = {}  # taps that ran so often in one forward
        self._hooks: list[Any] = []

    def watch(self, model: nn.Module) -> None:
        """Look at every forward of `model` that runs in Python."""
        for name, site in self._sites.items():
            self._named[name] = WatchedSite(site, partial(self._note, name))
        if model._compiled_call_impl is None:  # else the compiler would trace the hooks
            self._hooks = [
                model.register_forward_pre_hook(self._before_forward),
                model.register_forward_hook(self._after_forward),
            ]

    def finish(self) -> None:
        """Start-up is over: TapMissingError if a forward was without a tap."""
        for hook in self._hooks:
            hook.remove()
        self._ran.clear()
        if self._repeated:
            name, count = next(iter(self._repeated.items()))
            raise TapMissingError(
                f"{len(self._repeated)} of {len(self._sites)} taps ran more than once in a forward "
                f"(first: {name}, {count} times), so what they read is not one point; the engine "
                "refuses to serve them. Leave these points out, and report it"
            )
        for num_tokens, missing in sorted(self._faults.items()):
            raise TapMissingError(
                f"{len(missing)} of {len(self._sites)} taps did not run in a forward of "
                f"{num_tokens} tokens (first: {', '.join(missing[:4])}), and did in others; the "
                "engine refuses to serve without them. Leave these points out, and report it"
            )

    def check_step(self, num_tokens: int) -> None:
        """After a step of so many tokens: TapMissingError if a tap did not run in it."""
        if not self._sites or (not self._ran and (self._has_graphs or not num_tokens)):
            return  # a stage of a pipeline may have no tap
        if len(self._ran) == len(self._sites) and len({*self._ran.values()}) == 1:
            self._ran.clear()
            return
        most = max(self._ran.values(), default=1)
        missing = [name for name in self._sites if self._ran[name] < most]
        raise TapMissingError(
            f"{len(missing)} of {len(self._sites)} taps did not run in a step of {num_tokens} "
            f"tokens (first: {', '.join(missing[:4])}), and did at start-up; the engine ends, "
            "because its scores would be those of an earlier step. Leave these points out, and "
            "report it"
        )

    def _note(self, name: str) -> None:
        self._ran[name] += 1

    def _before_forward(self, *_: Any) -> None:
        self._ran.clear()

    def _after_forward(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._has_graphs and not self._ran:
            return  # its pieces were replays of graphs that were looked at before
        if len(self._ran) < len(self._sites):
            missing = [name for name in self._sites if name not in self._ran]
            self._faults.setdefault(_count_tokens(output), missing)
        self._repeated |= {name: count for name, count in self._ran.items() if count > 1}


def _count_tokens(output: Any) -> int:
    """Rows of the first tensor that a model returned."""
    first = output[0] if isinstance(output, tuple | list) else output
    return len(first) if isinstance(first, torch.Tensor) else 0


class WatchedSite:
    """Does what a site does, and notes that it did."""

    def __init__(self, site: Any, note: Callable[[], None]) -> None:
        self.site, self._note = site, note

    def read(self, x: torch.Tensor) -> None:
        self._note()
        self.site.read(x)

    def apply(self, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        self._note()
        self.site.apply(x, residual)

    def norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        self._note()
        return self.site.norm(x, residual, weight)
