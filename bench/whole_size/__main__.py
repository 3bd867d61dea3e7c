"""Write one model's file; the last line is JSON."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

from bench.whole_size import __doc__ as description
from bench.whole_size.geometry import PUBLISHED
from bench.whole_size.mixture import types_of
from bench.whole_size.tensors import tensors_of
from bench.whole_size.writer import file_bytes, write_file
from smoe.units import format_bytes


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PUBLISHED, help="model and mixture")
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument(
        "--vocabulary",
        type=Path,
        required=True,
        help="a GGUF file with the model's tokenizer: of a model of the family, or one of models/ggml-vocab-*.gguf in "
        "llama.cpp's sources",
    )
    parser.add_argument("--layers", type=int, help="fewer layers than the published model has")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Write the file that the command line names."""
    options = parse()
    geometry = PUBLISHED[options.name]
    if options.layers is not None:
        geometry = replace(geometry, layers=options.layers)
    tensors = tensors_of(geometry)
    needed = file_bytes(tensors, types_of(geometry, tensors))
    free = shutil.disk_usage(options.out.absolute().parent).free
    if needed > free:
        raise SystemExit(
            f"the file takes {format_bytes(needed)}, but {format_bytes(free)} are free; give fewer --layers"
        )
    began = time.monotonic()
    written = write_file(options.out, options.name, geometry, options.vocabulary, options.seed)
    print(json.dumps({"name": options.name, "bytes": written, "seconds": round(time.monotonic() - began, 1)}))


if __name__ == "__main__":
    main()
