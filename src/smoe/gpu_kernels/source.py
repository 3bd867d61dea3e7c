"""Triton's text of the kernel for experts of one kind: two products and what lies between them, by address, and the
sum. One launch does it all.

    up     for each expert and N outputs:  inner[route] = activation(x[token] @ gate + bias, x[token] @ up + bias)
    down   likewise:                       rows[route] = inner[route] @ down + bias
    sum    for some outputs of a token:    out[token] = sum of weight[route] * rows[route], in a given order

A program takes the next task; those of `up` are handed out first, of all experts, then those of `down`, then of `sum`,
where the launch has any. Before it computes it waits until what it needs is counted as done: that is under way, since
the program with a task before it runs already, and needs nothing that comes later. So no launch can stand still, in
whatever order a GPU begins its programs, and however few at a time. The last program of a launch puts the counts back.

A task of `up` or `down` reads its expert's N outputs once, for all M tokens that have chosen it. What it reads and in
what order it sums follows from its expert, the kind and M alone: not from what else is in the launch, nor from how many
launches there are. All sums are in float32, and nothing is rounded before the last.

An expert is a row of int64 numbers, the *entry*, so that slots may be of any size and lie anywhere:

    | addresses of its matrices, then of its biases | M routes, -1: none | their M tokens |

and what counts tasks is a row of int32 numbers, zeros between launches:

    | tasks taken | programs that are done | of all experts, tasks of `down` | of each expert, tasks of `up` |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from smoe.formats.base import Format
from smoe.gpu_kernels.activation import Activation
from smoe.gpu_kernels.decoding import Decoding, alignment_of, run_length

TYPES = {"bfloat16": "tl.bfloat16", "float16": "tl.float16", "float32": "tl.float32"}
"""torch's names of the types that models compute in, and Triton's."""
MOST_TOKENS = 8
"""Tokens of an expert that its weights are read for at once."""
SUM_COLUMNS = 512
"""Outputs that a task of the sum has."""
COUNTS = 3
"""Counts before those of each expert."""
COUNTED = 256
"""Counts that there are; a power of two."""
MOST_EXPERTS = COUNTED - COUNTS
"""That a launch may have."""
_PATIENCE = 1 << 20
"""Looks, of half a microsecond and more, after which a wait is given up and the outputs are NaN: an unknown fault then
becomes visible, and does not hang a machine."""
_WASTE = 8
"""A tile may be wider than what is left of a row, by no more than this part of the row."""

_RUNS = 4
"""A block of more runs than these is decoded in a smaller tile: its runs are as many independent loads anyway."""


class MatrixLayout(NamedTuple):
    """How a matrix of every expert lies."""

    outputs: int
    columns: int
    form: Format | None = None
    """None: numbers in the type that the model computes in."""
    is_transposed: bool = False
    """[columns, outputs] in memory; numbers only."""
    alignment: int = 16
    """A power of two that divides its address in every slot, in bytes; 16 at most counts."""

    @property
    def row_bytes(self) -> int:
        """Of a row of a quantised matrix."""
        assert self.form is not None
        return self.form.row_bytes(self.columns)


class ExpertKind(NamedTuple):
    """Experts that one kernel computes alike."""

    hidden: int
    inner: int
    dtype: str
    """One of `TYPES`."""
    ups: tuple[MatrixLayout, ...]
    """Of the first product: one matrix [2I, H] (without a gate [I, H]), or gate and up apart, [I, H] each."""
    down: MatrixLayout
    activation: Activation
    has_bias: bool = False

    @property
    def addresses(self) -> int:
        """Numbers of addresses in an entry."""
        return len(self.ups) + 1 + (2 if self.has_bias else 0)

    def entry_numbers(self, tokens: int) -> int:
        """Numbers of an entry, with room for so many tokens."""
        return self.addresses + 2 * tokens


class Tile(NamedTuple):
    """What a task of a product works on at a time."""

    outputs: int
    numbers: int
    """Weights in a tile, `outputs` rows of them."""
    warps: int = 4


def tile_for(tokens: int) -> Tile:
    """So many sums are separate for each token that a thread's registers hold them: 16, 8 or 4 numbers a thread."""
    return Tile(16 if tokens <= 4 else 8, {1: 2048, 2: 2048, 4: 1024, 8: 512}[tokens])


def source_of(kind: ExpertKind, tokens: int, tile: Tile | None = None) -> str:
    """The module's text; `tokens`: 1, 2, 4 or 8, the most of an entry."""
    tile = tile_for(tokens) if tile is None else tile
    layouts = list(dict.fromkeys((*kind.ups, kind.down)))
    products = [_product(f"product{n}", each, tokens, tile, kind.dtype) for n, each in enumerate(layouts)]
    names = {each: f"product{n}" for n, each in enumerate(layouts)}
    head = "import triton\nimport triton.language as tl\n"
    up, down = _up(kind, names, tokens, tile), _down(kind, names, tokens, tile)
    return "\n\n".join([head, *products, up, down, _WAITED, _SUM, _tasks(kind, tokens, tile)])


def tasks_of(kind: ExpertKind, tile: Tile) -> tuple[int, int]:
    """Tasks of `up` and of `down` that an expert has."""
    return -(-kind.inner // tile.outputs), -(-kind.hidden // tile.outputs)


def sum_tasks(kind: ExpertKind, tokens: int) -> int:
    """Tasks of the sum for so many tokens."""
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
    """The kernel: which task a program has, and what it waits for."""
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
    """The text for every token, with its number in the place of #."""
    return ", ".join(text.replace("#", str(m)) for m in range(tokens))


def _function(name: str, arguments: str, lines: Sequence[str]) -> str:
    return "\n    ".join([f"@triton.jit\ndef {name}({arguments}):", *lines]) + "\n"


def _product(name: str, layout: MatrixLayout, tokens: int, tile: Tile, dtype: str) -> str:
    """Rows of one matrix times the rows of all tokens: sums [N] of each, float32."""
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
    """The largest power of two, `most` at most, that covers `count` with little beyond its end."""
    width = 1 << (most.bit_length() - 1)
    while width > 1 and -count % width * _WASTE > count:
        width //= 2
    return width


def _mask(outputs: str, columns: str, is_ragged: object) -> str:
    return f", mask={outputs} & {columns}, other=0" if is_ragged else f", mask={outputs}, other=0"


def _entry(kind: ExpertKind, tokens: int) -> list[str]:
    """What tasks of both products begin with: the routes of their entry."""
    first, lines = kind.addresses, list[str]()
    for m in range(tokens):
        lines.append(f"route{m} = tl.load(entry + {first + m})")
        lines.append(f"on{m} = route{m} >= 0")
    return lines


def _outputs(tile: Tile, count: int) -> list[str]:
    """The N outputs of a task."""
    return [
        f"output = part * {tile.outputs} + tl.arange(0, {tile.outputs})",
        f"inside = output < {count}",
    ]


def _bias(kind: ExpertKind, number: int, name: str, rows: str) -> list[str]:
    """Load some rows of a bias into `name`."""
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
