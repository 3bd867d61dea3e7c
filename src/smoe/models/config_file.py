"""Checks a checkpoint's config.json before transformers builds a model from it, and its generation_config.json, so that
no generation fails because of it later.

transformers does not check sizes. From a damaged file it would build a billion layers, before any later check could
run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from smoe.errors import CheckpointError
from smoe.memory.checkpoint_json import read_object
from smoe.models.files import naming

MAX_LAYERS = 1024
MAX_EXPERTS = 2**16
"""Limits that are several times as large as the largest known models. A larger value means that the file is damaged."""
_SIZES = r"hidden_size|vocab_size|(\w+_)?intermediate_size|(\w+_)?head_dim|num_(\w+_)?(heads|per_tok)"
_BOUNDS = (
    (re.compile(r"n(um)?_(\w+_)?layers?"), MAX_LAYERS),
    (re.compile(r"(\w+_)?n(um)?_(\w+_)?experts?"), MAX_EXPERTS),
    (re.compile(_SIZES), 2**40),
)
_NUMBERS = re.compile(r"rope_theta|(\w+_)?factor|beta_(fast|slow)|mscale(_all_dim)?|(\w+_)?max_position_embeddings")
"""A pattern for names of fields that must be finite numbers. Some are in nested objects that transformers does not
check."""
_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts")
"""The names that families give to the number of experts per token (`_USED`) and of experts per layer (`_EXPERTS`)."""
_DEPTH = 50


def check_config(folder: Path) -> str:
    """Return the `model_type` of a folder's config.json, after checking its sizes and numbers.

    Raise `CheckpointError`, with file and key, if the file is not a configuration, or has impossible sizes or numbers.
    """
    path = folder / "config.json"
    config = read_object(path)
    family = config.get("model_type")
    if not isinstance(family, str) or not family:
        raise CheckpointError(
            f"the field 'model_type' of {path} is {family!r:.80} instead of the name of a model family; download the "
            "file again"
        )
    check_sizes(config, path)
    return family


def check_sizes(value: Any, path: Path, depth: int = 0) -> None:
    """Raise `CheckpointError` if a field of a configuration, or of an object nested in it, has an impossible size."""
    if depth > _DEPTH:
        raise CheckpointError(f"{path} is corrupt: it is nested too deeply; download it again")
    if isinstance(value, list):
        for inner in value:
            check_sizes(inner, path, depth + 1)
    elif isinstance(value, dict):
        for key, inner in value.items():
            check_number(key, inner, path)
        for key, inner in value.items():
            _check_size(key, inner, path)
            check_sizes(inner, path, depth + 1)
        _check_used(value, path)


def check_number(key: str, value: Any, path: Path) -> None:
    """Raise `CheckpointError` if the value of the field `key` is NaN, is infinite (allowed for limits only), or is a
    boolean although the field is a number."""
    is_odd = isinstance(value, float) and not math.isfinite(value)
    if is_odd and (math.isnan(value) or "limit" not in key):
        raise CheckpointError(
            f"{path}: the field {key!r} is {value!r}; it must be a finite number: download the file again"
        )
    names_number = _NUMBERS.fullmatch(key) or any(names.fullmatch(key) for names, _ in _BOUNDS)
    if isinstance(value, bool) and names_number:
        raise CheckpointError(f"{path}: the field {key!r} is {value}; it must be a number: download the file again")


def _check_used(config: Mapping[str, Any], path: Path) -> None:
    """Raise `CheckpointError` if a token would use more experts than a layer has."""
    for used in (name for name in _USED if isinstance(config.get(name), int)):
        for experts in (name for name in _EXPERTS if isinstance(config.get(name), int)):
            # zero-computation experts are counted in a field of their own
            most = config[experts] + (config.get("zero_expert_num") or 0)
            if config[used] > most and config[experts] > 0:
                raise CheckpointError(
                    f"{path}: the field {used!r} is {config[used]}; it must be from 1 to {most}, the value of "
                    f"{experts!r}: download the file again"
                )


def _check_size(key: str, value: Any, path: Path) -> None:
    for names, most in _BOUNDS:
        if names.fullmatch(key) and isinstance(value, (int, float)) and not 0 <= value <= most:
            raise CheckpointError(
                f"{path}: the field {key!r} is {value!r:.80}; it must be from 0 to {most}: download the file again"
            )


def check_generation(folder: Path) -> None:
    """Raise `CheckpointError`, with file and key, if a generation_config.json is invalid. A missing file is valid."""
    path = folder / "generation_config.json"
    if not path.exists() and not path.is_symlink():
        return
    check_values(read_object(path), path)
    from transformers import GenerationConfig  # not at the top: sizes are also read without the library

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
