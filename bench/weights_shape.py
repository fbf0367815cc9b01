"""A folder that vLLM serves with dummy weights of a model's shape, and tensors to send.

The folder has the names and sizes of a checkpoint and no numbers: a file of holes, which takes no
room on a disk. vLLM is told to make its own numbers up; new ones come by a transfer.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from pathlib import Path
from typing import Any, Final

SHAPES: Final = Path(__file__).parent / "shapes"
ITEM_BYTES: Final = 2  # bfloat16
_UNKNOWN: Final = "t0"
_CHAT_TEMPLATE: Final = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
Shapes = dict[str, tuple[int, ...]]


def hollow(shape: str, target: Path) -> Path:
    """`shape` names a folder of bench/shapes, or is one with a config.json."""
    write_checkpoint(shape, target)
    write_tokenizer(target)
    return target


def write_checkpoint(shape: str, target: Path) -> Path:
    """As above, without a tokenizer."""
    source = SHAPES / shape if (SHAPES / shape).is_dir() else Path(shape)
    target.mkdir()
    shutil.copy(source / "config.json", target)
    _write_holes(target / "model.safetensors", _named_shapes(source))
    return target


def shapes_of(folder: Path) -> Shapes:
    from clairai.weights import checkpoint

    return {name: shape for name, _, shape in checkpoint.list_tensors(folder)}


def layers_of(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["num_hidden_layers"])


def random_tensors(shapes: Shapes, device: str, seed: int) -> dict[str, Any]:
    """A trainer's parameters, in bfloat16."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    return {
        name: torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(
            0, 0.02, generator=generator
        )
        for name, shape in shapes.items()
    }


def _named_shapes(source: Path) -> Shapes:
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return {name: tuple(each.shape) for name, each in model.named_parameters()}


def _write_holes(file: Path, shapes: Shapes) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * ITEM_BYTES
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    with file.open("wb") as target:
        target.write(struct.pack("<Q", len(raw)) + raw)
        target.truncate(8 + len(raw) + end)


def write_tokenizer(target: Path) -> None:
    """A word for each token of the model in this folder: `t0 t1 ...`, also as messages of a chat.

    Answers are read by their number, not by what they say.
    """
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    num_tokens = json.loads((target / "config.json").read_text())["vocab_size"]
    words = {f"t{at}": at for at in range(num_tokens)}
    plain = Tokenizer(models.WordLevel(words, unk_token=_UNKNOWN))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token=_UNKNOWN, chat_template=_CHAT_TEMPLATE
    ).save_pretrained(target)
