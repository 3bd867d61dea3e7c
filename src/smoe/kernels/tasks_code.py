"""Generates the machine code of `tasks.py`: threads that take units of work, and compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from smoe.cpu_isa import AARCH64, X86
from smoe.kernels import row_product
from smoe.kernels.builder import Code, text_of
from smoe.kernels.elementwise_code import add_combine, add_gate
from smoe.kernels.isa import AVX512, NEON, Isa
from smoe.kernels.kinds import BIT, BYTE, LONG, POINTER, WORD, Value
from smoe.kernels.row_product_code import add_row_product, add_row_products
from smoe.kernels.tasks import (
    CALL,
    COMBINE,
    FIELDS,
    FINISHED,
    GATE,
    HEADER,
    IDLE,
    LATE,
    NAP,
    OPEN,
    PIECE,
    PRODUCT,
    PROGRESS,
    RANGES,
    ROWS,
    SPARE,
    PoolJob,
)

_LINE = 64
_STRIP = 32
"""The number of outputs that are computed for all rows before the following ones, so that their weights stay in the
second-level cache."""
_LOWER = (1 << 32) - 1
_NAP_MICROSECONDS = 50
"""The duration of a nap. With the system's own delays it is some 0.1 ms."""
_ARGUMENTS = FIELDS - 6
"""The index of a task's first argument among its fields."""


def module_of(has_bf16: bool, several: bool, family: str) -> str:
    """Return the LLVM text of all functions, whose arguments are those of `tasks.source`."""
    isa, module = NEON if family == AARCH64 else AVX512, ir.Module()
    assert not (has_bf16 and family == AARCH64), "torch's order is known on x86 only"
    if has_bf16:
        add_row_product(module, isa)
        for rows in (2, 4) if several else ():
            add_row_products(module, isa, rows)
    add_gate(module, isa)
    add_combine(module, isa)
    _add_unit(module, isa, has_bf16, several and has_bf16)
    for function in (_add_take, _add_work, _add_work_all, _add_fetch, _add_serve):
        function(module, isa)
    if family == AARCH64:
        _add_ticks(module, isa)
    return text_of(module, isa.attributes)


def _pause(code: Code) -> None:
    """Pause the thread for a moment."""
    if code.isa.family == X86:
        code.intrinsic("llvm.x86.sse2.pause", ir.FunctionType(ir.VoidType(), []), [])
    else:  # the instruction named yield ends at once on most CPUs
        code.intrinsic("llvm.aarch64.isb", ir.FunctionType(ir.VoidType(), [WORD]), [ir.Constant(WORD, 15)])


def _now(code: Code) -> Value:
    """Read a clock which all cores share. It counts cycles, or ticks of `ticks_a_second`."""
    if code.isa.family == X86:
        return code.intrinsic("llvm.readcyclecounter", ir.FunctionType(LONG, []), [])
    return code.system_register("CNTVCT_EL0")  # LLVM's own steady counter is always 0 here


def _add_ticks(module: ir.Module, isa: Isa) -> None:
    code = Code(module, isa, "ticks_a_second", ("*at",))
    code.store(code.system_register("CNTFRQ_EL0"), code.arguments[0], 8)
    code.end()


def _fields(code: Code, task: Value, first: int, kinds: Sequence[ir.Type]) -> list[Value]:
    """Return fields of a task, from field number `first` on."""
    return [code.load(kind, code.element(task, LONG, first + n), 8) for n, kind in enumerate(kinds)]


def _add_unit(module: ir.Module, isa: Isa, has_bf16: bool, several: bool) -> None:
    """Add the function that computes one unit of a task."""
    code = Code(module, isa, "unit", ("*task", "begin", "end"), is_local=True)
    task, begin, end = code.arguments
    build = code.build
    a, b, c, d, e, f = _fields(code, task, _ARGUMENTS, [POINTER] * 3 + [LONG] * 3)
    (kind,) = _fields(code, task, 3, [LONG])
    labels = ([PRODUCT] if has_bf16 else []) + ([ROWS] if several else []) + [None, GATE, COMBINE, CALL]
    blocks = {label: code.function.append_basic_block(f"kind{label}") for label in labels}
    chosen = build.switch(kind, blocks[None])
    for label, block in blocks.items():
        if label is not None:
            chosen.add_case(code.number(label), block)

    def product() -> None:
        bias = build.inttoptr(d, POINTER)
        code.call("row_product", [a, b, c, bias, begin, end, e, f, code.number(row_product.CHAIN)])

    def with_format() -> None:
        code.call_at(a, [b, c, build.inttoptr(d, POINTER), build.inttoptr(f, POINTER), begin, end, e])

    bodies: dict[int | None, Callable[[], object]] = {
        PRODUCT: product,
        ROWS: lambda: _multiply_rows(code, begin, end, (a, b, d, e, f)),
        None: with_format,
        GATE: lambda: code.call("gate", [a, b, c, d, begin, end]),
        COMBINE: lambda: code.call("combine", [a, b, c, d, e, begin, end]),
        CALL: lambda: code.call_at(a, [b, begin]),
    }
    for label, block in blocks.items():
        build.position_at_end(block)
        bodies[label]()
        code.end()


