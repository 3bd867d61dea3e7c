"""Toys of the families with images: a small language model, a smaller image encoder, random weights."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast

from tests import families, zoo

IMAGE, START, END, SEPARATOR = 120, 121, 122, 123
_QWEN = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
_VISION: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe": {**_QWEN, "deepstack_visual_indexes": [0, 1]},
    "qwen3_5_moe": _QWEN,
    "glm4v_moe": {**_QWEN, "image_size": 16},
    "gemma4": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 16,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 64,
    },
    "llama4": {
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "pixel_shuffle_ratio": 0.5,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "vision_output_dim": 32,
    },
}
_TOKENS: dict[str, dict[str, int]] = {
    "qwen3_vl_moe": {"vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": SEPARATOR},
    "qwen3_5_moe": {"vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": SEPARATOR},
    "glm4v_moe": {"image_start_token_id": START, "image_end_token_id": END, "video_token_id": SEPARATOR},
    "gemma4": {"boi_token_id": START, "eoi_token_id": END, "video_token_id": SEPARATOR, "audio_token_id": SEPARATOR},
    "llama4": {"boi_token_index": START, "eoi_token_index": END},
}
_TEXT: dict[str, dict[str, Any]] = {"gemma4": {"use_bidirectional_attention": "vision"}}
FAMILIES = tuple(_VISION)


class ToyImage(NamedTuple):
    """An image as the encoder gets it, and the number of tokens that it takes."""

    inputs: dict[str, torch.Tensor]
    tokens: int


def config_of(model_type: str, **text: Any) -> Any:
    """A small configuration of the family. `text`: fields of the language model's configuration."""
    whole = families.config_of(model_type).to_dict()
    of_text = {**whole["text_config"], **_TEXT.get(model_type, {}), **text}
    tokens = {name: whole[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    vision_type = AutoConfig.for_model(model_type).to_dict()["vision_config"]
    kind = vision_type["model_type"] if vision_type else f"{model_type}_vision"
    return AutoConfig.for_model(
        model_type,
        text_config=of_text,
        vision_config={**_VISION[model_type], "model_type": kind},
        **{"image_token_index" if model_type == "llama4" else "image_token_id": IMAGE},
        **_TOKENS[model_type],
        **tokens,
        tie_word_embeddings=False,
    )


def save(model_type: str, folder: Path, dtype: torch.dtype, **text: Any) -> Path:
    """A toy with seeded random weights, as the library saves it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = families.eager(AutoModelForImageTextToText.from_config, config_of(model_type, **text), dtype)
    zoo.fill(model, dtype)
    model.save_pretrained(folder)
    return folder


def reference(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """transformers' own model of images and text, eager experts."""
    return families.eager(AutoModelForImageTextToText.from_pretrained, folder, dtype)


def image(model_type: str, seed: int, rows: int = 4, columns: int = 6) -> ToyImage:
    """A random image of `rows` times `columns` patches, or for Llama 4 of two tiles."""
    drawn = torch.Generator().manual_seed(seed)
    if model_type == "llama4":
        return ToyImage({"pixel_values": torch.randn(2, 3, 16, 16, generator=drawn)}, 2 * 4)
    if model_type == "gemma4":
        place = torch.stack(torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy"), -1).flatten(0, 1)
        pixels = torch.rand(1, rows * columns, 3 * 4 * 4, generator=drawn)
        return ToyImage({"pixel_values": pixels, "image_position_ids": place[None]}, rows * columns // 4)
    pixels = torch.randn(rows * columns, 3 * 2 * 4 * 4, generator=drawn)
    return ToyImage({"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, rows, columns]])}, rows * columns // 4)


_SPECIAL = {0: "<pad>", 1: "<bos>", 2: "<eos>", 3: "<unk>", 4: "<|turn|>", IMAGE: "<|image|>", START: "<|start|>",
            END: "<|end|>", SEPARATOR: "<|between|>", 124: "<|patch|>", 125: "<|line|>"}  # fmt: skip
_TEMPLATE = """{%- for message in messages %}<|turn|>{{ message.role }}: {% if message.content is string %}
{{- message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' -%}
IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"""
_PROCESSOR: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe": {"image_processor_type": "Qwen2VLImageProcessorFast", "merge_size": 2, "temporal_patch_size": 2},
    "qwen3_5_moe": {"image_processor_type": "Qwen2VLImageProcessorFast", "merge_size": 2, "temporal_patch_size": 2},
    "glm4v_moe": {"image_processor_type": "Glm4vImageProcessor", "merge_size": 2, "temporal_patch_size": 2},
    "gemma4": {"image_processor_type": "Gemma4ImageProcessor", "pooling_kernel_size": 2, "max_soft_tokens": 70},
}


def add_reader(model_type: str, folder: Path) -> Any:
    """Write a tokenizer of single characters, a chat template and an image processor to a toy's folder. Returns the
    tokenizer."""
    words = [_SPECIAL.get(token, chr(token)) for token in range(128)]
    plain = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    wrapped = "IMAGE" if model_type == "gemma4" else "<|start|>IMAGE<|end|>"  # Gemma's processor adds the marks
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=[_SPECIAL[token] for token in sorted(_SPECIAL) if token > 3],
        chat_template=_TEMPLATE.replace("IMAGE", wrapped.replace("IMAGE", "<|image|>")),
    )
    tokenizer.save_pretrained(folder)
    edges = {} if model_type == "gemma4" else {"size": {"shortest_edge": 64, "longest_edge": 4096}}
    (folder / "preprocessor_config.json").write_text(json.dumps({**_PROCESSOR[model_type], "patch_size": 4, **edges}))
    return tokenizer


def file(seed: int, width: int = 24, height: int = 16, form: str = "PNG") -> bytes:
    """An image file of random pixels."""
    drawn = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=drawn, dtype=torch.uint8)
    stored = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(stored, form)
    return stored.getvalue()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"
