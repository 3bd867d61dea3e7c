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
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from smoe.bounds import BF16, INT8
from smoe.formats.activations import fits
from smoe.formats.base import Format
from smoe.formats.registry import FORMATS
from smoe.kernels.byte_layout import Layout
from smoe.kernels.isa import ISAS_OF, Isa
from smoe.kernels.spinning_pool import RowLists
from tests.formats.blocks import random_rows
from tests.kernels.products import compiled, compiled_in_bytes

COLUMNS, OUTPUTS, PROOF, ROUNDS = 2048, 30720, 512, 7
ROWS = (1, 2, 4, 16, 128)


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
    print(f"{'isa':<12} {'x':<4} {'format':<10} {'memory':>7} {'1 row':>7} {'2':>7} {'4':>7} GB/s  {'16':>5} {'128':>5} "  # noqa: E501
          f"G products/s  {'unpack':>7} G/s  {'error':>6} of torch's")  # fmt: skip
    for row in rows:
        rates = " ".join(f"{row[f'gb_per_second_{n}']:7.1f}" for n in ROWS[:3])
        many = " ".join(f"{row.get(f'giga_products_per_second_{n}', math.nan):5.0f}" for n in ROWS[3:])
        what = f"{row['isa']:<12} {row['activations']:<4} {row['format']:<10}"
        print(f"{what} {row['memory_gb_per_second']:7.1f} {rates}       {many}               "
              f"{row['unpacked_giga_per_second']:7.1f}      {row['error_of_torch']:6.2f}")  # fmt: skip


def measure(form: Format, isa: Isa, activations: str, memory: float) -> dict[str, Any]:
    """One format and one kind of activations on one instruction set."""
    in_bytes = activations == INT8 and fits(form)
    data = random_rows(form, OUTPUTS, COLUMNS, seed=0)
    x = torch.randn(max(ROWS), COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.empty(max(ROWS), OUTPUTS, dtype=torch.bfloat16)
    row: dict[str, Any] = {"isa": isa.name, "activations": activations, "format": form.name}
    row["memory_gb_per_second"] = memory
    for count in ROWS if in_bytes else ROWS[:3]:
        outputs = OUTPUTS if count <= 4 else OUTPUTS // count
        product = (product_in_bytes if in_bytes else _in_bf16)(form, isa, x[:count], data, out[:count])
        seconds = best(functools.partial(product, outputs))
        row[f"gb_per_second_{count}"] = data.nbytes * outputs / OUTPUTS / seconds / 1e9
        row[f"giga_products_per_second_{count}"] = count * outputs * COLUMNS / seconds / 1e9
        if count == 1:
            product(PROOF)
            row["error_of_torch"] = relative_error(form, data[:PROOF], x[:1], out[:1, :PROOF])
    unpack = compiled(form, isa)["unpack"]
    tile = torch.empty(OUTPUTS, COLUMNS, dtype=torch.bfloat16)
    seconds = best(lambda: unpack(tile.data_ptr(), data.ctypes.data, None, None, 0, OUTPUTS, COLUMNS))
    row["unpacked_giga_per_second"] = tile.numel() / seconds / 1e9
    return row


def relative_error(form: Format, data: npt.NDArray[np.uint8], x: torch.Tensor, ours: torch.Tensor) -> float:
    """Ours against torch's, both against float64."""
    numbers = torch.from_numpy(form.decode(data))
    exact = x.double() @ numbers.double().T
    errors = [(each.double() - exact).square().mean().sqrt() for each in (ours, x @ numbers.bfloat16().T)]
    return float(errors[0] / errors[1])


def _in_bf16(
    form: Format, isa: Isa, x: torch.Tensor, data: npt.NDArray[np.uint8], out: torch.Tensor
) -> Callable[[int], object]:
    """Calls the function for so many outputs of rows of bf16."""
    function = compiled(form, isa)[len(x)]
    if len(x) == 1:
        return lambda end: function(x.data_ptr(), data.ctypes.data, out.data_ptr(), None, 0, end, COLUMNS)
    places = [address for row, to in zip(x, out, strict=True) for address in (row.data_ptr(), to.data_ptr())]
    words = (ctypes.c_int64 * len(places))(*places)
    return lambda end: function(ctypes.addressof(words), data.ctypes.data, None, None, 0, end, COLUMNS)


def product_in_bytes(
    form: Format, isa: Isa, x: torch.Tensor, data: npt.NDArray[np.uint8], out: torch.Tensor
) -> Callable[[int], object]:
    """The same of rows in 8 bits, which are made once, so calls take no time for that."""
    functions, count = compiled_in_bytes(form, isa), len(x)
    rows = torch.zeros(count, Layout.of(form).nbytes(COLUMNS), dtype=torch.uint8)
    functions["rows"](x.data_ptr(), None, rows.data_ptr(), None, 0, count, COLUMNS)
    lists = RowLists()
    lists.begin(1 + 2 * count)
    given = lists.add([row.data_ptr() for row in rows], [to.data_ptr() for to in out])

    def product(end: int) -> None:
        assert rows.data_ptr() and lists  # memory that `given` refers to
        functions["products"](given, data.ctypes.data, None, None, 0, end, COLUMNS)

    return product


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
