"""Loads a model's tokenizer from the model's own files, in any format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smoe.models.checkpoint import whole_checkpoint


def load_tokenizer(model: str | Path, revision: str | None = None, chat_template: str | None = None) -> Any:
    """Return a transformers tokenizer for a model, named as in `from_pretrained`: a folder, a GGUF file, a hub id, or
    "demo".

    Load it before the model: building the tokenizer of 150,000 tokens takes 230 MiB for a moment and 50 MiB afterwards,
    which then count as memory of the libraries (`machine/process_memory.py`).

    `chat_template`, a Jinja template, replaces the model's own. Raises `CheckpointError` if the files contain no
    readable tokenizer.
    """
    tokenizer = whole_checkpoint(model, revision).tokenizer()
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer
