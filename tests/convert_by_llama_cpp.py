"""Runs llama.cpp's converter on folders: `python convert_by_llama_cpp.py SOURCE FOLDER...` writes `model.gguf` in each.

It runs in a process of its own, because the converter needs the `gguf` package of its own sources. The toys have no
tokenizers, so the files have none.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any


def main(source: str, *folders: str) -> None:
    """Convert every folder to F32. The first error ends the program."""
    sys.path[:0] = [f"{source}/gguf-py", source]
    import gguf
    from conversion import ModelBase, get_model_class  # type: ignore[import-not-found]

    logging.disable(logging.INFO)
    ModelBase.load_hparams = staticmethod(_fields)  # as they are: transformers would rewrite them
    for folder in map(Path, folders):
        family = get_model_class(_fields(folder)["architectures"][0])
        for each in family.__mro__:
            if "set_vocab" in vars(each):
                each.set_vocab = lambda self: None
        family.no_mtp = True
        family(folder, gguf.LlamaFileType.ALL_F32, folder / "model.gguf", use_temp_file=False).write()


def _fields(folder: Path, *_: Any, **__: Any) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return fields


if __name__ == "__main__":
    main(*sys.argv[1:])
