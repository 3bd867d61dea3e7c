"""Convert the reference model to GGUF with llama.cpp's own converter.

    python -m bench.peers.gguf LLAMA_CPP_SOURCE MODEL OUT.gguf

The converter recognises a tokenizer by a fingerprint and refuses unknown ones. The benchmark feeds token ids and never
tokenizes, so the answer "gpt-2" (a byte-level BPE) is given in its place.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path


def convert(source: Path, model: Path, out: Path) -> None:
    """Write `model` to `out` in bf16 with the converter in the llama.cpp tree `source`."""
    if not (source / "convert_hf_to_gguf.py").exists():
        raise FileNotFoundError(f"{source} is no llama.cpp source tree: convert_hf_to_gguf.py is missing")
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    text_model = importlib.import_module("conversion.base").TextModel
    text_model.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv = ["convert_hf_to_gguf.py", str(model), "--outfile", str(out), "--outtype", "bf16"]
    importlib.import_module("convert_hf_to_gguf").main()


def main() -> None:
    """Convert what the command line names."""
    parser = argparse.ArgumentParser(description="Convert the reference model to GGUF (bf16).")
    parser.add_argument("source", type=Path, help="llama.cpp source tree")
    parser.add_argument("model", type=Path, help="model directory")
    parser.add_argument("out", type=Path, help="file to write")
    options = parser.parse_args()
    convert(options.source, options.model, options.out)


if __name__ == "__main__":
    main()
