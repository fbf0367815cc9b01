"""Processors for tiny models that take images, sounds or videos, and prompts with these in them.

A processor is made of Hugging Face's own classes, with a tokenizer that knows the words `w3` to
`w511`. What an architecture's processor asks for by name is in RECIPES, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from clairai.wire import ring_messages
from tests.fidelity import tiny_models

RATE_HZ: Final = 16_000
NUM_SAMPLES: Final = 8_000
IMAGE: Final = (60, 90, 3)
VIDEO: Final = (4, *IMAGE)
NUM_WORDS: Final = 400  # those that no processor gives a meaning to
ENDS: Final = ("<pad>", "<s>", "</s>")
# Words of the model's own that some processors put around an image.
LINES: Final = tuple("\n" * count for count in range(1, 5))
KINDS: Final = {
    "image": ring_messages.IMAGE,
    "audio": ring_messages.AUDIO,
    "video": ring_messages.VIDEO,
}
ARGUMENTS: Final = {"image": "images", "audio": "audio", "video": "videos"}  # of a processor


@dataclass(frozen=True)
class Recipe:
    """What an architecture's processor is made of."""

    placeholders: Mapping[str, str]  # by kind: what stands in a text for one of them
    tokens: Mapping[str, str]  # special tokens; the config's field with the id, or "" for any id
    embedded: Mapping[str, str]  # by kind: the token whose positions get embeddings
    named: Mapping[str, str] = field(default_factory=dict)  # tokens, as the processor calls them
    processor: Mapping[str, Any] = field(default_factory=dict)  # its own arguments
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # those of its parts
    is_first: bool = False  # vLLM itself puts the placeholders before the text
    most: int = 2  # in one prompt


@dataclass(frozen=True)
class MediaPrompt:
    """Numbers of words, and media between them, each with a seed of its own."""

    parts: tuple[int | tuple[str, int], ...]

    def text(self, recipe: Recipe, *, with_media: bool = True) -> str:
        placeholders = recipe.placeholders if with_media else dict.fromkeys(recipe.placeholders, "")
        rng = np.random.default_rng(len(self.parts))
        said: list[str] = []
        for part in self.parts:
            if isinstance(part, int):
                said += [f"w{word}" for word in rng.integers(3, NUM_WORDS, part)]
            else:
                said.append(placeholders[part[0]])
        return " ".join(said)

    def media(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for part in self.parts:
            if not isinstance(part, int):
                found.setdefault(part[0], []).append(make_media(*part))
        return found

    def for_vllm(self, recipe: Recipe) -> dict[str, Any]:
        given: dict[str, Any] = {"prompt": self.text(recipe, with_media=not recipe.is_first)}
        media = self.media()
        if "audio" in media:
            media["audio"] = [(samples, RATE_HZ) for samples in media["audio"]]
        return {**given, "multi_modal_data": media} if media else given


def make_media(kind: str, seed: int) -> Any:
    """Noise."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    if kind == "audio":
        return rng.standard_normal(NUM_SAMPLES).astype(np.float32) * 0.1
    if kind == "video":
        return rng.integers(0, 256, VIDEO, dtype=np.uint8)
    return Image.fromarray(rng.integers(0, 256, IMAGE, dtype=np.uint8))


def process(processor: Any, prompt: MediaPrompt, recipe: Recipe) -> dict[str, Any]:
    """What Hugging Face's model is given for it: tensors by name."""
    given = {ARGUMENTS[kind]: held for kind, held in prompt.media().items()}
    if not given:
        return dict(processor.tokenizer([prompt.text(recipe)], return_tensors="pt"))
    if "audio" in given:
        given["sampling_rate"] = RATE_HZ  # type: ignore[assignment]
    found = processor(text=[prompt.text(recipe)], return_tensors="pt", **given)
    return {name: value for name, value in found.items() if name != "labels"}


def make_processor(architecture: str, folder: Path) -> dict[int, int]:
    """Save it beside the model; what the ids of its placeholders stand for."""
    import transformers

    recipe = RECIPES[architecture]
    config = transformers.AutoConfig.from_pretrained(folder)
    ids = _token_ids(recipe, config)
    kind = _class_of("processing", config.model_type)
    parts = dict(_parts(kind, recipe, config.model_type))
    parts["tokenizer"] = _make_tokenizer(ids, recipe)
    kind(**parts, **recipe.processor).save_pretrained(folder)
    return {ids[token]: KINDS[medium] for medium, token in recipe.embedded.items()}


def _token_ids(recipe: Recipe, config: Any) -> dict[str, int]:
    named = {text: getattr(config, name) for text, name in recipe.tokens.items() if name}
    free = (one for one in range(tiny_models.VOCABULARY - 1, NUM_WORDS, -1))
    unused = (one for one in free if one not in named.values())
    return {text: named.get(text) or next(unused) for text in (*recipe.tokens, *LINES)}


def _make_tokenizer(ids: Mapping[str, int], recipe: Recipe) -> Any:
    import tokenizers
    import transformers

    words = {index: f"w{index}" for index in range(tiny_models.VOCABULARY)}
    words |= dict(enumerate(ENDS)) | {index: text for text, index in ids.items()}
    vocabulary = {text: index for index, text in words.items()}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=ENDS[0]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in recipe.tokens])
    made.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in LINES])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=ENDS[1],
        eos_token=ENDS[2],
        pad_token=ENDS[0],
        unk_token=ENDS[0],
        extra_special_tokens=dict(recipe.named),
    )


