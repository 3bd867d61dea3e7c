"""The tokenizer of a model, from the model's own files, whichever form they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smoe.models.checkpoint import whole_checkpoint


def load_tokenizer(model: str | Path, revision: str | None = None, chat_template: str | None = None) -> Any:
    """A transformers tokenizer for what `from_pretrained` takes: a folder, a GGUF file, a hub name, or "demo".

    `chat_template`, a Jinja template, replaces the model's own. Raises `CheckpointError` where the files have no
    tokenizer that can be read.
    """
    tokenizer = whole_checkpoint(model, revision).tokenizer()
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer
