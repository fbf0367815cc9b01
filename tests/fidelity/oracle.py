"""Hugging Face's residual stream at every point, and its logits, by hooks on its modules.

Which modules is learnt from what they are given and give, and not from their names: a decoder layer
is given the stream and gives it back, and between its halves the stream is the first tensor that no
module has made, because it is a sum; where that cannot be learnt, MIDDLES names the module. Of the
streams that travel side by side in Gemma 3n the active one counts. Nothing here knows how clairai
finds its points.

T = tokens, D = model width, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
EVERYWHERE: Final = slice(None)
# By the class of a layer, in Hugging Face or in vLLM: the module that is given its middle.
MIDDLES: Final = {
    "DbrxBlock": "norm_attn_norm.norm_2",
    "Gemma3nTextDecoderLayer": "pre_feedforward_layernorm",
    "Gemma3nDecoderLayer": "pre_feedforward_layernorm",
}


def hidden_states(
    folder: str, token_ids: list[int], dtype: str = "float32"
) -> dict[str, NDArray[np.float32]]:
    """Every point of every layer from one forward over the whole sequence."""
    return HuggingFace(folder, dtype).streams(token_ids)


class HuggingFace:
    """A model of a folder, as Hugging Face runs it."""

    def __init__(
        self,
        folder: str,
        dtype: str = "float32",
        kind: str | None = None,
        change: Callable[[Any], None] | None = None,
    ) -> None:
        """`change` is given the model that Hugging Face has loaded."""
        import torch
        import transformers

        # Eager: faster attention leaves out what some models ask for (soft caps), and faster
        # experts know no float64.
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        kind = kind or transformers.AutoConfig.from_pretrained(folder).architectures[0]
        found = getattr(transformers, kind).from_pretrained(
            folder, dtype=getattr(torch, dtype), **plain
        )
        self._model: Any = found.eval()
        if change is not None:
            change(self._model)
        config = self._model.config.get_text_config(decoder=True)
        layers = find_layers(self._model, count_layers(config))
        active = getattr(config, "altup_active_idx", None)
        self._hooks = StreamHooks(layers, config.hidden_size, num_parts=1, active=active)
        with self._hooks.learning():
            self._forward(list(range(3, 14)), {})

    def streams(
        self, token_ids: list[int], media: Mapping[str, Any] | None = None
    ) -> dict[str, NDArray[np.float32]]:
        """By point, T x D; `media` is what a processor made of the prompt beside its token ids."""
        found: dict[str, NDArray[np.float32]] = {}
        with self._hooks.reading(lambda point, rows_TD: found.update({point: rows_TD})):
            self._forward(token_ids, media or {})
        return found

    def logits(
        self,
        token_ids: list[int],
        added: Mapping[str, Floats] | None = None,
        media: Mapping[str, Any] | None = None,
        positions: slice = EVERYWHERE,
    ) -> Floats:
        """T x V, with `added` added to the rows of these positions at its point."""
        with self._hooks.adding(added or {}, positions=positions):
            return np.asarray(self._forward(token_ids, media or {})[0].double().numpy())

    def _forward(self, token_ids: list[int], media: Mapping[str, Any]) -> Any:
        import torch

        given = {name: self._fit(value, len(token_ids), name) for name, value in media.items()}
        with torch.no_grad():
            return self._model(input_ids=torch.tensor([token_ids]), use_cache=False, **given).logits

    def _fit(self, value: Any, num_tokens: int, name: str) -> Any:
        """Of the model's type, and as long as the sequence where it says something of tokens."""
        import torch

        if name.endswith("token_type_ids"):  # what is generated is text
            return torch.nn.functional.pad(value, (0, num_tokens - value.shape[1]))
        is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self._model.dtype) if is_number else value


class StreamHooks:
    """Reads, or adds to, the residual stream that passes the layers of a running model.

    The stream is one tensor, or the sum of up to `num_parts` that travel together, or the `active`
    one of several that one tensor holds.
    """

    def __init__(
        self, layers: list[Any], width: int, *, num_parts: int, active: int | None = None
    ) -> None:
        self._layers, self._width, self._num_parts = layers, width, num_parts
        self._active = active
        self._middles: list[Any] = [None] * len(layers)  # of each, the child given its middle

    @contextmanager
    def reading(self, note: Callable[[str, NDArray[np.float32]], None]) -> Iterator[None]:
        """Give `note` every point of every forward, as rows T x D."""

        def read(point: str, parts: list[Any]) -> None:
            note(point, _sum(parts).float().cpu().numpy().copy())

        with _hooked(self._at_points(read)):
            yield

    @contextmanager
    def adding(
        self, added: Mapping[str, Floats], *, part: int = 0, positions: slice = EVERYWHERE
    ) -> Iterator[None]:
        """Add a row to these rows of the stream at its point, in one of its parts."""
        import torch

        def add(point: str, parts: list[Any]) -> None:
            if point not in added or part >= len(parts):
                return
            # in place: the layer keeps this tensor as its residual
            changed = [held[..., positions, :] for held in parts]
            row_D = torch.from_numpy(added[point])
            if parts[0].dtype == torch.bfloat16:  # the sum is rounded, and not each of its parts
                stream = sum(changed[1:], changed[0]).float() + row_D.float()
                for held in changed:
                    held.zero_()
                changed[part].copy_(stream)
            else:
                changed[part].add_(row_D.to(parts[part].dtype))

        with _hooked(self._at_points(add)):
            yield

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Find, in one forward, which child of each layer is given the stream in its middle."""
        middles = [_Middle(layer) for layer in self._layers]
        with _hooked(hook for middle in middles for hook in self._at_modules(middle)):
            yield
        self._middles = [_named_middle(middle.layer) or middle.child for middle in middles]

    def _at_points(self, visit: Callable[[str, list[Any]], None]) -> Iterator[Any]:
        for index, (layer, middle) in enumerate(zip(self._layers, self._middles, strict=True)):
            at_door = partial(self._pick, visit)
            yield self._on_input(layer, partial(at_door, f"pre_attn.{index}"))
            yield self._on_output(layer, partial(at_door, f"post_block.{index}"))
            if middle is not None:
                yield self._on_input(middle, partial(visit, f"post_attn.{index}"))

    def _pick(self, visit: Callable[[str, list[Any]], None], point: str, parts: list[Any]) -> None:
        visit(point, parts if self._active is None else [parts[0][self._active]])

    def _at_modules(self, middle: _Middle) -> Iterator[Any]:
        yield self._on_input(middle.layer, middle.note)
        for module in middle.layer.modules():
            if module is not middle.layer and next(module.children(), None) is None:
                yield self._on_output(module, middle.note)
        for child in middle.layer.children():
            yield self._on_input(child, partial(middle.judge, child))
            yield child.register_forward_hook(middle.reject_buffers)

    def _on_input(self, module: Any, visit: Callable[[list[Any]], None]) -> Any:
        def hook(_module: Any, args: Any, kwargs: Any) -> None:
            self._visit((*args, *kwargs.values()), visit)

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    def _on_output(self, module: Any, visit: Callable[[list[Any]], None]) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            self._visit(output if isinstance(output, tuple | list) else (output,), visit)

        return module.register_forward_hook(hook)

    def _visit(self, values: Sequence[Any], visit: Callable[[list[Any]], None]) -> None:
        import torch

        parts = [
            value
            for value in values
            if isinstance(value, torch.Tensor) and value.dim() > 1
            if value.shape[-1] == self._width
        ]
        if parts:
            visit(parts[: self._num_parts])


def _named_middle(layer: Any) -> Any:
    """Of a class that may be one of clairai's, mixed into the model's own."""
    kinds = (kind.__name__ for kind in type(layer).__mro__)
    name = next((MIDDLES[kind] for kind in kinds if kind in MIDDLES), None)
    return None if name is None else layer.get_submodule(name)


class _Middle:
    """Watches one layer for the first tensor given to a child of it that no module has made."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.child: Any = None
        self._made: list[Any] = []  # the layer's input, and what its innermost modules gave
        self._unmade: list[tuple[Any, Any]] = []  # given to `child` beside what was made, before

    def note(self, parts: list[Any]) -> None:
        self._made += [_sum(held).clone() for held in (parts, *([part] for part in parts))]

    def judge(self, child: Any, parts: list[Any]) -> None:
        if next(child.children(), None) is not None:
            parts = parts[:1]  # only a norm adds up what it is given: Plamo 3's attention does not
        if self.child is None and not self._is_made(_sum(parts)):
            self.child = child
            unmade = [part for part in parts if not self._is_made(_sum([part]))]
            self._unmade = [(part, part.clone()) for part in unmade] if len(parts) > 1 else []

    def reject_buffers(self, child: Any, *_: Any) -> None:
        """A child that fills a tensor that it was given was given memory, and not the stream."""
        is_filled = any(bool((part != before).any()) for part, before in self._unmade)
        if self.child is child and is_filled:
            self.child = None

    def _is_made(self, given_TD: Any) -> bool:
        return any(
            given_TD.shape == made.shape and bool((given_TD == made).all()) for made in self._made
        )


@contextmanager
def _hooked(hooks: Iterator[Any]) -> Iterator[None]:
    held = list(hooks)
    try:
        yield
    finally:
        for hook in held:
            hook.remove()


def _sum(parts: list[Any]) -> Any:
    """As rows."""
    rows = [part.detach().reshape(-1, part.shape[-1]) for part in parts]
    return rows[0] if len(rows) == 1 else rows[0] + rows[1]


def count_layers(config: Any) -> int:
    """LongCat's num_hidden_layers counts attentions, of which each of its layers has two."""
    is_double = config.model_type == "longcat_flash"
    return int(config.num_layers if is_double else config.num_hidden_layers)


def find_layers(model: Any, num_layers: int) -> list[Any]:
    """The first stack of that many modules in the decoder of a model."""
    import torch

    names = ("get_decoder", "get_language_model")  # Hugging Face's, and vLLM's
    decoder = next((getattr(model, name)() for name in names if hasattr(model, name)), model)
    for module in (decoder if isinstance(decoder, torch.nn.Module) else model).modules():
        is_stack = isinstance(module, torch.nn.ModuleList) and len(module) == num_layers
        if is_stack and all(next(layer.children(), None) is not None for layer in module):
            return list(module)
    raise LookupError(f"no stack of {num_layers} decoder layers in {type(model).__name__}")


def relative_error(
    found_TD: NDArray[np.float32], truth_TD: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Per value, relative to its own size or its row's root mean square, whichever is larger."""
    truth = truth_TD.astype(np.float64)
    typical = np.sqrt(np.square(truth).mean(axis=1, keepdims=True))
    error: NDArray[np.float64] = np.abs(found_TD - truth) / np.maximum(np.abs(truth), typical)
    return error