def _parts(kind: Any, recipe: Recipe, model_type: str) -> Iterator[tuple[str, Any]]:
    modules = {
        "image_processor": "image_processing",
        "video_processor": "video_processing",
        "feature_extractor": "feature_extraction",
        "audio_processor": "feature_extraction",
    }
    for name in kind.get_attributes():
        if name in modules:
            yield name, _class_of(modules[name], model_type)(**recipe.parts.get(name, {}))


def _class_of(what: str, model_type: str) -> Any:
    """By transformers' own tables; a class that needs pillow alone where there is one."""
    import importlib

    import transformers

    module = importlib.import_module(f"transformers.models.auto.{what}_auto")
    table = next(
        value
        for name, value in vars(module).items()
        if name.endswith("_MAPPING_NAMES") and isinstance(value, dict)
    )
    found = table.get(model_type) or table[LIKE[model_type]]
    if not isinstance(found, str):
        found = found.get("pil") or found["torchvision"]
    return getattr(transformers, found)


# Model types whose parts transformers' tables do not name.
LIKE: Final = {"glm4v_moe": "glm4v"}

_IMAGE: Final = {"image": "<image>"}
_SQUARE: Final = {"height": 28, "width": 28}
_TILES: Final = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
_GRID: Final = [[28, 56], [56, 28], [56, 56]]
_IDEFICS: Final = Recipe(
    placeholders=_IMAGE,
    tokens={
        "<image>": "image_token_id",
        **dict.fromkeys(("<fake_token_around_image>", "<global-img>", "<end_of_utterance>"), ""),
        **dict.fromkeys(_TILES, ""),
    },
    embedded=_IMAGE,
    named={
        "fake_image_token": "<fake_token_around_image>",
        "image_token": "<image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    },
    processor={"image_seq_len": 4},
    parts={
        "image_processor": {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
    },
)
_CLIP: Final = {"size": {"shortest_edge": 28}, "crop_size": _SQUARE}
_LLAVA: Final[Mapping[str, Any]] = {
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
_PIXELS: Final = {"min_pixels": 28 * 28, "max_pixels": 56 * 112}


def _qwen_vl(pixels: Mapping[str, int], *, ids: bool = True, has_videos: bool = False) -> Recipe:
    fields = {
        "<|image_pad|>": "image_token_id",
        "<|video_pad|>": "video_token_id",
        "<|vision_start|>": "vision_start_token_id" if ids else "",
        "<|vision_end|>": "vision_end_token_id" if ids else "",
    }
    kinds = ("image", "video") if has_videos else ("image",)
    return Recipe(
        placeholders={kind: f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in kinds},
        tokens=fields,
        embedded={kind: f"<|{kind}_pad|>" for kind in kinds},
        parts={"image_processor": pixels, "video_processor": pixels if has_videos else {}},
    )


def _sounds(
    placeholder: str, token: str, name: str, *around: str, named: Mapping[str, str] | None = None
) -> Recipe:
    return Recipe(
        placeholders={"audio": placeholder},
        tokens={token: name, **dict.fromkeys(around, "")},
        embedded={"audio": token},
        named=named or {},
        parts={"feature_extractor": {"feature_size": 128}},
        most=1,
    )


RECIPES: Final[Mapping[str, Recipe]] = {
    "AriaForConditionalGeneration": Recipe(
        placeholders={"image": "<|img|>"},
        tokens={"<|img|>": "image_token_index"},
        embedded={"image": "<|img|>"},
        named={"image_token": "<|img|>"},
        processor={"size_conversion": {490: 8, 980: 16}},
        parts={"image_processor": {"max_image_size": 490}},
    ),
    "AudioFlamingo3ForConditionalGeneration": _sounds("<sound>", "<sound>", "audio_token_id"),
    "Exaone4_5_ForConditionalGeneration": _qwen_vl(_PIXELS, ids=False),
    "Gemma3ForConditionalGeneration": Recipe(
        placeholders={"image": "<start_of_image>"},
        tokens={
            "<image_soft_token>": "image_token_id",
            "<start_of_image>": "boi_token_index",
            "<end_of_image>": "eoi_token_index",
        },
        embedded={"image": "<image_soft_token>"},
        named={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        processor={"image_seq_length": 4},
        parts={"image_processor": {"size": {"height": 56, "width": 56}}},
    ),
    "GlmAsrForConditionalGeneration": _sounds("<|pad|>", "<|pad|>", "audio_token_id"),
    "Glm4vMoeForConditionalGeneration": Recipe(
        placeholders={"image": "<|begin_of_image|><|image|><|end_of_image|>"},
        tokens={
            "<|image|>": "image_token_id",
            "<|video|>": "video_token_id",
            "<|begin_of_image|>": "image_start_token_id",
            "<|end_of_image|>": "image_end_token_id",
            "<|begin_of_video|>": "video_start_token_id",
            "<|end_of_video|>": "video_end_token_id",
        },
        embedded={"image": "<|image|>"},
        named={"image_token": "<|image|>", "video_token": "<|video|>"},
        parts={"image_processor": {"size": {"shortest_edge": 1568, "longest_edge": 12544}}},
    ),
    "Idefics3ForConditionalGeneration": _IDEFICS,
    "InternVLForConditionalGeneration": Recipe(
        placeholders={"image": "<IMG_CONTEXT>"},
        tokens={
            "<IMG_CONTEXT>": "image_token_id",
            **dict.fromkeys(("<img>", "</img>", "<video>"), ""),
        },
        embedded={"image": "<IMG_CONTEXT>"},
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        processor={"image_seq_length": 1},
        parts={"image_processor": {"size": _SQUARE, "min_patches": 1, "max_patches": 3}},
    ),
    "Llama4ForConditionalGeneration": Recipe(
        placeholders={"image": "<|image|>"},
        tokens={
            "<|image|>": "",
            "<|patch|>": "image_token_index",
            "<|image_start|>": "boi_token_index",
            "<|image_end|>": "eoi_token_index",
            **dict.fromkeys(("<|tile_x_separator|>", "<|tile_y_separator|>"), ""),
        },
        embedded={"image": "<|patch|>"},
        parts={"image_processor": {"size": _SQUARE, "max_patches": 4}},
    ),
    "LlavaForConditionalGeneration": Recipe(
        placeholders=_IMAGE,
        tokens={"<image>": "image_token_index"},
        embedded=_IMAGE,
        processor=_LLAVA,
        parts={"image_processor": _CLIP},
    ),
    "LlavaNextForConditionalGeneration": Recipe(
        placeholders=_IMAGE,
        tokens={"<image>": "image_token_index"},
        embedded=_IMAGE,
        processor=_LLAVA,
        parts={"image_processor": {**_CLIP, "image_grid_pinpoints": _GRID}},
    ),
    "LlavaNextVideoForConditionalGeneration": Recipe(
        placeholders={"video": "<video>"},
        tokens={"<image>": "image_token_index", "<video>": "video_token_index"},
        embedded={"video": "<video>"},
        processor=_LLAVA,
        parts={
            "image_processor": {**_CLIP, "image_grid_pinpoints": _GRID},
            "video_processor": _CLIP,
        },
        most=1,
    ),
    "LlavaOnevisionForConditionalGeneration": Recipe(
        placeholders={"image": "<image>", "video": "<video>"},
        tokens={"<image>": "image_token_index", "<video>": "video_token_index"},
        embedded={"image": "<image>", "video": "<video>"},
        processor={"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
        parts={
            "image_processor": {"size": _SQUARE, "image_grid_pinpoints": _GRID},
            "video_processor": {"size": _SQUARE},
        },
    ),
    "Mistral3ForConditionalGeneration": Recipe(
        placeholders={"image": "[IMG]"},
        tokens={"[IMG]": "image_token_index", **dict.fromkeys(("[IMG_BREAK]", "[IMG_END]"), "")},
        embedded={"image": "[IMG]"},
        processor={"patch_size": 14, "spatial_merge_size": 2},
        parts={
            "image_processor": {
                "size": {"longest_edge": 84},
                "patch_size": {"height": 28, "width": 28},
            }
        },
    ),
    "PaddleOCRVLForConditionalGeneration": Recipe(
        placeholders={"image": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"},
        tokens={
            "<|IMAGE_PLACEHOLDER|>": "image_token_id",
            "<|IMAGE_START|>": "vision_start_token_id",
            "<|IMAGE_END|>": "vision_end_token_id",
        },
        embedded={"image": "<|IMAGE_PLACEHOLDER|>"},
        named={"image_token": "<|IMAGE_PLACEHOLDER|>"},
        parts={"image_processor": _PIXELS},
    ),
    "PaliGemmaForConditionalGeneration": Recipe(
        placeholders=_IMAGE,
        tokens={"<image>": "image_token_id"},
        embedded=_IMAGE,
        parts={"image_processor": {"size": _SQUARE, "image_seq_length": 4}},
        is_first=True,
        most=1,
    ),
    "Qwen2AudioForConditionalGeneration": _sounds(
        "<|audio_bos|><|AUDIO|><|audio_eos|>",
        "<|AUDIO|>",
        "audio_token_index",
        *("<|audio_bos|>", "<|audio_eos|>"),
    ),
    "Qwen2VLForConditionalGeneration": _qwen_vl(_PIXELS, has_videos=True),
    "Qwen2_5_VLForConditionalGeneration": _qwen_vl(_PIXELS),
    "Qwen3ASRForConditionalGeneration": _sounds(
        "<|audio_start|><|audio_pad|><|audio_end|>",
        "<|audio_pad|>",
        "audio_token_id",
        *("<|audio_start|>", "<|audio_end|>"),
        named={
            "audio_token": "<|audio_pad|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
    ),
    "Qwen3VLForConditionalGeneration": _qwen_vl(
        {"min_pixels": 32 * 32, "max_pixels": 64 * 128, "patch_size": 16}
    ),
    "SmolVLMForConditionalGeneration": _IDEFICS,
}
