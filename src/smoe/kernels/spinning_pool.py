"""A thread pool for the short computations of a layer, whose threads spin while they wait for a short time.

Products of some hundred microseconds are too short for usual pools. Waking a thread takes 50 to 100 us on a virtual
machine, and if work is divided equally, all threads wait for the one that began last. Here the calling thread writes
tasks to shared memory and begins at once. Threads take units of work one by one from an atomic counter (`tasks.py`). So
helper threads join when they are awake, and no thread waits longer than one unit at the end:

    caller    | publish | unit 0 | unit 1 | unit 3 | unit 5 | unit 7 | done
    helper    . . asleep . . . . | unit 2 | unit 4 | unit 6 |    spins, then sleeps

Helpers look for new work for a while before they sleep, in machine code and without the interpreter lock. A thread that
waits longer than usual takes naps of some 0.1 ms (`tasks.py`). A thread whose core another program has taken can then
run on the core that the nap leaves idle. The bits do not depend on which thread computes a unit (`row_product.py`,
`attention.py`).
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from smoe.cpu_isa import FAMILY, X86
from smoe.kernels import tasks
from smoe.kernels.competition import Competition
from smoe.kernels.isa import widest
from smoe.kernels.jit import Source, compile_functions, cpu_has
from smoe.kernels.many_rows import FEWEST_MANY_ROWS, MOST_MANY_ROWS, ManyRows, instruction_set
from smoe.kernels.matrix import Matrix, own_order
from smoe.kernels.quantised_work import LONE_UNIT, MOST_QUANTISED_ROWS, QuantisedWork, Target
from smoe.kernels.row_product import chain_of
from smoe.kernels.rows import Pairs

if TYPE_CHECKING:
    import torch

UNIT = 256
"""The number of outputs in a unit: 1 MB of weights if K is 2048, some 60 us. If units were smaller, more prefetched
data would be used by another thread than the one that prefetched them."""
OWN_ORDER_GAIN = 1.1
"""The speedup over torch that our own order of sums needs to be used, where torch's bits are not available."""
_SPIN_CYCLES = 20_000
"""How long a helper looks for work before it sleeps, in clock cycles: some 10 us. Longer spinning slows down the
reading threads more than it helps."""
_SPIN_CYCLES_ALONE = 25_000_000
"""How long a helper looks for work if no reading threads and no other programs need the cores, in clock cycles: some
8 ms, longer than the time between two tokens."""
_LATE_CYCLES = 150_000
"""How long a thread waits for another one before it takes naps, in clock cycles, in jobs of one token: some 50 us, the
time of a unit. In jobs of prompts it takes none: naps made prompts of 16 tokens 15 % slower during bursts of other
work."""
_IDLE_CYCLES = 1_500_000
"""How long a helper looks for work before it takes naps, in clock cycles: some 0.5 ms, longer than the Python code
between two jobs of a token."""
_CYCLES_A_SECOND = 3e9
"""The clock rate in Hz that these numbers of cycles assume. It is used to convert them on CPUs whose counter has
another rate."""
WAKING_WEIGHTS = 1 << 20
"""The number of weights below which the work ends before a sleeping thread would wake up."""
_CLOSING_SECONDS = 0.001
MOST_UNIT = 1024
"""The largest number of outputs in a unit for few rows. Units should not be small, because each waits for its first
lines from memory."""
_UNITS_OF_THREAD = 4
"""The number of units per thread for products of few rows with large matrices."""


class Product(NamedTuple):
    """A product to compute: out = x @ matrix, plus the bias if there is one."""

    x: torch.Tensor
    """The row [1, K]."""
    matrix: torch.Tensor
    """The matrix [K, N]."""
    out: torch.Tensor
    """The result [1, N]."""
    bias: torch.Tensor | None = None
    """The bias [N], or None."""
    part: int = 0
    """How many elements along K are summed before such partial sums are added to each other; 0: all of them."""


