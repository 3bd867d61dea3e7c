"""Generates the Triton kernel for experts of one kind. One launch computes two products, the activation and the sum;
the experts' addresses are arguments.

There are three kinds of tasks:

    up     for each expert and N outputs:    inner[route] = activation(x[token] @ gate + bias, x[token] @ up + bias)
    down   for each expert and N outputs:    rows[route] = inner[route] @ down + bias
    sum    for some outputs of a token:      out[token] = sum of weight[route] * rows[route], in a given order

Each program of the launch takes the next task: first the tasks `up` of all experts, then `down`, then `sum` if the
launch includes it. Before it computes, it waits until the tasks whose results it needs are counted as done. Programs
with earlier tasks are running already and never wait for later ones. So there is no deadlock, whatever the order and
number of programs that a GPU runs at once. The last program of a launch resets the counters.

A task `up` or `down` reads its expert's N outputs once, for all M tokens that are routed to the expert. What it reads,
and the order of its sums, depend only on the expert, the kind and M, not on other experts or the number of launches.
All sums are in float32, and only the result is rounded.

An expert is described by a row of int64 numbers, the *entry*, so slots may have any size and address:

    | addresses of its matrices, then of its biases | M routes, -1: none | the M tokens of these routes |

The task counters are a row of int32 numbers, which are zero between launches:

    | tasks taken | programs that are done | done tasks `down` of all experts | done tasks `up` of each expert |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from smoe.formats.base import Format
from smoe.gpu_kernels.activation import Activation
from smoe.gpu_kernels.decoding import Decoding, alignment_of, run_length

TYPES = {"bfloat16": "tl.bfloat16", "float16": "tl.float16", "float32": "tl.float32"}
"""Triton's names of the dtypes in which models compute, by torch's names."""
MOST_TOKENS = 8
"""The largest number of tokens of one expert for which its weights are read only once."""
SUM_COLUMNS = 512
"""The number of outputs that one task of the sum computes."""
COUNTS = 3
"""The number of task counters before those of each expert."""
COUNTED = 256
"""The number of task counters, a power of two."""
MOST_EXPERTS = COUNTED - COUNTS
"""The largest number of experts in one launch."""
_PATIENCE = 1 << 20
"""The number of checks, each half a microsecond or more, after which a wait ends and the outputs become NaN. An unknown
fault is then visible, and the machine does not hang."""
_WASTE = 8
"""A tile may extend beyond the end of a row by at most the row's length divided by this number."""

_RUNS = 4
"""The number of runs per block above which tiles have fewer blocks, because the runs themselves are independent
loads."""


class MatrixLayout(NamedTuple):
    """The shape and storage format of one expert matrix, which are the same for every expert of a layer."""

    outputs: int
    columns: int
    form: Format | None = None
    """The quantized format; None for the model's dtype."""
    is_transposed: bool = False
    """Whether the matrix is stored as [columns, outputs]. Only possible without a format."""
    alignment: int = 16
    """A power of two that divides the matrix's address in every slot, in bytes. Values above 16 have no further
    effect."""

    @property
    def row_bytes(self) -> int:
        """The size in bytes of a row of the quantized matrix."""
        assert self.form is not None
        return self.form.row_bytes(self.columns)


class ExpertKind(NamedTuple):
    """The shapes, formats and activation of a layer's experts. One kernel is generated for each such description."""

    hidden: int
    inner: int
    dtype: str
    """The dtype of the hidden states, one of `TYPES`."""
    ups: tuple[MatrixLayout, ...]
    """The matrices of the first product: one matrix [2I, H] (without a gate [I, H]), or gate and up as two matrices [I,
    H]."""
    down: MatrixLayout
    activation: Activation
    has_bias: bool = False

    @property
    def addresses(self) -> int:
        """The number of addresses in the table entry that describes an expert."""
        return len(self.ups) + 1 + (2 if self.has_bias else 0)

    def entry_numbers(self, tokens: int) -> int:
        """Return the number of int64 numbers in the table entry of an expert, with room for `tokens` tokens."""
        return self.addresses + 2 * tokens


class Tile(NamedTuple):
    """The part of a matrix that a task `up` or `down` reads at a time."""

    outputs: int
    numbers: int
    """The number of weights in the tile, which has `outputs` rows."""
    warps: int = 4


