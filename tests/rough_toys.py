"""Models of families that do not exist: a config.json, and the header of a GGUF file without its data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from tests.published_configs import QWEN3_30B, Published

NEW_FAMILY = {"model_type": "newmoe", "architectures": ["NewMoeForCausalLM"]}
LAYERS, EXPERTS, HIDDEN, INNER, VOCABULARY = 3, 8, 256, 512, 1000
MATRIX = HIDDEN * INNER
Q4_K, Q8_0 = 144 / 256, 34 / 32
"""Bytes of an element."""


def new_folder(folder: Path, **more: Any) -> Path:
    """A folder with the config.json of a family that does not exist, with the sizes of Qwen3-30B-A3B. A field whose
    value is None is left out."""
    fields = {**QWEN3_30B, **NEW_FAMILY, **more}
    return Published({name: value for name, value in fields.items() if value is not None}).write(folder)


def new_gguf(
    path: Path,
    architecture: str = "foomoe",
    entries: Mapping[str, Any] | None = None,
    more: Mapping[str, list[Any]] | None = None,
) -> Path:
    """A GGUF file of an architecture that does not exist: its header, and a hole where the data would be. Entries are
    whole numbers or lists, and zero leaves one out. `more`: lists whose names do not begin with the architecture."""
    writer = gguf.GGUFWriter(path, architecture)
    stated = {
        "block_count": LAYERS,
        "embedding_length": HIDDEN,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "context_length": 4096,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
    }
    for name, value in {**stated, **(entries or {})}.items():
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{name}", value)
        elif value:
            writer.add_uint32(f"{architecture}.{name}", value)
    for name, listed in (more or {}).items():
        writer.add_array(name, listed)
    _add(writer, "token_embd.weight", (VOCABULARY, HIDDEN), Type.Q8_0)
    _add(writer, "output.weight", (VOCABULARY, HIDDEN), Type.Q8_0)
    for layer in range(LAYERS):
        _add(writer, f"blk.{layer}.attn_qkv.weight", (512, HIDDEN), Type.Q8_0)
        _add(writer, f"blk.{layer}.attn_norm.weight", (HIDDEN,), Type.F32)
        _add(writer, f"blk.{layer}.ffn_gate_inp.weight", (EXPERTS, HIDDEN), Type.F32)
        _add(writer, f"blk.{layer}.ffn_gate_exps.weight", (EXPERTS, INNER, HIDDEN), Type.Q4_K)
        _add(writer, f"blk.{layer}.ffn_up_exps.weight", (EXPERTS, INNER, HIDDEN), Type.Q4_K)
        _add(writer, f"blk.{layer}.ffn_down_exps.weight", (EXPERTS, HIDDEN, INNER), Type.Q8_0)
        _add(writer, f"blk.{layer}.ffn_down_shexp.weight", (HIDDEN, INNER), Type.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    size = path.stat().st_size
    data = sum(-(-info.nbytes // 32) * 32 for infos in writer.tensors for info in infos.values())
    writer.close()
    with path.open("r+b") as file:
        file.truncate(-(-size // 32) * 32 + data)
    return path


def _add(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], kind: Type) -> None:
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    count = int(np.prod(shape)) // elements * nbytes
    if kind is Type.F32:
        writer.add_tensor_info(name, shape, np.dtype(np.float32), count)
    else:
        rows = (*shape[:-1], shape[-1] // elements * nbytes)
        writer.add_tensor_info(name, rows, np.dtype(np.uint8), count, raw_dtype=kind)
