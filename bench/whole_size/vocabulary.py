"""The tokenizer of a GGUF file, copied into another file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFValueType, GGUFWriter

_PADDING, _UNUSED = "[PAD{}]", 5
"""The name and the type that llama.cpp's converter gives to entries that a model has and its tokenizer lacks."""
_TOKENS, _TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"


def copy_tokenizer(source: Path, writer: GGUFWriter, count: int) -> None:
    """Write the tokenizer of a file, with as many entries as the model has.

    Raises `ValueError` if the file has no tokenizer, or one with more entries.
    """
    entries = {key: field for key, field in GGUFReader(source).fields.items() if key.startswith("tokenizer.")}
    if _TOKENS not in entries:
        raise ValueError(f"{source} holds no vocabulary; give a GGUF file that has a tokenizer")
    lacking = count - len(entries[_TOKENS].data)
    if lacking < 0:
        raise ValueError(f"{source} has {-lacking} tokens more than the model's {count}; give a file of its family")
    more: dict[str, list[Any]] = {
        _TOKENS: [_PADDING.format(count - lacking + n) for n in range(lacking)],
        _TYPES: [_UNUSED] * lacking,
    }
    for key, field in entries.items():
        if field.types[0] is GGUFValueType.ARRAY:
            writer.add_array(key, [*_elements(field), *more.get(key, [])])
        else:
            writer.add_key_value(key, field.contents(), field.types[0])


def _elements(field: Any) -> list[Any]:
    """Return the elements of an array; texts as bytes, because they need not be UTF-8."""
    if field.types[-1] is GGUFValueType.STRING:
        return [bytes(field.parts[index]) for index in field.data]
    return [field.parts[index].tolist()[0] for index in field.data]