def tile_for(tokens: int) -> Tile:
    """Return the tile for this number of tokens, so small that a thread's registers can hold the separate sums of all
    tokens. A thread then has 16, 8 or 4 numbers."""
    return Tile(16 if tokens <= 4 else 8, {1: 2048, 2: 2048, 4: 1024, 8: 512}[tokens])


def source_of(kind: ExpertKind, tokens: int, tile: Tile | None = None) -> str:
    """Return the text of a Python module with the Triton kernels. `tokens` (1, 2, 4 or 8): the largest number of tokens
    of one expert in a launch."""
    tile = tile_for(tokens) if tile is None else tile
    layouts = list(dict.fromkeys((*kind.ups, kind.down)))
    products = [_product(f"product{n}", each, tokens, tile, kind.dtype) for n, each in enumerate(layouts)]
    names = {each: f"product{n}" for n, each in enumerate(layouts)}
    head = "import triton\nimport triton.language as tl\n"
    up, down = _up(kind, names, tokens, tile), _down(kind, names, tokens, tile)
    return "\n\n".join([head, *products, up, down, _WAITED, _SUM, _tasks(kind, tokens, tile)])


def tasks_of(kind: ExpertKind, tile: Tile) -> tuple[int, int]:
    """Return the number of tasks `up` and the number of tasks `down` that an expert takes."""
    return -(-kind.inner // tile.outputs), -(-kind.hidden // tile.outputs)


def sum_tasks(kind: ExpertKind, tokens: int) -> int:
    """Return the number of tasks that the weighted sum for `tokens` tokens takes."""
    return tokens * -(-kind.hidden // SUM_COLUMNS)


_WAITED = f"""@triton.jit
def waited(count, wanted):
    there = tl.atomic_add(count, 0, sem="acquire")
    looks = 0
    while (there < wanted) & (looks < {_PATIENCE}):
        there = tl.atomic_add(count, 0, sem="acquire")
        looks += 1
    return there >= wanted


@triton.jit
def done(count):
    tl.debug_barrier()  # all threads have written
    return tl.atomic_add(count, 1, sem="acq_rel")
"""
_SUM = f"""@triton.jit
def sum_of(token, part, rows, weights, order, out, is_there, WIDTH: tl.constexpr, HIDDEN: tl.constexpr):
    column = part * {SUM_COLUMNS} + tl.arange(0, {SUM_COLUMNS})
    total = tl.zeros(({SUM_COLUMNS},), tl.float32)
    for k in tl.static_range(WIDTH):
        route = tl.load(order + token * WIDTH + k)
        weight = tl.load(weights + route, mask=route >= 0, other=0).to(tl.float32)
        row = tl.load(rows + route * HIDDEN + column, mask=(column < HIDDEN) & (route >= 0), other=0)
        total += weight * row
    total = tl.where(is_there, total, float("nan"))
    tl.store(out + token * HIDDEN + column, total.to(out.dtype.element_ty), mask=column < HIDDEN)


@triton.jit
def weighted_sum(rows, weights, order, out, WIDTH: tl.constexpr, HIDDEN: tl.constexpr):
    sum_of(tl.program_id(0), tl.program_id(1), rows, weights, order, out, True, WIDTH, HIDDEN)
"""


def _tasks(kind: ExpertKind, tokens: int, tile: Tile) -> str:
    """Return the text of the kernel that assigns tasks to programs and waits for their inputs."""
    ups, downs = tasks_of(kind, tile)
    parts, numbers = sum_tasks(kind, 1), kind.entry_numbers(tokens)
    return f"""@triton.jit(do_not_specialize=["experts", "programs"])
def experts_of(table, x, inner, rows, weights, order, out, counts, experts, programs, WIDTH: tl.constexpr):
    task = tl.atomic_add(counts, 1, sem="relaxed")
    second = task - experts * {ups}
    third = second - experts * {downs}
    if second < 0:
        expert = task // {ups}
        up(table + expert * {numbers}, task % {ups}, x, inner)
        done(counts + {COUNTS} + expert)
    elif third < 0:
        expert = second // {downs}
        is_there = waited(counts + {COUNTS} + expert, {ups})
        down(table + expert * {numbers}, second % {downs}, inner, rows, is_there)
        done(counts + 2)
    else:
        is_there = waited(counts + 2, experts * {downs})
        sum_of(third // {parts}, third % {parts}, rows, weights, order, out, is_there, WIDTH, {kind.hidden})
    if done(counts + 1) == programs - 1:
        tl.store(counts + tl.arange(0, {COUNTED}), 0, mask=tl.arange(0, {COUNTED}) < {COUNTS} + experts)
"""


def _each(text: str, tokens: int) -> str:
    """Return a comma-separated list of copies of `text`, one for each token, in which # is replaced by the token's
    number."""
    return ", ".join(text.replace("#", str(m)) for m in range(tokens))


def _function(name: str, arguments: str, lines: Sequence[str]) -> str:
    return "\n    ".join([f"@triton.jit\ndef {name}({arguments}):", *lines]) + "\n"


def _product(name: str, layout: MatrixLayout, tokens: int, tile: Tile, dtype: str) -> str:
    """Return the text of a function that multiplies rows of one matrix with the rows of all tokens. It returns float32
    sums [N] for each token."""
    lines = _of_numbers(layout, tokens, tile, dtype) if layout.form is None else _of_blocks(layout, tokens, tile)
    return _function(name, f"address, row, inside, {_each('x#, on#', tokens)}", lines)


def _of_numbers(layout: MatrixLayout, tokens: int, tile: Tile, dtype: str) -> list[str]:
    columns, outputs = layout.columns, layout.outputs
    width = _whole(tile.numbers // tile.outputs, columns)
    steps = (1, outputs) if layout.is_transposed else (columns, 1)
    mask = _mask("inside[:, None]", "here[None, :]", columns % width)
    x_mask = "on# & here" if columns % width else "on#"
    lines = [
        f"weights = tl.multiple_of(address.to(tl.pointer_type({TYPES[dtype]})), {min(16, layout.alignment)})",
        *(f"sum{m} = tl.zeros(({tile.outputs}, {width}), tl.float32)" for m in range(tokens)),
        f"for first in range(0, {columns}, {width}):",
        f"    column = first + tl.arange(0, {width})",
        *([f"    here = column < {columns}"] if columns % width else []),
        f"    at = weights + row[:, None] * {steps[0]} + column[None, :] * {steps[1]}",
        f"    number = tl.load(at{mask}).to(tl.float32)",
    ]
    for m in range(tokens):
        lines.append(f"    z{m} = tl.load(x{m} + column, mask={x_mask.replace('#', str(m))}, other=0).to(tl.float32)")
        lines.append(f"    sum{m} += number * z{m}[None, :]")
    return [*lines, f"return {_each('tl.sum(sum#, 1)', tokens)}"]


def _of_blocks(layout: MatrixLayout, tokens: int, tile: Tile) -> list[str]:
    form = layout.form
    assert form is not None
    length, count = run_length(form), layout.columns // form.numbers
    runs = sum(len(group.runs) for group in form.groups)
    most = tile.numbers // (tile.outputs * length) // max(1, runs // _RUNS)
    blocks = _whole(max(1, most), count)
    is_ragged = count % blocks != 0
    mask = _mask("inside[:, None]", "here[None, :]", is_ragged)
    tile_mask = _mask("inside[:, None, None]", "here[None, :, None]", is_ragged)
    alignment = alignment_of(layout.alignment, layout.row_bytes, form)
    decoding = Decoding(form, alignment, mask, tile_mask)
    shape = f"({tile.outputs}, {blocks}, {length})"
    lines = [
        f"data = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), {alignment})",
        f"lane = tl.arange(0, {length})",
        *(f"sum{m} = tl.zeros({shape}, tl.float32)" for m in range(tokens)),
        f"for first in range(0, {count}, {blocks}):",
        f"    block = first + tl.arange(0, {blocks})",
        *([f"    here = block < {count}"] if is_ragged else []),
        f"    head = data + row[:, None] * {layout.row_bytes} + block[None, :] * {form.nbytes}",
        "    at = head[:, :, None] + lane[None, None, :]",
    ]
    x_mask = "on# & here[:, None]" if is_ragged else "on#"
    for number, first, step in decoding.runs():
        lines += [f"    {line}" for line in decoding.lines]
        decoding.lines.clear()
        lines.append(f"    column = block[:, None] * {form.numbers} + ({first} + lane * {step})[None, :]")
        for m in range(tokens):
            lines.append(
                f"    z{m} = tl.load(x{m} + column, mask={x_mask.replace('#', str(m))}, other=0).to(tl.float32)"
            )
            lines.append(f"    sum{m} += {number} * z{m}[None, :, :]")
    return [*lines, f"return {_each('tl.sum(tl.sum(sum#, 2), 1)', tokens)}"]


def _whole(most: int, count: int) -> int:
    """Return the largest power of two, at most `most`, with which `count` elements can be divided into equal pieces
    without the last piece extending far beyond the end."""
    width = 1 << (most.bit_length() - 1)
    while width > 1 and -count % width * _WASTE > count:
        width //= 2
    return width


def _mask(outputs: str, columns: str, is_ragged: object) -> str:
    return f", mask={outputs} & {columns}, other=0" if is_ragged else f", mask={outputs}, other=0"


def _entry(kind: ExpertKind, tokens: int) -> list[str]:
    """Return the first Triton statements of the tasks `up` and `down`. They load the expert's routes from its table
    entry."""
    first, lines = kind.addresses, list[str]()
    for m in range(tokens):
        lines.append(f"route{m} = tl.load(entry + {first + m})")
        lines.append(f"on{m} = route{m} >= 0")
    return lines


def _outputs(tile: Tile, count: int) -> list[str]:
    """Return the Triton statements that compute the indices of the N outputs of a task."""
    return [
        f"output = part * {tile.outputs} + tl.arange(0, {tile.outputs})",
        f"inside = output < {count}",
    ]


def _bias(kind: ExpertKind, number: int, name: str, rows: str) -> list[str]:
    """Return statements that load some rows of a bias into the variable `name`."""
    at = f"tl.load(entry + {number}).to(tl.pointer_type({TYPES[kind.dtype]}))"
    return [f"{name} = tl.load({at} + {rows}, mask=inside, other=0).to(tl.float32)"]


def _up(kind: ExpertKind, names: dict[MatrixLayout, str], tokens: int, tile: Tile) -> str:
    activation, inner, is_apart = kind.activation, kind.inner, len(kind.ups) > 1
    if activation.takes_turns:
        rows = {"gate": "(2 * output)", "up": "(2 * output + 1)"}
    else:
        rows = {"gate": "output", "up": f"({inner} + output)" if activation.has_gate else "output"}
    lines = [*_entry(kind, tokens), *_outputs(tile, inner)]
    for m in range(tokens):
        lines.append(f"x{m} = x + tl.load(entry + {kind.addresses + tokens + m}) * {kind.hidden}")
    for n, name in enumerate(("gate", "up") if activation.has_gate else ("up",)):
        matrix = n if is_apart else 0
        row = "output" if is_apart else rows[name]
        results = _each(f"{name}#", tokens)
        product = f"{names[kind.ups[matrix]]}(tl.load(entry + {matrix}), {row}, inside, {_each('x#, on#', tokens)})"
        lines.append(f"{results} = {product}")
        if kind.has_bias:
            lines += _bias(kind, len(kind.ups) + 1, "bias", rows[name])
            lines += [f"{name}{m} += bias" for m in range(tokens)]
    for m in range(tokens):
        lines += activation.lines(f"gate{m}", f"up{m}")
        lines.append(f"tl.store(inner + route{m} * {inner} + output, up{m}, mask=inside & on{m})")
    return _function("up", "entry, part, x, inner", lines)


def _down(kind: ExpertKind, names: dict[MatrixLayout, str], tokens: int, tile: Tile) -> str:
    lines = [*_entry(kind, tokens), *_outputs(tile, kind.hidden)]
    lines += [f"x{m} = inner + route{m} * {kind.inner}" for m in range(tokens)]
    place = len(kind.ups)
    product = f"{names[kind.down]}(tl.load(entry + {place}), output, inside, {_each('x#, on#', tokens)})"
    lines.append(f"{_each('y#', tokens)} = {product}")
    if kind.has_bias:
        lines += _bias(kind, place + 2, "bias", "output")
        lines += [f"y{m} += bias" for m in range(tokens)]
    for m in range(tokens):
        lines.append(f'y{m} = tl.where(is_there, y{m}, float("nan"))')
        lines.append(f"tl.store(rows + route{m} * {kind.hidden} + output, y{m}, mask=inside & on{m})")
    return _function("down", "entry, part, inner, rows, is_there", lines)