def _multiply_rows(code: Code, begin: Value, end: Value, fields: Sequence[Value]) -> None:
    """Multiply several activation rows with a matrix, strip by strip of outputs: four rows at once, then two, then
    one."""
    build, (pairs, matrix, rows, columns, chain) = code.build, fields

    def strip(n: Value, _: list[Value]) -> list[Value]:
        until = code.smaller(build.add(n, code.number(_STRIP)), end)
        bounds = [n, until, columns, columns, chain]

        def several(r: Value, count: int) -> Value:
            at = code.element(pairs, LONG, build.mul(r, code.number(2)))
            code.call(f"row_product_{count}", [at, matrix, *bounds])
            return build.add(r, code.number(count))

        (r,) = code.loop_while(
            [code.number(0)],
            lambda r: build.icmp_signed(">=", build.sub(rows, r[0]), code.number(4)),
            lambda r: [several(r[0], 4)],
        )
        (r,) = code.either(build.icmp_signed(">=", build.sub(rows, r), code.number(2)), [r], lambda: [several(r, 2)])

        def one() -> Sequence[Value]:
            at = code.element(pairs, LONG, build.mul(r, code.number(2)))
            x, out = code.load(POINTER, at, 8), code.load(POINTER, code.element(at, LONG, 1), 8)
            code.call("row_product", [x, matrix, out, ir.Constant(POINTER, None), *bounds])
            return ()

        code.either(build.icmp_signed("==", build.sub(rows, r), code.number(1)), (), one)
        return []

    code.repeat(begin, end, _STRIP, [], strip)


def _add_take(module: ir.Module, isa: Isa) -> None:
    """Add the function by which a thread takes and computes units of work until none is left."""
    code = Code(module, isa, "take", ("*block",), is_local=True)
    (block,) = code.arguments
    build = code.build
    opened, finished, tasks_at = (code.element(block, LONG, index) for index in (OPEN, FINISHED, HEADER))
    take, mine, done = (code.function.append_basic_block(name) for name in ("take", "mine", "done"))
    build.branch(take)
    build.position_at_end(take)
    taken = code.counted(opened)
    unit = build.and_(taken, code.number(_LOWER))
    build.cbranch(build.icmp_unsigned("<", unit, build.lshr(taken, code.number(32))), mine, done)
    build.position_at_end(mine)
    task, begin, outputs, size = _task_of(code, tasks_at, unit)
    wait_at, wait_for, count_at = _fields(code, task, 4, [POINTER, LONG, POINTER])
    _wait(code, block, wait_at, lambda so_far: build.icmp_signed("<", so_far, wait_for))
    end = code.smaller(build.add(begin, size), outputs)
    code.call("unit", [task, begin, end])
    for counter in (count_at, finished):
        code.counted(counter)
    build.branch(take)
    build.position_at_end(done)
    code.end()


def _task_of(code: Code, tasks_at: Value, unit: Value) -> list[Value]:
    """Return the task that a unit belongs to: its address, the unit's first output, the number of all outputs, and
    that of a unit."""
    build, found = code.build, list[Value]()

    def look(values: list[Value]) -> tuple[Sequence[Value], Value]:
        following = code.element(values[0], LONG, FIELDS)
        first, outputs, size = _fields(code, values[0], 0, [LONG] * 3)
        begin = build.mul(build.sub(unit, first), size)
        found.extend((values[0], begin, outputs, size))
        return [following], build.icmp_signed(">=", begin, outputs)

    code.loop_until([tasks_at], look)
    return found


def _wait(code: Code, block: Value, at: Value, is_short: Callable[[Value], Value]) -> None:
    """Wait while the number at an address is too small."""
    since = _now(code)

    def pause(_: list[Value]) -> Sequence[Value]:
        _pause(code)
        _nap_if_late(code, block, since, code.load(LONG, code.element(block, LONG, LATE), 8))
        return ()

    code.loop_while([], lambda _: is_short(code.observed(at)), pause)


def _nap_if_late(code: Code, block: Value, since: Value, most: Value) -> None:
    """Take a nap if more than `most` ticks have passed since `since`, and the system has a function for naps."""
    build, nap = code.build, code.load(POINTER, code.element(block, LONG, NAP), 8)
    is_late = build.icmp_signed(">", build.sub(_now(code), since), most)
    is_possible = build.icmp_unsigned("!=", build.ptrtoint(nap, LONG), code.number(0))

    def take_nap() -> Sequence[Value]:
        code.call_at(nap, [code.number(_NAP_MICROSECONDS)])
        return ()

    code.either(build.and_(is_late, is_possible), (), take_nap)


