"""Distributes work among threads in machine code. Tasks consist of units, which threads take one by one from an atomic
counter.

The memory that the threads share, in words of 8 bytes:

    open        the number of units (upper half), and the first that no thread has taken (lower half); 0 while tasks
                may be changed. Both are in one word, so that a late thread cannot take a unit of the next job
    finished    the number of finished units
    spare       the number of pieces of memory to prefetch (upper half), and the first that no thread has taken (lower
                half): the next weights, for helpers that have nothing else to do
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

from smoe.cpu_isa import AARCH64, FAMILY, X86
from smoe.kernels import elementwise, row_product

OPEN, FINISHED, REACHED, NOWHERE, SPARE, PROGRESS = 0, 8, 9, 10, 11, 16
"""The indices of words in the header; `open` has a cache line of its own. The counter at `REACHED` is always 0,
and that at `NOWHERE` is never read."""
MOST_COUNTS = 144
HEADER = PROGRESS + MOST_COUNTS
FIELDS = 13
MOST_TASKS = 8192
RANGES = HEADER + MOST_TASKS * FIELDS
MOST_RANGES = 8
NEVER = (1 << 63) - 1
"""A number of a piece at which no range begins. It ends the search for a range."""
WORDS = RANGES + 2 * MOST_RANGES + 1
"""The number of words in the shared memory."""
PIECE = 4096
"""The number of bytes that a helper prefetches before it looks for work again: 0.2 us."""
_LINE = 64
PRODUCT, GATE, COMBINE, CALL, ROWS, FORMAT = 0, 1, 2, 3, 4, 5
_STRIP = 32
"""The number of outputs that are computed for all rows before the following ones, so that their weights stay in the
second-level cache."""
_LOWER = (1 << 32) - 1


class _Own(NamedTuple):
    """LLVM text for instructions that differ between CPU families."""

    declarations: str
    pause: str
    """LLVM text that pauses the thread for a moment."""
    now: str
    """LLVM text that reads a clock which all cores share. It counts cycles, or ticks of `ticks_a_second`."""


_OWN = {
    X86: _Own(
        """
declare void @llvm.x86.sse2.pause()
declare i64 @llvm.readcyclecounter()
""",
        "call void @llvm.x86.sse2.pause()",
        "call i64 @llvm.readcyclecounter()",
    ),
    AARCH64: _Own(
        """
declare void @llvm.aarch64.isb(i32)
declare i64 @llvm.read_volatile_register.i64(metadata)
!0 = !{!"CNTVCT_EL0"}
!1 = !{!"CNTFRQ_EL0"}
define void @ticks_a_second(ptr %at) {
  %ticks = call i64 @llvm.read_volatile_register.i64(metadata !1)
  store i64 %ticks, ptr %at
  ret void
}
""",
        "call void @llvm.aarch64.isb(i32 15)",  # the instruction named yield ends at once on most CPUs
        "call i64 @llvm.read_volatile_register.i64(metadata !0)",  # LLVM's own steady counter is always 0 here
    ),
}
_PLAIN = """
declare i64 @llvm.smin.i64(i64, i64)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
attributes #0 = { nounwind }
"""


def source(has_bf16: bool, several: bool, family: str = FAMILY) -> str:
    """Return the LLVM text of all functions. The exported ones are `work(block, units)`, `serve(block,
    patience)` and, on aarch64, `ticks_a_second(at)`.

    The task kinds PRODUCT and ROWS require `has_bf16`, which not every CPU supports. ROWS also requires `several`,
    because it takes as long to compile as everything else.
    """
    several, own = several and has_bf16, _OWN[family]
    products = row_product.source(several) if has_bf16 else row_product.DECLARATIONS
    if family == AARCH64:
        assert not has_bf16, "torch's order is known on x86 only"
        products = _PLAIN
    parts = _unit(own, has_bf16, several), _take(own), _work(own), _fetch(), _serve(own)
    return products + elementwise.source() + "".join(parts)


def _word(name: str, index: int) -> str:
    return f"  %{name} = getelementptr i64, ptr %block, i64 {index}"


def _fields(names: str, kind: str, first: int = 0) -> str:
    """Return LLVM text that loads the fields `names` of the task at `%task`, from field number `first` on."""
    return "\n".join(
        f"  %{name}.field = getelementptr i64, ptr %task, i64 {first + n}\n  %{name} = load {kind}, ptr %{name}.field"
        for n, name in enumerate(names.split())
    )


_ARGUMENTS = FIELDS - 6


def _rows() -> str:
    """Return LLVM text that multiplies several activation rows with a matrix, strip by strip of outputs: four rows at
    once, then two, then one."""
    return f"""\
