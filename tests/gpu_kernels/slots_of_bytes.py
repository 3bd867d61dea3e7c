"""Experts in host memory as an arena has them: matrices of any format in slots of bytes, wherever a test puts them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from smoe.formats.base import Format
from smoe.gpu_kernels.activation import Activation
from smoe.gpu_kernels.slot_experts import Entry, Layer, SlotExperts
from smoe.gpu_kernels.source import ExpertKind, MatrixLayout, Tile
from tests.formats.blocks import random_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where the kernels run: interpreted on a CPU, as they are on a GPU."""
SILU = Activation("silu")
WHOLE = Tile(256, 1 << 16)
"""Few programs, each of a whole matrix: the interpreter takes as long for one as for a small one."""


def quantised(up: Format, down: Format, hidden: int, inner: int, alignment: int = 1) -> ExpertKind:
    """Gate and up apart, as files have them."""
    ups = (MatrixLayout(inner, hidden, up, alignment=alignment),) * 2
    return ExpertKind(hidden, inner, "bfloat16", ups, MatrixLayout(hidden, inner, down, alignment=alignment), SILU)


class Slots:
    """Some experts of a kind, and the exact numbers of their matrices."""

    def __init__(self, kind: ExpertKind, experts: int, seed: int = 0, order: Sequence[int] | None = None) -> None:
        """`order`: in which the experts lie in memory."""
        self.kind = kind
        self._dtype = getattr(torch, kind.dtype)
        layouts = [*kind.ups, kind.down]
        matrices = [[self._matrix(each, seed + 100 * e + n) for n, each in enumerate(layouts)] for e in range(experts)]
        widths = [sum(each.outputs for each in kind.ups), kind.hidden] if kind.has_bias else []
        self._biases = [[self._row(width, seed + 100 * e + 50) for width in widths] for e in range(experts)]
        step = max(kind.down.alignment, 16 if kind.down.form is None or kind.has_bias else 1)
        self._memory, self._offsets = bytearray(), {}
        for e in range(experts) if order is None else order:
            for n, part in enumerate([*matrices[e], *self._biases[e]]):
                self._memory += bytes(-len(self._memory) % step)
                self._offsets[e, n] = len(self._memory)
                self._memory += _bytes_of(part)
        room = torch.empty(len(self._memory) + 64, dtype=torch.uint8, device=DEVICE)
        first = -room.data_ptr() % 64 + (0 if step > 1 else 1)  # where any address will do, an odd one
        self._room = room[first : first + len(self._memory)]
        self._room.copy_(torch.frombuffer(self._memory, dtype=torch.uint8))
        self._numbers = [[self._exact(part, each) for part, each in zip(of, layouts, strict=True)] for of in matrices]

    def addresses(self, expert: int) -> list[int]:
        return [self._room.data_ptr() + self._offsets[expert, n] for n in range(self.kind.addresses)]

    def exact(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, H] in float64, before the routing weight."""
        *ups, down = self._numbers[expert]
        wide = x.double() @ torch.cat(ups).T
        if self.kind.has_bias:
            wide = wide + self._biases[expert][0].double()
        y = self.kind.activation.of(wide) @ down.T
        return y + self._biases[expert][1].double() if self.kind.has_bias else y

    def _matrix(self, layout: MatrixLayout, seed: int) -> torch.Tensor:
        if layout.form is not None:
            return torch.from_numpy(random_rows(layout.form, layout.outputs, layout.columns, seed))
        generator = torch.Generator().manual_seed(seed)
        shape = (layout.columns, layout.outputs) if layout.is_transposed else (layout.outputs, layout.columns)
        return (torch.randn(shape, generator=generator) / 8).to(self._dtype)

    def _row(self, width: int, seed: int) -> torch.Tensor:
        return torch.randn(width, generator=torch.Generator().manual_seed(seed)).to(self._dtype)

    def _exact(self, stored: torch.Tensor, layout: MatrixLayout) -> torch.Tensor:
        if layout.form is not None:
            return torch.from_numpy(layout.form.decode(stored.numpy())).double()
        return (stored.T if layout.is_transposed else stored).double()


def _bytes_of(part: torch.Tensor) -> bytes:
    return part.contiguous().view(torch.uint8).numpy().tobytes()


def choices(tokens: int, width: int, experts: int, seed: int = 0) -> list[list[int]]:
    """What a router might choose for each token, in its own order."""
    chance = random.Random(seed)
    return [chance.sample(range(experts), width) for _ in range(tokens)]


def routes_of(choice: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Of every expert chosen, in ascending order, its flat positions."""
    width = len(choice[0])
    found: dict[int, list[int]] = {}
    for t, row in enumerate(choice):
        for k, expert in enumerate(row):
            found.setdefault(expert, []).append(t * width + k)
    return dict(sorted(found.items()))


def rows_by(
    kernel: SlotExperts,
    slots: Slots,
    x: torch.Tensor,
    choice: Sequence[Sequence[int]],
    launches: Sequence[Sequence[int]],
) -> Layer:
    """What every route gives, the experts computed in these launches, and the sum, which the last of them makes."""
    routes, width = routes_of(choice), len(choice[0])
    x = torch.cat([x, torch.full_like(x[:1], torch.nan)]).to(DEVICE)[:-1]  # what is read beyond a row would show
    weights = torch.rand(len(choice), width, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    order = torch.tensor([[k for _, k in sorted(zip(row, range(width), strict=True))] for row in choice])
    layer = Layer.of(slots.kind, x, weights, (order + torch.arange(len(choice))[:, None] * width).to(DEVICE))
    for each in (layer.inner, layer.rows, layer.out):
        each.fill_(torch.nan)
    most = max(map(len, routes.values()))
    for n, experts in enumerate(launches, start=1):
        entries = [Entry(slots.addresses(e), routes[e]) for e in experts]
        kernel.multiply(layer, entries, most, has_sum=n == len(launches))
    return Layer(*(each.cpu() for each in layer))