def _add_work(module: ir.Module, isa: Isa) -> None:
    """Add the caller's function: it opens a job, computes units, waits for the last one and closes the job."""
    code = Code(module, isa, "work", ("*block", "units"))
    block, units = code.arguments
    build = code.build
    opened, finished = (code.element(block, LONG, index) for index in (OPEN, FINISHED))
    code.publish(code.number(0), finished)
    code.publish(build.shl(units, code.number(32)), opened)
    code.call("take", [block])
    _wait(code, block, finished, lambda so_far: build.icmp_signed("!=", so_far, units))
    code.publish(code.number(0), opened)
    code.end()


def _add_work_all(module: ir.Module, isa: Isa) -> None:
    """Add the caller's function for several jobs, one after the other: it resets the counters of a job, copies its
    tasks, and calls `work`."""
    code = Code(module, isa, "work_all", ("*block", "*jobs", "count"))
    block, jobs, count = code.arguments
    zero = code.number(0)
    progress, tasks_at = (code.element(block, LONG, index) for index in (PROGRESS, HEADER))

    def job(n: Value, _: list[Value]) -> list[Value]:
        at = code.element(jobs, LONG, code.build.mul(n, code.number(len(PoolJob._fields))))
        given = code.given(at, PoolJob._fields)
        fields = code.pointer(given["fields"])

        def reset(i: Value, _: list[Value]) -> list[Value]:
            code.store(zero, code.element(progress, LONG, i), 8)
            return []

        def copy(i: Value, _: list[Value]) -> list[Value]:
            code.store(code.load(LONG, code.element(fields, LONG, i), 8), code.element(tasks_at, LONG, i), 8)
            return []

        code.loop(zero, given["counts"], 1, [], reset)
        code.loop(zero, given["words"], 1, [], copy)
        code.call("work", [block, given["units"]])
        return []

    code.loop(zero, count, 1, [], job)
    code.end()


def _add_fetch(module: ir.Module, isa: Isa) -> None:
    """Add a function that prefetches the next piece of memory, and returns `false` if none is left."""
    code = Code(module, isa, "fetch", ("*block",), is_local=True, returns=BIT)
    (block,) = code.arguments
    build = code.build
    spare, ranges = (code.element(block, LONG, index) for index in (SPARE, RANGES))
    left = code.observed(spare)
    pieces = build.lshr(left, code.number(32))

    def take() -> Sequence[Value]:
        taken = code.counted(spare)
        piece = build.and_(taken, code.number(_LOWER))
        return code.either(
            build.icmp_signed("<", piece, pieces), [ir.Constant(BIT, 0)], lambda: [_prefetched(code, ranges, piece)]
        )

    is_spare = build.icmp_unsigned("<", build.and_(left, code.number(_LOWER)), pieces)
    (has_fetched,) = code.either(is_spare, [ir.Constant(BIT, 0)], take)
    code.end(has_fetched)


def _prefetched(code: Code, ranges: Value, piece: Value) -> Value:
    """Prefetch piece number `piece` of the ranges of memory. Return `true`."""
    build, places = code.build, list[Value]()

    def look(values: list[Value]) -> tuple[Sequence[Value], Value]:
        places.append(values[0])
        following = code.element(values[0], LONG, 2)
        return [following], build.icmp_signed(">=", piece, code.load(LONG, following, 8))

    code.loop_until([ranges], look)
    (here,) = places
    begins, at = code.load(LONG, here, 8), code.load(POINTER, code.element(here, LONG, 1), 8)
    offset = build.mul(build.sub(piece, begins), code.number(PIECE))

    def line(i: Value, _: list[Value]) -> list[Value]:
        code.prefetch(code.element(at, BYTE, build.add(offset, i)))
        return []

    code.repeat(code.number(0), code.number(PIECE), _LINE, [], line)
    return ir.Constant(BIT, 1)


def _add_serve(module: ir.Module, isa: Isa) -> None:
    """Add the helpers' function. It computes units and prefetches until there has been no work for the number of ticks
    (`_now`) at the address `patience`."""
    code = Code(module, isa, "serve", ("*block", "*patience"))
    block, patience_at = code.arguments
    build, opened = code.build, code.element(code.arguments[0], LONG, OPEN)
    names = ("rest", "look", "help", "other", "pause", "done")
    rest, look, help_, other, pause, done = (code.function.append_basic_block(name) for name in names)
    build.branch(rest)
    build.position_at_end(rest)
    since = _now(code)
    build.branch(look)
    build.position_at_end(look)
    seen = code.observed(opened)
    unit, units = build.and_(seen, code.number(_LOWER)), build.lshr(seen, code.number(32))
    build.cbranch(build.icmp_unsigned("<", unit, units), help_, other)
    build.position_at_end(help_)
    code.call("take", [block])
    build.branch(rest)
    build.position_at_end(other)
    build.cbranch(code.call("fetch", [block]), look, pause)
    build.position_at_end(pause)
    _pause(code)
    _nap_if_late(code, block, since, code.load(LONG, code.element(block, LONG, IDLE), 8))
    spent = build.sub(_now(code), since)
    build.cbranch(build.icmp_signed(">", spent, code.observed(patience_at)), done, look)
    build.position_at_end(done)
    code.end()
