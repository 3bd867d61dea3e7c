"""Experts of gpt-oss as published by OpenAI: MXFP4, with codes and scales in separate tensors.

mlp.experts.gate_up_proj_blocks   uint8 [E, 2I, H / 32, 16]   two codes per byte, the lower half first
mlp.experts.gate_up_proj_scales   uint8 [E, 2I, H / 32]       e for 2 ** (e - 127)
mlp.experts.down_proj_...         [E, H, I / 32, ...]         biases, [E, 2I] and [E, H], are not quantized
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from smoe.errors import CheckpointError
from smoe.formats.base import Format
from smoe.formats.mxfp4 import MXFP4_PAIRS
from smoe.memory.arrangement import Spread
from smoe.memory.safetensors_index import Ingredient, StoredTensor
from smoe.memory.store import StoredLayer

FAMILIES = ("gpt_oss",)
_CODES, _SCALES = "_blocks", "_scales"
_CODE_BYTES = 16
"""The size in bytes of one block's codes."""


def has_mxfp4_experts(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json says that experts are in MXFP4, in a family whose files have OpenAI's layout."""
    quantisation = config.get("quantization_config")
    method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
    return method == "mxfp4" and config.get("model_type") in FAMILIES


def form_of(columns: int) -> Format | None:
    """Return the MXFP4 format for rows with this number of columns, or None if a row does not consist of whole
    blocks."""
    return MXFP4_PAIRS if MXFP4_PAIRS.fits(columns) else None


def joined(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return a checkpoint's tensors, with codes and scales of each matrix joined to one weight [E, outputs, columns].

    Raise `CheckpointError` if codes or scales of a matrix are missing, or if their shapes do not match.
    """
    found = {key: tensor for key, tensor in tensors.items() if not key.endswith((_CODES, _SCALES))}
    for key, tensor in tensors.items():
        if key.endswith(_SCALES):
            _other(tensors, key, _SCALES, _CODES)
        elif key.endswith(_CODES):
            name = key.removesuffix(_CODES)
            if name in found:
                raise CheckpointError(
                    f"{tensor.path} holds both {key!r} and {name!r}, which are the same weight; download the "
                    "checkpoint again"
                )
            found[name] = _joined(tensor, _other(tensors, key, _CODES, _SCALES))
    return found


def check_mxfp4(layers: Mapping[int, StoredLayer]) -> None:
    """Raise `CheckpointError` if experts are not in MXFP4 although the configuration says that they are."""
    for experts in layers.values():
        for part in experts.parts:
            tensor = experts.sources[0][part.name][0]
            if len(part.shape) > 1 and tensor.dtype != MXFP4_PAIRS.name:
                raise CheckpointError(
                    f"{tensor.path}: {tensor.key!r} is {tensor.dtype}, but by config.json experts are in MXFP4; if "
                    "they have been converted, remove 'quantization_config' from config.json"
                )


def _other(tensors: Mapping[str, StoredTensor], key: str, ending: str, other: str) -> StoredTensor:
    """Return the scales for the codes `key`, or the codes for the scales `key`."""
    wanted = key.removesuffix(ending) + other
    if wanted not in tensors:
        raise CheckpointError(
            f"{tensors[key].path} has {key!r}, but no shard has the matching {wanted!r}; the checkpoint is incomplete"
        )
    return tensors[wanted]


def _joined(codes: StoredTensor, scales: StoredTensor) -> StoredTensor:
    for tensor in (codes, scales):
        if tensor.dtype != "U8":
            raise CheckpointError(
                f"{tensor.path}: {tensor.key!r} is {tensor.dtype}, and MXFP4 is stored as bytes (U8); download the "
                "checkpoint again"
            )
    *leading, blocks, width = codes.shape if len(codes.shape) == 4 else (0, 0)
    if width != _CODE_BYTES or scales.shape != (*leading, blocks) or not math.prod(codes.shape):
        raise CheckpointError(
            f"{scales.path}: the tensors {scales.key!r} and {codes.key!r} have the shapes {list(scales.shape)} and "
            f"{list(codes.shape)}; they should be [experts, rows, blocks] and [experts, rows, blocks, "
            f"{_CODE_BYTES}]; download the checkpoint again"
        )
    shape = (*leading, blocks * MXFP4_PAIRS.numbers)
    made_of = (
        Ingredient(codes, 1, Spread(_CODE_BYTES, MXFP4_PAIRS.nbytes)),
        Ingredient(scales, 0, Spread(1, MXFP4_PAIRS.nbytes)),
    )
    return replace(codes, dtype=MXFP4_PAIRS.name, shape=shape, made_of=made_of, scheme="mxfp4")
