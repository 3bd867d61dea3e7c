"""The kernels for GPUs, on the CPU by Triton's interpreter, beside the formats' own decoders in float64.

Would catch a field of a format that is read from another place, a tile that ends before its row or after it, a token
that gets another's row, a result that depends on which launch its expert was in, or on where its slot lies.
"""

from __future__ import annotations

import pytest
import torch

from smoe.formats.base import Format
from smoe.formats.registry import FORMATS
from smoe.gpu_kernels import slot_experts, source
from smoe.gpu_kernels.activation import Activation
from smoe.gpu_kernels.decoding import fits
from smoe.gpu_kernels.slot_experts import Entry, Layer, SlotExperts
from smoe.gpu_kernels.source import COUNTED, COUNTS, ExpertKind, MatrixLayout, Tile, tile_for
from tests.gpu_kernels.slots_of_bytes import DEVICE, SILU, WHOLE, Slots, choices, quantised, routes_of, rows_by

pytest.importorskip("triton", reason="Triton is not installed")

ROUNDING = 2e-6
"""Sums of float32, relative to the largest of a row: some units in the last place."""
LIMITED = Activation("silu", takes_turns=True, alpha=1.702, limit=7.0, shift=1.0)


def dense(
    hidden: int, inner: int, dtype: str = "bfloat16", activation: Activation = SILU, **switches: bool
) -> ExpertKind:
    has_bias, is_transposed = switches.get("has_bias", False), switches.get("is_transposed", False)
    width = 2 * inner if activation.has_gate else inner
    up = MatrixLayout(width, hidden, None, is_transposed, 16)
    return ExpertKind(
        hidden, inner, dtype, (up,), MatrixLayout(hidden, inner, None, is_transposed, 16), activation, has_bias
    )