rows:
  %strip = phi i64 [%begin, %entry], [%strip.next, %strip.end]
  %strip.next = add i64 %strip, {_STRIP}
  %until = call i64 @llvm.smin.i64(i64 %strip.next, i64 %end)
  br label %some
some:
  %r = phi i64 [0, %rows], [%r.four, %four], [%r.two, %two], [%r.one, %one]
  %left = sub i64 %d, %r
  %pair = mul i64 %r, 2
  %at = getelementptr ptr, ptr %a, i64 %pair
  %is.four = icmp sge i64 %left, 4
  br i1 %is.four, label %four, label %fewer
four:
  call void @row_product_4(ptr %at, ptr %b, i64 %strip, i64 %until, i64 %e, i64 %e, i64 %f)
  %r.four = add i64 %r, 4
  br label %some
fewer:
  %is.two = icmp sge i64 %left, 2
  br i1 %is.two, label %two, label %last
two:
  call void @row_product_2(ptr %at, ptr %b, i64 %strip, i64 %until, i64 %e, i64 %e, i64 %f)
  %r.two = add i64 %r, 2
  br label %some
last:
  %is.one = icmp eq i64 %left, 1
  br i1 %is.one, label %one, label %strip.end
one:
  %x = load ptr, ptr %at
  %out.at = getelementptr ptr, ptr %at, i64 1
  %out = load ptr, ptr %out.at
  call void @row_product(ptr %x, ptr %b, ptr %out, ptr null, i64 %strip, i64 %until, i64 %e, i64 %e, i64 %f)
  %r.one = add i64 %r, 1
  br label %some
strip.end:
  %strip.more = icmp slt i64 %strip.next, %end
  br i1 %strip.more, label %rows, label %done
done:
  ret void"""


def _product() -> str:
    """Return LLVM text that multiplies one activation row with a bf16 matrix."""
    return f"""\
product:
  %bias = inttoptr i64 %d to ptr
  call void @row_product(
    ptr %a, ptr %b, ptr %c, ptr %bias, i64 %begin, i64 %end, i64 %e, i64 %f, i64 {row_product.CHAIN})
  ret void"""


def _unit(own: _Own, has_bf16: bool, several: bool) -> str:
    """Return the LLVM text of the function that computes one unit of a task."""
    labels = {GATE: "gate", COMBINE: "combine", CALL: "call"}
    labels |= ({PRODUCT: "product"} if has_bf16 else {}) | ({ROWS: "rows"} if several else {})
    cases = "  ".join(f"i64 {kind}, label %{label}" for kind, label in labels.items())
    return f"""{own.declarations}
define internal void @unit(ptr %task, i64 %begin, i64 %end) {{
entry:
{_fields("a b c", "ptr", _ARGUMENTS)}
{_fields("d e f", "i64", _ARGUMENTS + 3)}
{_fields("kind", "i64", 3)}
  switch i64 %kind, label %format [ {cases} ]
{_product() if has_bf16 else ""}
{_rows() if several else ""}
format:
  %out.at.d = inttoptr i64 %d to ptr
  %bias.at.f = inttoptr i64 %f to ptr
  call void %a(ptr %b, ptr %c, ptr %out.at.d, ptr %bias.at.f, i64 %begin, i64 %end, i64 %e)
  ret void
gate:
  call void @gate(ptr %a, ptr %b, ptr %c, i64 %d, i64 %begin, i64 %end)
  ret void
combine:
  call void @combine(ptr %a, ptr %b, ptr %c, i64 %d, i64 %e, i64 %begin, i64 %end)
  ret void
call:
  call void %a(ptr %b, i64 %begin)
  ret void
}}
"""


def _take(own: _Own) -> str:
    """Return the LLVM text of the function by which a thread takes and computes units of work until none is left."""
    return f"""
