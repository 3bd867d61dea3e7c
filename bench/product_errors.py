"""Errors of products with activations in 8 bits, ours and llama.cpp's, on the same blocks and the same activations.

    python -m bench.product_errors .../libggml-cpu.so [--formats Q4_K,Q6_K] [--out FILE.json]

The library is llama.cpp's, built as a shared one for this CPU; its products of one row with one row of blocks
(`vec_dot`) are called. Both get the same bf16 activations: *normal* ones, and *outliers*, where one column in a
hundred is 30 times as large, as in trained models. *Error*: root mean square of the difference from the product in
float64 of the same activations with the numbers that the blocks stand for, as a share of that product's root mean
square. Ours includes rounding its sums to bf16, the type that the next layer reads; llama.cpp's sums are float32.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType

from bench.peers.conditions import machine
from bench.quantised_products import product_in_bytes
from smoe.bounds import INT8
from smoe.formats.activations import fits
from smoe.formats.base import Format
from smoe.formats.registry import FORMATS
from smoe.kernels.isa import ISAS_OF
from tests.formats.blocks import random_rows

COLUMNS, OUTPUTS, ROWS = 2048, 512, 4
OUTLIER_EVERY, OUTLIER_FACTOR = 100, 30.0

_COMMON = tuple(name for name, form in FORMATS.items() if fits(form) and name in GGMLQuantizationType.__members__)
"""The formats that llama.cpp has too, and whose activations are in 8 bits by default."""
_FROM_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
_VEC_DOT = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
    ctypes.c_size_t, ctypes.c_int,
)  # fmt: skip


class _Traits(ctypes.Structure):
    """llama.cpp's `ggml_type_traits_cpu`."""

    _fields_ = (
        ("from_float", _FROM_FLOAT),
        ("vec_dot", _VEC_DOT),
        ("vec_dot_type", ctypes.c_int),
        ("rows_at_a_time", ctypes.c_int64),
    )


@dataclass(frozen=True)
class Rival:
    """llama.cpp's products."""

    library: ctypes.CDLL

    @staticmethod
    def at(path: Path) -> Rival:
        """Load the library at `path` and prepare its tables."""
        library = ctypes.CDLL(str(path))
        library.ggml_cpu_init()
        library.ggml_get_type_traits_cpu.restype = ctypes.POINTER(_Traits)
        return Rival(library)

    def products(self, name: str, data: npt.NDArray[np.uint8], x: torch.Tensor) -> torch.Tensor:
        """Return rows x [N, K] times the rows of blocks `data` [M, bytes] of the format `name`, as float32 [N, M]."""
        kind = self._traits(GGMLQuantizationType[name].value)
        of_activations = self._traits(kind.vec_dot_type)
        out = torch.empty(len(x), len(data), dtype=torch.float32)
        for row, to in zip(x.float(), out, strict=True):
            activations = np.zeros(8 * row.numel(), np.uint8)  # more than any of its formats needs
            of_activations.from_float(row.data_ptr(), activations.ctypes.data, row.numel())
            for number, blocks in enumerate(data):
                place = to.data_ptr() + 4 * number
                kind.vec_dot(row.numel(), place, 0, blocks.ctypes.data, 0, activations.ctypes.data, 0, 1)
        return out

    def _traits(self, kind: int) -> _Traits:
        found: _Traits = self.library.ggml_get_type_traits_cpu(kind).contents
        return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("library", type=Path, help="llama.cpp's libggml-cpu.so")
    parser.add_argument("--formats", default=",".join(_COMMON))
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    given = parser.parse_args()
    rival = Rival.at(given.library.resolve())
    rows = [measure(FORMATS[name], kind, rival) for name in given.formats.split(",") for kind in ("normal", "outliers")]
    for row in rows:
        ours = "  ".join(f"{isa} {100 * error:.3f} %" for isa, error in row["ours"].items())
        print(f"{row['format']:<8} {row['activations']:<9} llama.cpp {100 * row['llama.cpp']:.3f} %   ours: {ours}")
    if given.out:
        given.out.write_text(json.dumps({"machine": machine(), "columns": COLUMNS, "rows": rows}, indent=1) + "\n")


def measure(form: Format, kind: str, rival: Rival) -> dict[str, Any]:
    """Return the errors of one format with one kind of activations, ours by instruction set."""
    data = random_rows(form, OUTPUTS, COLUMNS, seed=0)
    x = activations_of(kind)
    exact = x.double() @ torch.from_numpy(form.decode(data)).double().T
    ours: dict[str, float] = {}
    for isa in ISAS_OF[INT8]:
        if isa.is_here:
            out = torch.empty(ROWS, OUTPUTS, dtype=torch.bfloat16)
            product_in_bytes(form, isa, x, data, out)(OUTPUTS)
            ours[isa.name] = error(out, exact)
    theirs = error(rival.products(form.name, data, x), exact)
    return {"format": form.name, "activations": kind, "llama.cpp": theirs, "ours": ours}


def activations_of(kind: str) -> torch.Tensor:
    """Return bf16 activations [ROWS, COLUMNS]."""
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    if kind == "outliers":
        x[:, ::OUTLIER_EVERY] *= OUTLIER_FACTOR
    return x.bfloat16()


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the root mean square of the difference, as a share of that of the exact products."""
    return float((found.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


if __name__ == "__main__":
    main()
