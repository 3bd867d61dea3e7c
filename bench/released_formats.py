"""Quantised releases: what it takes to bring an expert's codes and scales together, beside copying as many bytes.

    python -m bench.released_formats [--inner 768] [--hidden 2048] [--json]

An expert of Qwen3-30B-A3B's sizes with random weights, in every form that is read, in memory; one thread, best of the
rounds. *Arranged*: from the stored tensors to blocks, `memory/arrangement.py`. *Copied*: those bytes, one after the
other: what loading an expert that lies in one piece takes beside the disk. Rates and errors of the products themselves
are `bench.quantised_products`'.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.quantised_products import best
from smoe.machine.processor import processor_name
from smoe.memory.safetensors_index import StoredTensor, index_checkpoint
from smoe.models.released_schemes import scheme_of
from smoe.models.released_tensors import joined
from tests import released_toy


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name, said in released_toy.SCHEMES.items():
        scheme = scheme_of({"quantization_config": said}, Path("config.json"))
        assert scheme is not None
        if not scheme.is_reordered:
            row = measured(said, options.inner, options.hidden)
            rows.append({"form": name, **row})
            if not options.json:
                print(
                    f"{name:28} {row['bytes'] / 1e6:6.2f} MB   arranged {row['arranged_ms']:6.2f} ms   "
                    f"copied {row['copied_ms']:5.2f} ms   {row['gb_per_second']:5.2f} GB/s",
                    flush=True,
                )
    if options.json:
        sizes = {"inner": options.inner, "hidden": options.hidden}
        print(json.dumps({"bench": "released_formats", "processor": processor_name(), **sizes, "forms": rows}))


def measured(said: dict[str, Any], inner: int, hidden: int) -> dict[str, float]:
    """One form."""
    generator = torch.Generator().manual_seed(0)
    tensors: released_toy.Tensors = {}
    for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        tensors |= released_toy.quantised(torch.randn(shape, generator=generator), said, name)[0]
    with tempfile.TemporaryDirectory() as place:
        config = {"quantization_config": said}
        released_toy.write(Path(place), tensors, config)
        scheme = scheme_of(config, Path(place))
        assert scheme is not None
        matrices = [each for each in joined(index_checkpoint(Path(place)), scheme).values() if each.made_of]
        parts = [(each, _bytes(each.tensor)) for matrix in matrices for each in matrix.made_of]
    slot = np.zeros(sum(len(data) for _, data in parts) * 2, np.uint8)
    together = np.concatenate([data for _, data in parts])

    def arranged() -> None:
        for each, data in parts:
            assert each.arrangement is not None
            each.arrangement.put(data, slot.data, each.place, 0)

    def copied() -> None:
        slot[: len(together)] = together

    seconds = best(arranged)
    return {
        "bytes": float(len(together)),
        "arranged_ms": 1e3 * seconds,
        "copied_ms": 1e3 * best(copied),
        "gb_per_second": len(together) / seconds / 1e9,
    }


def _bytes(tensor: StoredTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.fromfile(tensor.path, np.uint8, tensor.nbytes, offset=tensor.offset)


if __name__ == "__main__":
    main()
