"""Checks a checkpoint's generation_config.json when the model is loaded, so that no generation fails because of it
later."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from smoe.errors import CheckpointError
from smoe.memory.checkpoint_json import read_object
from smoe.models.files import naming


def check_generation(folder: Path) -> None:
    """Raise `CheckpointError`, with file and key, if a generation_config.json is invalid. A missing file is valid."""
    path = folder / "generation_config.json"
    if not path.exists() and not path.is_symlink():
        return
    check_values(read_object(path), path)
    with naming(f"{path} cannot be used"):
        GenerationConfig.from_pretrained(folder, local_files_only=True).validate()


def check_values(found: Mapping[str, Any], path: Path) -> None:
    """Raise `CheckpointError` if a value of a generation configuration read from `path` is invalid."""
    for key, value in found.items():
        wanted = _wrong(key, value)
        if wanted:
            raise CheckpointError(
                f"{path}: the field {key!r} is {value!r:.80}; it must be {wanted}: correct the field, or remove it"
            )


def _wrong(key: str, value: Any) -> str | None:
    """Return a phrase that describes the allowed values if `value` is invalid, otherwise None."""
    if value is None:
        return None
    if key in ("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id"):
        tokens = value if isinstance(value, list) and key == "eos_token_id" else [value]
        good = tokens and all(_is_whole(token, -1, 2**31) for token in tokens)  # some files write -1 for "none"
        return None if good else "the number of a token"
    for names, holds, wanted in _WANTED:
        if key in names and not holds(value):
            return wanted
    return None


def _is_whole(value: Any, least: int, most: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: Any, least: float, most: float = math.inf) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and least <= value <= most


_MOST_BEAMS = 1024
_WANTED: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("temperature", "repetition_penalty"), lambda v: _is_number(v, 0), "a number from 0 on"),
    (("top_p", "min_p", "typical_p"), lambda v: _is_number(v, 0, 1), "a number from 0 to 1"),
    (
        ("top_k", "max_length", "max_new_tokens", "min_length", "min_new_tokens", "no_repeat_ngram_size"),
        lambda v: _is_whole(v, 0, 2**62),
        "a whole number from 0 on",
    ),
    (
        ("num_beams", "num_return_sequences", "num_beam_groups"),
        lambda v: _is_whole(v, 1, _MOST_BEAMS),
        f"a whole number from 1 to {_MOST_BEAMS}",
    ),
    (
        ("do_sample", "use_cache", "output_hidden_states", "output_attentions", "output_scores", "output_logits"),
        lambda v: isinstance(v, bool),
        "true or false",
    ),
)
