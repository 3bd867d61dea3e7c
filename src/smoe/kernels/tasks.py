"""Distributes work among threads in machine code. Tasks consist of units, which threads take one by one from an atomic
counter.

The memory that the threads share, in words of 8 bytes:

    open        the number of units (upper half), and the first that no thread has taken (lower half); 0 while tasks
                may be changed. Both are in one word, so that a late thread cannot take a unit of the next job
    finished    the number of finished units
    spare       the number of pieces of memory to prefetch (upper half), and the first that no thread has taken (lower
                half): the next weights, for helpers that have nothing else to do
    nap         the address of the C function `usleep`, or 0. A thread that has waited for another thread for `late`
                ticks calls it, and so does a helper that has had no work for `idle` ticks. If another program has the
                core of the thread that is waited for, the system moves that thread to the core that the nap leaves
                idle. If the waiting thread only spun, the other one would have to wait for its turn
    late, idle  numbers of ticks of the clock that all cores share
    progress    counters for the caller, such as the number of finished units of an expert
    tasks       in the order in which their units are taken
    ranges      memory to prefetch: (first piece, address) of each range, with `NEVER` after the last

A task is (first unit, outputs, outputs per unit, kind, wait at, wait for, count at, a, b, c, d, e, f). Its units begin
when the word at the address `wait at` has reached `wait for`. Each unit adds one to the word at `count at` when it is
done. Tasks wait only for earlier tasks, whose units have already been taken, so there is no deadlock. The arguments a
to f depend on the kind:

    kind       a         b           c        d       e    f       computed by
    PRODUCT    x         matrix      out      bias    K    part    row_product.py
    ROWS       pairs     matrix               rows    K    chain   row_product.py, for several rows: (x, out) of each
    GATE       wide      table       inner    I                    elementwise.py
    COMBINE    rows      gains       out      count   H            elementwise.py
    CALL       address   arguments                                 another function(arguments, unit)
    FORMAT     address   x           matrix   out     K    bias    quantised.py, or a function with equal argument types

Only the words of header and progress order the memory accesses of threads, also on weakly ordered CPUs. Publishing and
counting are operations after all earlier writes (seq_cst). Looking and taking are operations before all later reads
(acquire, seq_cst).
"""

from __future__ import annotations

from typing import NamedTuple

from smoe.cpu_isa import FAMILY

OPEN, FINISHED, REACHED, NOWHERE, SPARE, NAP, LATE, IDLE, PROGRESS = 0, 8, 9, 10, 11, 12, 13, 14, 16
"""The indices of words in the header; `open` has a cache line of its own. The counter at `REACHED` is always 0,
and that at `NOWHERE` is never read."""
MOST_COUNTS = 144
HEADER = PROGRESS + MOST_COUNTS
FIELDS = 13
MOST_TASKS = 8192
RANGES = HEADER + MOST_TASKS * FIELDS
MOST_RANGES = 8
NEVER = (1 << 63) - 1
"""A number of a piece at which no range begins, which ends the search for a range; and a number of ticks that never
pass."""
WORDS = RANGES + 2 * MOST_RANGES + 1
"""The number of words in the shared memory."""
PIECE = 4096
"""The number of bytes that a helper prefetches before it looks for work again: 0.2 us."""
PRODUCT, GATE, COMBINE, CALL, ROWS, FORMAT = 0, 1, 2, 3, 4, 5


class PoolJob(NamedTuple):
    """The tasks of a job. `work_all` takes these numbers as consecutive words."""

    fields: int
    """The address of the concatenated fields of the tasks."""
    words: int
    """The number of these fields."""
    units: int
    """The number of units of all tasks."""
    counts: int
    """The number of progress counters that are reset before the job."""


def source(has_bf16: bool, several: bool, family: str = FAMILY) -> str:
    """Return the LLVM text of all functions. The exported ones are `work(block, units)`, `work_all(block, jobs,
    count)`, `serve(block, patience)` and, on aarch64, `ticks_a_second(at)`.

    The task kinds PRODUCT and ROWS require `has_bf16`, which not every CPU supports. ROWS also requires `several`,
    because it takes as long to compile as everything else.
    """
    from smoe.kernels.tasks_code import module_of

    return module_of(has_bf16, several, family)