define internal void @take(ptr %block) {{
entry:
{_word("open", OPEN)}
{_word("finished", FINISHED)}
{_word("first.task", HEADER)}
  br label %take
take:
  %taken = atomicrmw add ptr %open, i64 1 seq_cst
  %unit = and i64 %taken, {_LOWER}
  %units = lshr i64 %taken, 32
  %mine = icmp ult i64 %unit, %units
  br i1 %mine, label %find, label %done
find:
  %task = phi ptr [%first.task, %take], [%following, %find]
  %following = getelementptr i64, ptr %task, i64 {FIELDS}
{_fields("first outputs size", "i64")}
  %nth = sub i64 %unit, %first
  %begin = mul i64 %nth, %size
  %inside = icmp slt i64 %begin, %outputs
  br i1 %inside, label %found, label %find
found:
{_fields("wait.at", "ptr", 4)}
{_fields("wait.for", "i64", 5)}
{_fields("count.at", "ptr", 6)}
  br label %wait
wait:
  %so.far = load atomic i64, ptr %wait.at acquire, align 8
  %may = icmp sge i64 %so.far, %wait.for
  br i1 %may, label %compute, label %pause
pause:
  {own.pause}
  br label %wait
compute:
  %full = add i64 %begin, %size
  %end = call i64 @llvm.smin.i64(i64 %full, i64 %outputs)
  call void @unit(ptr %task, i64 %begin, i64 %end)
  %counted = atomicrmw add ptr %count.at, i64 1 seq_cst
  %before = atomicrmw add ptr %finished, i64 1 seq_cst
  br label %take
done:
  ret void
}}
"""


def _work(own: _Own) -> str:
    """Return the LLVM text of the caller's function: it opens a job, computes units, waits for the last one and closes
    the job."""
    return f"""
define void @work(ptr %block, i64 %units) {{
entry:
{_word("open", OPEN)}
{_word("finished", FINISHED)}
  store atomic i64 0, ptr %finished seq_cst, align 8
  %all.free = shl i64 %units, 32
  store atomic i64 %all.free, ptr %open seq_cst, align 8
  call void @take(ptr %block)
  br label %wait
wait:
  %so.far = load atomic i64, ptr %finished acquire, align 8
  %all = icmp eq i64 %so.far, %units
  br i1 %all, label %done, label %pause
pause:
  {own.pause}
  br label %wait
done:
  store atomic i64 0, ptr %open seq_cst, align 8
  ret void
}}
"""


def _fetch() -> str:
    """Return the LLVM text of a function that prefetches the next piece of memory, and returns `false` if none is
    left."""
    return f"""
define internal i1 @fetch(ptr %block) {{
entry:
{_word("spare", SPARE)}
{_word("ranges", RANGES)}
  %left = load atomic i64, ptr %spare acquire, align 8
  %next = and i64 %left, {_LOWER}
  %pieces = lshr i64 %left, 32
  %is.spare = icmp ult i64 %next, %pieces
  br i1 %is.spare, label %take, label %none
take:
  %taken = atomicrmw add ptr %spare, i64 1 seq_cst
  %piece = and i64 %taken, {_LOWER}
  %is.mine = icmp slt i64 %piece, %pieces
  br i1 %is.mine, label %find, label %none
find:
  %range = phi ptr [%ranges, %take], [%following, %find]
  %following = getelementptr i64, ptr %range, i64 2
  %ends = load i64, ptr %following
  %is.later = icmp sge i64 %piece, %ends
  br i1 %is.later, label %find, label %found
found:
  %begins = load i64, ptr %range
  %at.field = getelementptr i64, ptr %range, i64 1
  %at = load ptr, ptr %at.field
  %nth = sub i64 %piece, %begins
  %offset = mul i64 %nth, {PIECE}
  br label %line
line:
  %i = phi i64 [0, %found], [%i.next, %line]
  %byte = add i64 %offset, %i
  %line.at = getelementptr i8, ptr %at, i64 %byte
  call void @llvm.prefetch.p0(ptr %line.at, i32 0, i32 2, i32 1)
  %i.next = add i64 %i, {_LINE}
  %more = icmp slt i64 %i.next, {PIECE}
  br i1 %more, label %line, label %done
done:
  ret i1 true
none:
  ret i1 false
}}
"""


def _serve(own: _Own) -> str:
    """Return the LLVM text of the helpers' function. It computes units and prefetches until there has been no work for
    the number of ticks (`_Own.now`) at the address `patience`."""
    return f"""
define void @serve(ptr %block, ptr %patience.at) {{
entry:
{_word("open", OPEN)}
  br label %rest
rest:
  %since = {own.now}
  br label %look
look:
  %seen = load atomic i64, ptr %open acquire, align 8
  %unit = and i64 %seen, {_LOWER}
  %units = lshr i64 %seen, 32
  %is.work = icmp ult i64 %unit, %units
  br i1 %is.work, label %help, label %other
help:
  call void @take(ptr %block)
  br label %rest
other:
  %has.fetched = call i1 @fetch(ptr %block)
  br i1 %has.fetched, label %look, label %pause
pause:
  {own.pause}
  %now = {own.now}
  %spent = sub i64 %now, %since
  %patience = load atomic i64, ptr %patience.at acquire, align 8
  %is.over = icmp sgt i64 %spent, %patience
  br i1 %is.over, label %done, label %look
done:
  ret void
}}
"""