class Ahead(NamedTuple):
    """Ranges of memory to prefetch, in the form of machine code's arguments (`tasks.py`)."""

    packed: bytes
    """The ranges as words of 8 bytes. Their number is always the same, because a helper may read them while the next
    ones are written.

    A mixture of old and new ranges has an end too, and prefetching a wrong address has no effect.
    """
    pieces: int

    @classmethod
    def of(cls, ranges: Sequence[tuple[int, int]]) -> Ahead:
        """Return an object for `ranges`, (address, bytes) each, in the order in which they will be used. Ranges after
        the first `MOST_RANGES` are ignored."""
        words, pieces = [tasks.NEVER] * (2 * tasks.MOST_RANGES + 1), 0
        for n, (address, nbytes) in enumerate(ranges[: tasks.MOST_RANGES]):
            words[2 * n : 2 * n + 2] = pieces, address
            pieces += nbytes // tasks.PIECE
        return cls(struct.pack(f"{len(words)}q", *words), pieces)


class RowLists:
    """Memory for lists of 8-bit activation rows. A list contains the number of rows, and then for each row its address
    and the address of its product.

    The lists are valid until `begin` is called for the next job.
    """

    def __init__(self) -> None:
        self._words = (ctypes.c_int64 * 0)()
        self._address = self._used = 0

    def begin(self, words: int) -> None:
        """Provide `words` 8-byte words of memory for lists. Earlier lists become invalid."""
        if len(self._words) < words:
            self._words = (ctypes.c_int64 * words)()
            self._address = ctypes.addressof(self._words)
        self._used = 0

    def add(self, rows: Sequence[int], products: Sequence[int]) -> int:
        """Store a list, which takes 1 + 2 * rows words. Return its address. `rows` and `products`: for each activation
        row, its address and that of its product."""
        place, count = self._used, 1 + 2 * len(rows)
        words = [len(rows)] * count
        words[1::2], words[2::2] = rows, products
        struct.pack_into(f"{count}q", self._words, 8 * place, *words)
        self._used += count
        return self._address + 8 * place


_LINE = 64
_FEW_ROWS = 8
"""The largest number of rows for bf16 matrices in our own order with AVX-512; for more, oneDNN is fast."""


