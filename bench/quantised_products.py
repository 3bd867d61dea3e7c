"""Products of quantised formats: rates and errors, by instruction set.

    python -m bench.quantised_products [--formats Q4_K,Q6_K] [--activations bf16,int8] [--json]

One thread, a matrix of 30720 x 2048 (larger than the caches), random codes. *Rate*: bytes of the stored matrix a
second, best of the rounds, beside what a plain sum of the same memory reaches. *Error*: root mean square against
float64 on the numbers that the codes stand for, relative to torch's bf16 product on the same numbers; with activations
in 8 bits it has what rounding them costs.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from smoe.bounds import BF16, INT8
from smoe.formats.base import Format
from smoe.formats.registry import FORMATS
from smoe.kernels.isa import ISAS_OF, Isa
from smoe.kernels.jit import compile_functions
from smoe.kernels.quantised import module_of, products_name, unpack_name
from tests.formats.blocks import random_rows

COLUMNS, OUTPUTS, PROOF, ROUNDS = 2048, 30720, 512, 7
_ARGUMENTS = (ctypes.c_void_p,) * 4 + (ctypes.c_longlong,) * 3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Rates and errors of quantised products.")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--activations", default=f"{BF16},{INT8}")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = [
        measure(FORMATS[name], isa, activations, memory_rate())
        for name in given.formats.split(",")
        for activations in given.activations.split(",")
        for isa in ISAS_OF[activations]
        if isa.is_here
    ]
    if given.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'isa':<12} {'x':<4} {'format':<6} {'memory':>7} {'1 row':>7} {'2 rows':>7} {'4 rows':>7} GB/s  "
          f"{'unpack':>7} Gnumbers/s  {'error':>6} of torch's")  # fmt: skip
    for row in rows:
        rates = " ".join(f"{row[f'gb_per_second_{n}']:7.1f}" for n in (1, 2, 4))
        what = f"{row['isa']:<12} {row['activations']:<4} {row['format']:<6}"
        print(f"{what} {row['memory_gb_per_second']:7.1f} {rates}       "
              f"{row['unpacked_giga_per_second']:7.1f}             {row['error_of_torch']:6.2f}")  # fmt: skip


def measure(form: Format, isa: Isa, activations: str, memory: float) -> dict[str, Any]:
    """One format and one kind of activations on one instruction set."""
    names = [*(products_name(form, n) for n in (1, 2, 4)), unpack_name(form)]
    one, two, four, unpack = compile_functions(module_of([form], isa, activations), dict.fromkeys(names, _ARGUMENTS))
    data = random_rows(form, OUTPUTS, COLUMNS, seed=0)
    x = torch.randn(4, COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.empty(4, OUTPUTS, dtype=torch.bfloat16)
    row: dict[str, Any] = {"isa": isa.name, "activations": activations, "format": form.name}
    row["memory_gb_per_second"] = memory
    for count, function in ((1, one), (2, two), (4, four)):
        whole = functools.partial(_product(function, x[:count], data, out[:count]), OUTPUTS)
        row[f"gb_per_second_{count}"] = data.nbytes / best(whole) / 1e9
    tile = torch.empty(OUTPUTS, COLUMNS, dtype=torch.bfloat16)
    seconds = best(lambda: unpack(tile.data_ptr(), data.ctypes.data, None, None, 0, OUTPUTS, COLUMNS))
    row["unpacked_giga_per_second"] = tile.numel() / seconds / 1e9
    _product(one, x[:1], data, out[:1])(PROOF)
    row["error_of_torch"] = relative_error(form, data[:PROOF], x[:1], out[:1, :PROOF])
    return row


def relative_error(form: Format, data: npt.NDArray[np.uint8], x: torch.Tensor, ours: torch.Tensor) -> float:
    """Ours against torch's, both against float64."""
    numbers = torch.from_numpy(form.decode(data))
    exact = x.double() @ numbers.double().T
    errors = [(each.double() - exact).square().mean().sqrt() for each in (ours, x @ numbers.bfloat16().T)]
    return float(errors[0] / errors[1])


def _product(
    function: Callable[..., None], x: torch.Tensor, data: npt.NDArray[np.uint8], out: torch.Tensor
) -> Callable[[int], None]:
    """Calls the function for so many outputs."""
    if len(x) == 1:
        return lambda end: function(x.data_ptr(), data.ctypes.data, out.data_ptr(), None, 0, end, COLUMNS)
    places = [address for row, to in zip(x, out, strict=True) for address in (row.data_ptr(), to.data_ptr())]
    words = (ctypes.c_int64 * len(places))(*places)
    return lambda end: function(ctypes.addressof(words), data.ctypes.data, None, None, 0, end, COLUMNS)


def memory_rate() -> float:
    """GB/s that one thread reads: torch's sum of 256 MiB."""
    with_threads, data = torch.get_num_threads(), torch.ones(2**25, dtype=torch.int64)
    torch.set_num_threads(1)
    seconds = best(lambda: data.sum())
    torch.set_num_threads(with_threads)
    return data.nbytes / seconds / 1e9


def best(job: Callable[[], object]) -> float:
    """Seconds of the fastest round."""
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


if __name__ == "__main__":
    main()
