"""Products of many rows with bf16 matrices in float32, for x86 CPUs without bf16 dot products (grade E1).

On these CPUs torch multiplies bf16 rows at a tenth of the rate of float32 instructions. Here rows are spread over the
lanes of registers, so that a weight is one number that is copied to all lanes:

    rows       | k of row 0 | k of row 1 | ...    packed once for all outputs: transposed, in float32, in panels of
                                                  three registers of rows
    weights    | k | k+1 | ...                    128 columns of 32 outputs at a time, converted once for all rows
    tile       4 outputs x 3 registers of rows    12 running sums: sum[n, row] += weight[n, k] * row[k]

A tile needs no sums within a register, and weights need not be transposed. A product of two bf16 numbers is exact in
float32, so only the sums are rounded; each is one chain of additions in ascending order of k. So a row's bits depend
neither on the number of rows nor on the thread. The bias is added before the only rounding to bf16. When a model is
loaded, errors are compared with torch's (`proof.py`). Measurements are in docs/log/kernels.md.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, NamedTuple

from smoe.cpu_isa import X86
from smoe.kernels import tasks
from smoe.kernels.isa import Isa, widest
from smoe.kernels.jit import Source, address_of, compile_functions
from smoe.kernels.matrix import Matrix

if TYPE_CHECKING:
    import torch

    from smoe.kernels.spinning_pool import SpinningPool

MOST_MANY_ROWS = 512
"""The largest number of rows that are packed at once. More rows are multiplied in blocks."""
FEWEST_MANY_ROWS = 9
"""The least number of rows for which this kernel is the fastest."""
OUTPUTS = 32
"""The number of outputs that one thread computes at a time (a unit)."""
_WAKING_PRODUCTS = 1 << 22
"""The number of multiplications below which the work ends before a sleeping thread would wake up."""
LINE = 64
"""The alignment of packed rows, in bytes."""
_ARGUMENTS = (ctypes.c_void_p,) * 4 + (ctypes.c_longlong,) * 3


class ManyRowsCode(NamedTuple):
    """The addresses of the machine code for many rows."""

    pack: int
    products: int


def instruction_set() -> Isa | None:
    """Return the instruction set with which this CPU multiplies many rows; None if torch is fast, or if our kernel was
    not measured."""
    isa = widest()
    return None if isa is None or isa.family != X86 or isa.has_bf16_dots else isa


@functools.cache
def compiled(isa: Isa) -> ManyRowsCode:
    """Return the machine code for an instruction set, which is compiled once per process."""
    from smoe.kernels import many_rows_code as made  # requires llvmlite, which is optional

    names = made.PACK, made.PRODUCTS
    found = compile_functions(Source(made.module_of, (isa,)), dict.fromkeys(names, _ARGUMENTS))
    return ManyRowsCode(*map(address_of, found))


def fits(matrix: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Return whether the kernel supports a matrix [K, N] and a bias [N]: bf16 on the CPU, and the matrix contiguous
    along K."""
    import torch

    columns = matrix.shape[0]
    is_rows = matrix.stride() == (1, columns) and matrix.dtype is torch.bfloat16 and matrix.device.type == "cpu"
    return is_rows and (bias is None or (bias.dtype is matrix.dtype and bias.is_contiguous()))


class PackedProduct(NamedTuple):
    """A product of rows that are packed first."""

    matrix: Matrix
    given: int
    """The address of the list of rows (`RowLists`): for each row, its address and that of its outputs."""
    rows: int
    """The number of rows, at most `MOST_MANY_ROWS`."""
    packed: int
    """The address of memory for the packed rows."""
    wait_at: int
    """The address of the counter for which the first task waits."""
    wait_for: int
    """The number that the counter must reach."""
    packed_at: int
    """The address of the counter of packed registers: the counter at `wait_at`, or one that begins with `wait_for`."""


def aligned(address: int) -> int:
    """Return the address of the first cache line that begins at `address` or after it."""
    return -(-address // LINE) * LINE


class ManyRows:
    """Multiplies many rows on the threads of a pool, one product at a time."""

    def __init__(self, pool: SpinningPool, isa: Isa) -> None:
        self.pool = pool
        self.isa = isa

    def multiply(
        self, x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """Compute out [M, N] = x [M, K] @ matrix [K, N], plus the bias [N] if there is one. The operands must be as in
        `fits`, and x and out contiguous bf16."""
        for some, to in zip(x.split(MOST_MANY_ROWS), out.split(MOST_MANY_ROWS), strict=True):
            if len(some):
                self._multiply(some, matrix, to, bias)

    def _multiply(self, x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        pool, (columns, outputs), rows = self.pool, matrix.shape, len(x)
        # the memory ends with the product: workspace that no pass uses is lent to experts (`runtime/reserve.py`)
        memory = x.new_empty((self.packed_bytes(rows, columns) + LINE) // x.itemsize)
        pool.row_lists.begin(1 + 2 * rows)
        x_at, out_at = x.data_ptr(), out.data_ptr()
        given = pool.row_lists.add(
            range(x_at, x_at + 2 * columns * rows, 2 * columns), range(out_at, out_at + 2 * outputs * rows, 2 * outputs)
        )
        done = pool.word(tasks.PROGRESS)
        task = PackedProduct(
            Matrix(matrix.data_ptr(), outputs, columns), given, rows, aligned(memory.data_ptr()), pool.at_once, 0, done
        )
        fields, units = self.fields(task, 0, pool.nowhere, 0 if bias is None else bias.data_ptr())
        pool.run(fields, units, is_long=rows * columns * outputs >= _WAKING_PRODUCTS, counts=1)

    def packed_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of `rows` packed rows of `columns` numbers. Rows fill whole registers."""
        return 4 * columns * self._registers(rows) * self.isa.lanes

    def fields(self, task: PackedProduct, first: int, count_at: int, bias: int = 0) -> tuple[list[int], int]:
        """Return the fields of two tasks, which pack rows and multiply the packed rows, and the number of their units.

        `first`: the number of the first unit. `count_at`: the address of the counter of finished units of the product.
        `bias`: the address of the bias [N] in bf16; 0 for none.
        """
        registers, (pack, products) = self._registers(task.rows), compiled(self.isa)
        (address, outputs, columns, _), given, packed = task.matrix, task.given, task.packed
        fields = [first, registers, 1, tasks.FORMAT, task.wait_at, task.wait_for, task.packed_at, pack]
        fields += [given, 0, packed, columns, 0]
        fields += [first + registers, outputs, OUTPUTS, tasks.FORMAT, task.packed_at, task.wait_for + registers]
        fields += [count_at, products, given, address, packed, columns, bias]
        return fields, registers + -(-outputs // OUTPUTS)

    def _registers(self, rows: int) -> int:
        return -(-rows // self.isa.lanes)