class SpinningPool:
    """A pool of the calling thread and `threads - 1` helper threads. Only one thread at a time may use it.

    `several`: support several rows at once. `has_bf16`: support products with bf16 matrices, in torch's order of sums
    on CPUs that are `is_supported`, or with `in_own_order` in our own (`own_order.py`). Quantized formats are always
    supported.
    """

    def __init__(self, threads: int, several: bool = False, has_bf16: bool = True, in_own_order: bool = False) -> None:
        self.threads = threads
        self.several = several or in_own_order
        many = instruction_set() if in_own_order else None
        self.many = None if many is None else ManyRows(self, many)
        """Multiplies many rows in our own order of sums; None: torch is fast, or the order is torch's."""
        self.kind = threads, self.several, has_bf16, in_own_order, self.many is not None
        """The properties on which the bits of results may depend."""
        self.own_order = own_order() if in_own_order else None
        """The functions that multiply bf16 matrices in our own order of sums; None if the order is torch's."""
        isa = widest()
        few = MOST_QUANTISED_ROWS if isa is not None and isa.lanes < 16 else _FEW_ROWS
        self.few_rows = few if self.many is None else FEWEST_MANY_ROWS - 1
        """The largest number of rows that `multiply_rows` multiplies in our own order. For more, another way is
        faster."""
        self.most_own_rows = few if self.many is None else MOST_MANY_ROWS
        """The largest number of rows of an expert that our kernels compute in our own order."""
        self._work, self._work_all, self._serve = _functions(
            has_bf16 and not in_own_order, several and not in_own_order
        )
        self._block = (ctypes.c_int64 * tasks.WORDS)()
        self._address = ctypes.addressof(self._block)
        self._block[tasks.NAP] = _address_of_nap()
        self._block[tasks.IDLE], self._block[tasks.LATE] = _ticks(_IDLE_CYCLES), tasks.NEVER
        self._patience = (ctypes.c_int64 * (threads - 1))(*[_ticks(_SPIN_CYCLES)] * (threads - 1))
        """For each helper, the ticks for which it looks for work before it sleeps."""
        self._woken = threads - 1
        """The number of helpers that are woken for a long job."""
        self._adapted = self._woken, _SPIN_CYCLES
        """That number, and the clock cycles for which those helpers look for work."""
        self._competition = Competition()
        self._progress_at, self._tasks_at = self.word(tasks.PROGRESS), self.word(tasks.HEADER)
        self._ranges_at = self.word(tasks.RANGES)
        self.at_once = self.word(tasks.REACHED)
        """The address of a counter that has always reached 0, for tasks that wait for nothing."""
        self.nowhere = self.word(tasks.NOWHERE)
        self.finished = self.word(tasks.FINISHED)
        self.rows_are_alone = False
        """Whether each of several rows is summed like a single row. Otherwise rows are summed as torch sums several
        rows."""
        self._byte_rows, self._byte_rows_at = bytearray(), 0
        self.row_lists = RowLists()
        self._is_closed = False
        self._is_asleep = [False] * (threads - 1)
        self._alarms = [threading.Lock() for _ in self._is_asleep]
        """The locks on which helpers sleep. A lock is always taken, except from a wake-up call until the helper has
        woken up."""
        self._helpers = [
            threading.Thread(target=self._help, args=(n,), name=f"smoe-multiply-{n}", daemon=True)
            for n in range(threads - 1)
        ]
        for helper, alarm in zip(self._helpers, self._alarms, strict=True):
            alarm.acquire()
            helper.start()

    def adapt(self, has_readers: bool, is_prompt: bool = False) -> None:
        """Adapt the helpers to the following jobs: whether reading threads need the cores meanwhile, and whether the
        jobs are those of a prompt, which have many units.

        If neither reading threads nor other programs need the cores, helpers look for work longer before they sleep: a
        helper that spins occupies the core to which the system would move this thread when another program takes this
        thread's core. If other programs compute, the last helper sleeps except for prompts: whenever such a program
        took its core, all other threads would wait for its unit, several milliseconds in a job of some 50 us.
        """
        self._block[tasks.LATE] = tasks.NEVER if is_prompt else _ticks(_LATE_CYCLES)
        is_busy = not has_readers and self._competition.is_there(is_prompt)
        sleeps = is_busy and not is_prompt
        wanted = self.threads - 1 - sleeps, _SPIN_CYCLES if has_readers or is_busy else _SPIN_CYCLES_ALONE
        if wanted == self._adapted:
            return
        self._adapted, (self._woken, cycles) = wanted, wanted
        for helper in range(self.threads - 1):
            self._patience[helper] = _ticks(cycles) if helper < self._woken else 0

    def fetch_ahead(self, ahead: Ahead) -> None:
        """Set the memory that helpers prefetch while Python runs. It replaces memory that has not been prefetched
        yet."""
        self._block[tasks.SPARE] = 0
        ctypes.memmove(self._ranges_at, ahead.packed, len(ahead.packed))
        self._block[tasks.SPARE] = ahead.pieces << 32

    def word(self, index: int) -> int:
        """Return the address of word number `index` of the shared memory."""
        return self._address + 8 * index

    def multiply(self, products: Sequence[Product]) -> None:
        """Compute products of single rows. Every matrix must be supported (`row_product.fits`), and every x and out
        must be contiguous."""
        for begin in range(0, len(products), tasks.MOST_TASKS):
            self._multiply(products[begin : begin + tasks.MOST_TASKS])

    def _multiply(self, products: Sequence[Product]) -> None:
        fields: list[int] = []
        units = weights = 0
        size = UNIT if len(products) > 1 else LONE_UNIT
        own = self.own_order
        for x, matrix, out, bias, part in products:
            columns, rows = matrix.shape
            to, plus = out.data_ptr(), 0 if bias is None else bias.data_ptr()
            if own is None:
                fields += (units, rows, size, tasks.PRODUCT, self.at_once, 0, self.nowhere)
                fields += (x.data_ptr(), matrix.data_ptr(), to, plus, columns, part or columns)
            else:
                fields += (units, rows, size, tasks.FORMAT, self.at_once, 0, self.nowhere)
                fields += (own.of_rows[0], x.data_ptr(), matrix.data_ptr(), to, columns, plus)
            units += -(-rows // size)
            weights += rows * columns
        self.run(fields, units, is_long=weights >= WAKING_WEIGHTS)

    @contextmanager
    def summing_rows_alone(self) -> Iterator[None]:
        """Sum each of several rows like a single row during the `with` block."""
        self.rows_are_alone = True
        try:
            yield
        finally:
            self.rows_are_alone = False

    def chain(self, columns: int, rows: int) -> int:
        """Return the number of elements along K after which running sums restart, in a product of `rows` rows of
        `columns` elements."""
        return chain_of(columns, 1 if self.rows_are_alone else rows)

    def multiply_rows(self, x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> None:
        """Compute out [M, N] = x [M, K] @ matrix.

        M is at most `MOST_ROWS` in torch's order for M rows, or `few_rows` in our own order.
        """
        columns, outputs = matrix.shape
        if self.own_order is not None:
            self.multiply_quantised(x, [Matrix(matrix.data_ptr(), outputs, columns, self.own_order)], out)
            return
        pairs = Pairs([(x[row].data_ptr(), out[row].data_ptr()) for row in range(len(x))])
        fields = [0, outputs, LONE_UNIT, tasks.ROWS, self.at_once, 0, self.nowhere, pairs.address]
        fields += [matrix.data_ptr(), 0, pairs.count, columns, self.chain(columns, len(x))]
        self.run(fields, -(-outputs // LONE_UNIT), is_long=columns * outputs >= WAKING_WEIGHTS)

    def multiply_quantised(self, x: torch.Tensor, matrices: Sequence[Matrix], out: torch.Tensor) -> None:
        """Compute out [M, N] = x [M, K] times quantized matrices, whose outputs are concatenated. x and out are
        contiguous.

        M is at most `most_quantised_rows(matrices)`.
        """
        stride, column, targets = 2 * out.shape[1], 0, []
        for matrix in matrices:
            targets.append(Target(matrix, out.data_ptr() + 2 * column, stride))
            column += matrix.outputs
        self.multiply_each(x, targets)

    def multiply_each(self, x: torch.Tensor, targets: Sequence[Target]) -> None:
        """Compute the products of x [M, K] with quantized matrices, each of which has an output address of its own."""
        work = QuantisedWork(self, x, targets)
        self.run(work.fields, work.units, is_long=work.weights >= WAKING_WEIGHTS, counts=len(work.layouts))

    def byte_rows(self, nbytes: int) -> int:
        """Return the address of `nbytes` bytes of memory for the 8-bit activation rows of one job. The next job
        overwrites them."""
        if not nbytes:
            return 0
        if len(self._byte_rows) < nbytes + _LINE:
            self._byte_rows = bytearray(nbytes + _LINE)
            self._byte_rows_at = ctypes.addressof(ctypes.c_char.from_buffer(self._byte_rows))
        return -(-self._byte_rows_at // _LINE) * _LINE

    def byte_unit(self, outputs: int) -> int:
        """Return the number of outputs that one thread computes at a time (a unit), in a product of few 8-bit
        activation rows with `outputs` outputs in total."""
        units = -(-outputs // (self.threads * _UNITS_OF_THREAD * LONE_UNIT))
        return min(MOST_UNIT, units * LONE_UNIT)

    def unpack(self, matrices: Sequence[tuple[Matrix, int]]) -> None:
        """Dequantize matrices to bf16. Each is given as (matrix, address of the result)."""
        fields: list[int] = []
        units = weights = 0
        for (address, outputs, columns, products), to in matrices:
            assert products is not None and products.unpack is not None
            fields += (units, outputs, LONE_UNIT, tasks.FORMAT, self.at_once, 0, self.nowhere, products.unpack)
            fields += (to, address, 0, columns, 0)
            units += -(-outputs // LONE_UNIT)
            weights += outputs * columns
        self.run(fields, units, is_long=weights >= WAKING_WEIGHTS)

    def share(self, function: int, arguments: Sequence[int], units: int, is_long: bool) -> None:
        """Call machine code, as `function(arguments, unit)`, for every unit on all threads. `function`: the address of
        the code.

        `is_long`: wake helpers that sleep.
        """
        follow = self.word(tasks.HEADER + tasks.FIELDS)  # the words after this only task
        fields = (0, units, 1, tasks.CALL, self.at_once, 0, self.nowhere, function, follow, 0, 0, 0, 0, *arguments)
        self.run(fields, units, is_long)

    def run(self, fields: Sequence[int], units: int, is_long: bool, counts: int = 0) -> None:
        """Run tasks, given by their concatenated fields, which have `units` units in total.

        The first `counts` progress counters are reset. `is_long`: wake helpers that sleep.
        """
        self.run_packed(struct.pack(f"{len(fields)}q", *fields), 8 * len(fields), units, is_long, counts)

    def run_packed(self, packed: bytes | int, nbytes: int, units: int, is_long: bool, counts: int = 0) -> None:
        """Run tasks as `run` does, with their fields packed in words of 8 bytes. `packed`: the bytes, or the address of
        the bytes."""
        assert nbytes <= 8 * tasks.MOST_TASKS * tasks.FIELDS, "more tasks than there is room for"
        ctypes.memset(self._progress_at, 0, 8 * counts)
        ctypes.memmove(self._tasks_at, packed, nbytes)
        if is_long:
            self._wake()
        self._work(self._address, units)

    def run_all(self, jobs: Sequence[tasks.PoolJob], is_long: bool) -> None:
        """Run several jobs, one after the other. `is_long`: wake helpers that sleep.

        Usually one call of machine code runs them: after a job, whose products have emptied the caches, the Python code
        that starts another takes 0.3 ms. If helpers fall asleep soon, because other programs compute, they are woken
        for every job."""
        if self._adapted[1] < _SPIN_CYCLES_ALONE:
            for job in jobs:
                self.run_packed(job.fields, 8 * job.words, job.units, is_long, job.counts)
            return
        words = [word for job in jobs for word in job]
        assert all(job.words <= tasks.MOST_TASKS * tasks.FIELDS for job in jobs), "more tasks than there is room for"
        if is_long:
            self._wake()
        array = (ctypes.c_int64 * len(words))(*words)
        self._work_all(self._address, ctypes.addressof(array), len(jobs))

    def close(self) -> None:
        """Stop the helper threads."""
        self._is_closed = True
        while any(helper.is_alive() for helper in self._helpers):
            self._wake()
            for helper in self._helpers:
                helper.join(_CLOSING_SECONDS)

    def __enter__(self) -> SpinningPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _wake(self) -> None:
        """Wake the helper threads that sleep. A helper that is just falling asleep misses the current job; the other
        threads then complete the job without it."""
        for helper, is_asleep in enumerate(self._is_asleep):
            if is_asleep and (helper < self._woken or self._is_closed):
                self._is_asleep[helper] = False
                self._alarms[helper].release()

    def _help(self, number: int) -> None:
        patience_at = ctypes.addressof(self._patience) + 8 * number
        while not self._is_closed:
            self._serve(self._address, patience_at)
            self._is_asleep[number] = True
            self._alarms[number].acquire()


@functools.cache
def _functions(has_bf16: bool, several: bool) -> list[Callable[..., None]]:
    """Return the functions `work`, `work_all` and `serve`, which are compiled once per process."""
    pointer, number = ctypes.c_void_p, ctypes.c_longlong
    signatures = {"work": (pointer, number), "work_all": (pointer, pointer, number), "serve": (pointer, pointer)}
    return compile_functions(Source(tasks.source, (has_bf16, several)), signatures)


@functools.cache
def _address_of_nap() -> int:
    """Return the address of the C function `usleep`, by which a thread takes a nap. 0 on systems without it."""
    try:
        return ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value or 0
    except (AttributeError, OSError, TypeError):
        return 0


def _ticks(cycles: int) -> int:
    """Convert a number of clock cycles to ticks of the clock that helper threads read."""
    return cycles if FAMILY == X86 else int(cycles * (_ticks_a_second() / _CYCLES_A_SECOND))


@functools.cache
def _ticks_a_second() -> int:
    found = ctypes.c_int64()
    (tell,) = compile_functions(Source(tasks.source, (False, False)), {"ticks_a_second": (ctypes.c_void_p,)})
    tell(ctypes.addressof(found))
    return found.value


def is_supported() -> bool:
    """Return whether this CPU has the instructions of the bf16 kernel in torch's order, and llvmlite can compile it."""
    return cpu_has("avx512f", "avx512bf16")