def assert_exact(slots: Slots, x: torch.Tensor, choice: list[list[int]], layer: Layer) -> None:
    for expert, routes in routes_of(choice).items():
        exact = slots.exact(expert, x[[route // len(choice[0]) for route in routes]])
        far = (layer.rows[routes].double() - exact).abs().max()
        assert far <= ROUNDING * exact.abs().max(), f"expert {expert}: {far:.2g} of {exact.abs().max():.2g}"
    total = (layer.weights.double().unsqueeze(-1) * layer.rows.double().view(*layer.weights.shape, -1)).sum(1)
    assert torch.allclose(layer.out.double(), total, rtol=2**-7, atol=2**-7 * float(total.abs().max()))


def check(kind: ExpertKind, tokens: int, width: int, experts: int, tile: Tile | None = None) -> None:
    slots, choice = Slots(kind, experts), choices(tokens, width, experts)
    x = torch.randn(tokens, kind.hidden).to(getattr(torch, kind.dtype))
    assert_exact(slots, x, choice, rows_by(SlotExperts(kind, tile), slots, x, choice, [list(routes_of(choice))]))


def columns_of(form: Format) -> int:
    """More than one block a row, and no power of two of them."""
    return form.numbers * (3 if form.numbers < 256 else 2)


@pytest.mark.filterwarnings("ignore:overflow")  # exp(-x) of gates far below zero: what it divides is nothing
@pytest.mark.parametrize(
    "name", [name for name, form in FORMATS.items() if fits(form) and not name.endswith("_64")]
)  # between two others
def test_every_format_is_decoded(name: str) -> None:
    form = FORMATS[name]
    inner = 32 if form.numbers > 64 else form.numbers
    down = FORMATS["Q8_0"] if form.numbers > inner else form
    check(quantised(form, down, columns_of(form), inner), 2, 2, 2, Tile(32, 1 << 14))


@pytest.mark.parametrize("name", ["Q4_K", "W4_128", "MXFP4_PAIRS"])
def test_in_the_second_product_and_in_tiles_as_on_a_gpu(name: str) -> None:
    form = FORMATS[name]
    check(quantised(FORMATS["Q8_0"], form, 32, columns_of(form), alignment=2), 1, 1, 1)


def test_the_last_tile_of_a_row_of_blocks_ends_with_the_row() -> None:
    """Fifteen blocks, in tiles of sixteen."""
    form = FORMATS["Q8_0"]
    check(quantised(form, form, 15 * form.numbers, 32), 2, 1, 1, Tile(32, 1 << 14))


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8])
def test_up_to_eight_tokens_share_what_is_read(tokens: int) -> None:
    check(dense(48, 24), tokens, 2, 3, Tile(32, 1 << 10))


@pytest.mark.parametrize(
    "kind",
    [
        dense(200, 72),
        dense(136, 40, "float32"),
        dense(64, 24, "float16", Activation("gelu_tanh")),
        dense(96, 40, activation=Activation("gelu")),
        dense(96, 40, activation=Activation("relu2", has_gate=False)),
        dense(72, 40, activation=LIMITED, has_bias=True, is_transposed=True),
        dense(64, 32, activation=LIMITED._replace(takes_turns=False), has_bias=True),
        quantised(FORMATS["MXFP4_PAIRS"], FORMATS["MXFP4_PAIRS"], 96, 32)._replace(
            ups=(MatrixLayout(64, 96, FORMATS["MXFP4_PAIRS"], alignment=1),), activation=LIMITED, has_bias=True
        ),
    ],
    ids=["ragged", "fp32", "fp16, tanh", "gelu", "no gate", "turns, transposed, bias", "limited", "one matrix"],
)
def test_kinds(kind: ExpertKind) -> None:
    check(kind, 3, 2, 3, Tile(32, 1 << 11) if kind.hidden == 200 else WHOLE)


def test_the_bits_do_not_depend_on_launches_or_slots() -> None:
    """Experts that are here first and others later, in any order, in slots anywhere."""
    kind = dense(96, 40)
    choice, x, kernel = choices(4, 3, 6), torch.randn(4, 96).bfloat16(), SlotExperts(kind, Tile(64, 1 << 12))
    chosen = list(routes_of(choice))
    ways = [
        (Slots(kind, 6), [chosen]),
        (Slots(kind, 6, order=[3, 1, 5, 0, 4, 2]), [chosen[3:], chosen[:1], [], chosen[2:0:-1]]),
        (Slots(kind, 6, order=[5, 4, 3, 2, 1, 0]), [[expert] for expert in reversed(chosen)]),
    ]
    found = [rows_by(kernel, slots, x, choice, [each for each in launches if each]) for slots, launches in ways]
    assert not found[0].rows.isnan().any()
    for other in found[1:]:
        assert torch.equal(other.rows, found[0].rows) and torch.equal(other.out, found[0].out)


def test_an_entry_s_room_is_that_of_the_whole_layer() -> None:
    """On a GPU bits depend on it: an expert that is late, or alone, has the room that it has beside the others."""
    kind = dense(32, 24)
    entry = Slots(kind, 1).addresses(0)
    layer = Layer.of(kind, torch.zeros(4, 32), torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.int64))
    table = SlotExperts(kind).table(layer, [Entry(entry, [3])], 3)
    assert table.experts == 1 and table.tokens == 4
    assert table.numbers.tolist() == [*entry, 3, -1, -1, -1, 1, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_sum_takes_rows_in_the_order_given(dtype: torch.dtype) -> None:
    """In float32, and rounded once; a route that is not there counts for nothing, whatever its row holds.

    Triton's interpreter cuts off to bf16 what a GPU rounds.
    """
    kind = dense(700, 24)
    rows, weights = torch.randn(6, 700) * 2.0 ** torch.randint(-12, 12, (6, 1)), torch.rand(2, 3).to(dtype)
    rows[4] = torch.nan
    order = torch.tensor([[2, 0, 1], [5, 3, -1]])

    def summed(order: torch.Tensor) -> torch.Tensor:
        x = torch.empty(2, 700, dtype=dtype, device=DEVICE)
        layer = Layer.of(kind, x, weights.to(DEVICE), order.to(DEVICE))
        layer.rows.copy_(rows)
        SlotExperts(kind).sum(layer)
        return layer.out.cpu()

    out = summed(order)
    wanted = torch.zeros(2, 700)
    flat = weights.flatten().float()
    for t, routes in enumerate(order.tolist()):
        for route in routes:
            if route >= 0:
                wanted[t] += flat[route] * rows[route]
    if dtype is torch.float32 and DEVICE.type == "cpu":  # a GPU multiplies and adds at once
        assert torch.equal(out, wanted)
    assert torch.allclose(out.float(), wanted, rtol=2**-7, atol=1e-5)
    other = summed(torch.tensor([[0, 1, 2], [3, 5, -1]]))
    assert dtype is not torch.float32 or not torch.equal(out, other), "the order shows"


def test_tiles_of_every_number_of_tokens() -> None:
    """What thread counts and registers ask for: powers of two."""
    for tokens in (1, 2, 4, 8):
        tile = tile_for(tokens)
        assert tile.outputs & (tile.outputs - 1) == 0 and tile.numbers % tile.outputs == 0


def test_a_launch_leaves_no_counts() -> None:
    """As the next one would begin with them: in a graph that is replayed nobody could put them back."""
    kind = dense(64, 40)
    kernel = SlotExperts(kind, Tile(16, 1 << 10))
    rows_by(kernel, Slots(kind, 3), torch.randn(2, 64).bfloat16(), [[0, 1], [1, 2]], [[0, 2], [1]])
    assert kernel._counts_on(DEVICE).tolist() == [0] * COUNTED


@pytest.mark.skipif(DEVICE.type == "cuda", reason="programs would wait for what never comes")
@pytest.mark.parametrize(("count", "what"), [(COUNTS, "rows"), (2, "out")], ids=["up", "down"])
def test_what_never_comes_is_seen(count: int, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task less is counted than there are: whoever waits for it gives up, and gives what is no number."""
    monkeypatch.setattr(source, "_WAITED", source._WAITED.replace(str(source._PATIENCE), "3"))
    kind = dense(64, 40)
    kernel, slots = SlotExperts(kind, Tile(16, 1 << 10)), Slots(kind, 1)
    kernel._counts_on(DEVICE)[count] = -1
    layer = rows_by(kernel, slots, torch.randn(1, 64).bfloat16(), [[0]], [[0]])
    assert getattr(layer, what).isnan().any()


def test_more_experts_than_a_launch_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, kernel = dense(64, 40), SlotExperts(dense(64, 40), WHOLE)
    asked = Slots(kind, 3), torch.randn(2, 64).bfloat16(), [[0, 1], [1, 2]], [[0, 1, 2]]
    whole = rows_by(kernel, *asked)
    monkeypatch.setattr(slot_experts, "MOST_EXPERTS", 2)
    assert torch.equal(rows_by(kernel, *asked).out, whole.out) and not whole.out.isnan().any()
