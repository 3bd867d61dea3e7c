"""Toys with the position fields of published configurations, in the words in which they are published.

Lengths are scaled down, so that a short text crosses the original one: `ORIGINAL` stands for the 4096, 8192 or 32768 of
a release, and `max_position_embeddings` keeps its ratio to it. Lists of factors are as long as a toy's head needs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from tests import families, oracle, zoo

ORIGINAL = 32
_IN_16_BITS = ("gemma4_text", "llama4_text", "mistral4")
"""Families outside `zoo.py` that have the library's bits in 16 bits alone."""
_SHORT = [1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.05, 1.1]
_LONG = [1.02, 1.03, 1.05, 1.1, 4.2, 13.5, 38.0, 61.0]
_DEEPSEEK = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": ORIGINAL,
}
_LONGROPE = {"type": "longrope", "short_factor": _SHORT, "long_factor": _LONG}


class Published(NamedTuple):
    """A family and what its configuration says of positions."""

    family: str
    fields: dict[str, Any]

    @property
    def is_by_length(self) -> bool:
        """Whether factors depend on the length of a text."""
        return any(f'"{kind}"' in json.dumps(self.fields) for kind in ("longrope", "dynamic")) and "alpha" not in str(
            self.fields
        )


def _scaled(family: str, theta: float, positions: int, scaling: dict[str, Any] | None, **more: Any) -> Published:
    fields = {"rope_theta": theta, "max_position_embeddings": positions, "rope_scaling": scaling, **more}
    return Published(family, fields)


def _by_layers(family: str, positions: int, full: dict[str, Any], **sliding: Any) -> Published:
    """Tables of their own for layers of full and of sliding attention."""
    sliding = {"rope_type": "default", "rope_theta": 10000.0, **sliding}
    tables = {"full_attention": {"rope_theta": 500000.0, **full}, "sliding_attention": sliding}
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2} if family == "mellum" else {}
    return Published(family, {"max_position_embeddings": positions, "rope_parameters": tables, **kinds})


def reference(name: str, folder: Path) -> PreTrainedModel:
    """transformers alone, just loaded."""
    family = PUBLISHED[name].family
    return oracle.reference(folder) if family in zoo.FAMILIES else families.reference(folder, _dtype(family))


def _dtype(family: str) -> torch.dtype:
    return torch.bfloat16 if family in _IN_16_BITS else torch.float32


PUBLISHED: dict[str, Published] = {
    "Phi-3.5-MoE": _scaled(
        "phimoe",
        10000.0,
        32 * ORIGINAL,
        {
            **_LONGROPE,
            "short_mscale": 1.243163121016122,
            "long_mscale": 1.243163121016122,
            "original_max_position_embeddings": ORIGINAL,
        },
        original_max_position_embeddings=ORIGINAL,
        sliding_window=32 * ORIGINAL,
    ),
    "Phi-3.5-MoE, two scales": _scaled(
        "phimoe",
        10000.0,
        32 * ORIGINAL,
        {**_LONGROPE, "short_mscale": 1.0, "long_mscale": 1.5, "original_max_position_embeddings": ORIGINAL},
        original_max_position_embeddings=ORIGINAL,
    ),
    "DeepSeek-V2-Lite": _scaled(
        "deepseek_v2", 10000, 40 * ORIGINAL, {**_DEEPSEEK, "mscale": 0.707, "mscale_all_dim": 0.707}
    ),
    "DeepSeek-V3": _scaled("deepseek_v3", 10000, 40 * ORIGINAL, {**_DEEPSEEK, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "Kimi-K2": _scaled(
        "deepseek_v3",
        50000.0,
        32 * ORIGINAL,
        {**_DEEPSEEK, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "gpt-oss": _scaled(
        "gpt_oss",
        150000,
        32 * ORIGINAL,
        {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": ORIGINAL,
        },
    ),
    "Qwen3, YaRN by its card": _scaled(
        "qwen3_moe",
        1000000.0,
        ORIGINAL + 8,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    ),
    "Qwen2, YaRN by its card": _scaled(
        "qwen2_moe",
        1000000.0,
        ORIGINAL,
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    ),
    "Qwen3-Next, YaRN by its card": _scaled(
        "qwen3_next",
        10000000,
        ORIGINAL,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
        partial_rotary_factor=0.25,
    ),
    "Llama-4-Scout": _scaled(
        "llama4_text",
        500000.0,
        1280 * ORIGINAL,
        {
            "rope_type": "llama3",
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": ORIGINAL,
        },
    ),
    "llama3": _scaled(
        "granitemoe",
        500000.0,
        16 * ORIGINAL,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": ORIGINAL,
        },
    ),
    "Mistral-Small-4": Published(
        "mistral4",
        {
            "max_position_embeddings": 128 * ORIGINAL,
            "rope_parameters": {
                "type": "yarn",
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 128.0,
                "original_max_position_embeddings": ORIGINAL,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "HunYuan-A13B": _scaled(
        "hunyuan_v1_moe",
        10000.0,
        8 * ORIGINAL,
        {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0},
    ),
    "GLM-4.5": _scaled("glm4_moe", 1000000, 32 * ORIGINAL, None, partial_rotary_factor=0.5),
    "Mixtral": _scaled("mixtral", 1000000.0, 8 * ORIGINAL, None),
    "linear": _scaled("mixtral", 10000.0, ORIGINAL, {"type": "linear", "factor": 4.0}),
    "dynamic": _scaled("mixtral", 10000.0, ORIGINAL, {"type": "dynamic", "factor": 4.0}),
    "dynamic, recurrent layers": _scaled(
        "qwen3_next", 10000.0, ORIGINAL, {"rope_type": "dynamic", "factor": 4.0}, partial_rotary_factor=1.0
    ),
    "longrope in another family": _scaled(
        "qwen3_moe",
        10000.0,
        4 * ORIGINAL,
        {**_LONGROPE, "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    ),
    "proportional, by layers": _by_layers(
        "gemma4_text", 8 * ORIGINAL, {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    ),
    "yarn, by layers": _by_layers(
        "mellum", ORIGINAL, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
    ),
    "longrope, by layers": _by_layers(
        "mellum",
        4 * ORIGINAL,
        {
            "rope_type": "longrope",
            "short_factor": _SHORT,
            "long_factor": _LONG,
            "factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
    ),
    "dynamic, by layers": _by_layers(
        "mellum", ORIGINAL, {"rope_type": "dynamic", "factor": 4.0}, rope_type="linear", factor=2.0
    ),
}


def save(name: str, folder: Path, **overrides: Any) -> Path:
    """A toy of a published configuration: seeded random weights, and the fields as they are published. `overrides`: of
    other fields, for the families of `zoo.py`."""
    published = PUBLISHED[name]
    if published.family in zoo.FAMILIES:
        zoo.save(published.family, folder, **overrides)
    else:
        families.save(published.family, folder, _dtype(published.family))
    place = folder / "config.json"
    config = json.loads(place.read_text("utf-8"))
    config.pop("rope_parameters", None)
    place.write_text(json.dumps({**config, **published.fields}), "utf-8")
    return folder
