"""Experts of quantised matrices, by our kernels and unpacked, against the same module on dequantised weights.

Would catch: gate and up in each other's place, a tile that is overwritten too early, a row of a batch that gets another
one's result, a bias that is left out or added to the wrong product.
"""

from __future__ import annotations

import pytest
import torch
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from smoe.bounds import BF16, INT8
from smoe.compute.decode_experts import ChosenExperts, proven_kernel, way_of
from smoe.compute.expert_math import ProvenKernels
from smoe.compute.interleaved_slots import InterleavedSlots
from smoe.compute.quantised_math import QuantisedMath, QuantisedWeights, UnpackedTile
from smoe.expert import EXACT
from smoe.formats.base import Format
from smoe.formats.plain import PLAIN
from smoe.formats.registry import FORMATS
from smoe.kernels.isa import widest
from smoe.kernels.spinning_pool import SpinningPool, is_supported
from smoe.kernels.unpacked import unpacked
from smoe.memory.arena import Arena
from smoe.memory.quantised_store import StoredMatrix
from smoe.memory.store import PAGE, Part, SlotLayout
from tests import promised
from tests.formats.blocks import by_others, random_rows
from tests.kernels.products import gains_by_interleaving

HIDDEN, INNER, EXPERTS = 512, 256, 3
MIXTURES = [("Q8_0", "Q8_0"), ("Q4_0", "Q4_0"), ("Q4_K", "Q6_K"), ("Q2_K", "Q3_K"), ("Q5_0", "Q5_1"), ("MXFP4", "Q4_1")]
MIXTURES += [("IQ4_XS", "IQ4_NL"), ("IQ2_XXS", "IQ3_S")]
needs_kernels = pytest.mark.skipif(widest() is None, reason="this CPU has no instruction set that kernels are for")


class Layer:
    """One layer's experts in slots, and the library's module on the numbers that they stand for."""

    def __init__(self, up: Format, down: Format) -> None:
        config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS)
        config._experts_implementation = "eager"
        self.module = Qwen3MoeExperts(config).bfloat16()
        stored = [
            StoredMatrix("gate_up_proj.0", "gate_up_proj", up, INNER, HIDDEN),
            StoredMatrix("gate_up_proj.1", "gate_up_proj", up, INNER, HIDDEN),
            StoredMatrix("down_proj.0", "down_proj", down, HIDDEN, INNER),
        ]
        self.parts = (Part("gate_up_proj", (2 * INNER, HIDDEN)), Part("down_proj", (HIDDEN, INNER)))
        self.math = QuantisedMath(self.module, self.parts, torch.bfloat16, stored, UnpackedTile(torch.bfloat16))
        nbytes = sum(each.nbytes for each in stored)
        self.arena = Arena([(EXPERTS, -(-nbytes // PAGE) * PAGE)], torch.device("cpu"))
        self.offsets, at = {}, 0
        for each in stored:
            self.offsets[each.name] = at
            at += each.nbytes
        for expert in range(EXPERTS):
            self._fill(expert, stored)

    def _fill(self, expert: int, stored: list[StoredMatrix]) -> None:
        found = []
        for n, each in enumerate(stored):
            data = random_rows(each.form, each.outputs, each.columns, 10 * expert + n, spread=0.003)
            begin = self.offsets[each.name]
            self.arena.tensor(expert)[begin : begin + each.nbytes] = torch.from_numpy(data).flatten()
            numbers = torch.from_numpy(by_others(each.form, data))
            found.append(numbers)
        with torch.no_grad():
            self.module.gate_up_proj[expert] = torch.cat(found[:2])
            self.module.down_proj[expert] = found[2]

    def weights(self) -> list[QuantisedWeights]:
        return [self.math.bind(self.arena, expert, self.offsets) for expert in range(EXPERTS)]

    def library(self, x: torch.Tensor, index: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.module(x, index, gains)


class BiasedLayer(Layer):
    """As gpt_oss has them: rows of gate and up in turn, limits, biases behind the matrices, and the library's own
    matrices the other way round."""

    def __init__(self, form: Format) -> None:
        config = GptOssConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS, swiglu_limit=1.0)
        config._experts_implementation = "eager"
        self.module = GptOssExperts(config).bfloat16()
        stored = [
            StoredMatrix("gate_up_proj.0", "gate_up_proj", form, 2 * INNER, HIDDEN),
            StoredMatrix("down_proj.0", "down_proj", form, HIDDEN, INNER),
        ]
        parts = [Part(name, weight.shape[1:]) for name, weight in self.module.named_parameters()]
        self.math = QuantisedMath(self.module, parts, torch.bfloat16, stored, UnpackedTile(torch.bfloat16))
        self.offsets = {"gate_up_proj.0": 0, "down_proj.0": stored[0].nbytes}
        end = sum(each.nbytes for each in stored)
        self.offsets |= {"gate_up_proj_bias": end, "down_proj_bias": end + 2 * 2 * INNER}
        self.arena = Arena([(EXPERTS, -(-(end + 2 * (2 * INNER + HIDDEN)) // PAGE) * PAGE)], torch.device("cpu"))
        for expert in range(EXPERTS):
            self._fill(expert, stored)

    def _fill(self, expert: int, stored: list[StoredMatrix]) -> None:
        for n, each in enumerate(stored):
            data = random_rows(each.form, each.outputs, each.columns, 10 * expert + n)
            self.arena.view(expert, self.offsets[each.name], data.shape, torch.uint8).copy_(torch.from_numpy(data))
            with torch.no_grad():
                getattr(self.module, each.part)[expert] = torch.from_numpy(by_others(each.form, data)).t()
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            bias = getattr(self.module, name).data[expert].normal_(generator=torch.Generator().manual_seed(expert))
            self.arena.view(expert, self.offsets[name], bias.shape, bias.dtype).copy_(bias)


@pytest.fixture(params=MIXTURES, ids="-".join)
def layer(request: pytest.FixtureRequest) -> Layer:
    return Layer(*(FORMATS[name] for name in request.param))


@pytest.fixture
def pool():
    with SpinningPool(2, several=True, has_bf16=is_supported()) as made:
        yield made


def near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Within four roundings to bf16 of the largest number: of 5,400 draws all but one were."""
    return bool((ours.float() - theirs.float()).abs().max() <= 4 * 2.0**-8 * theirs.float().abs().max())


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_torch_unpacks_what_the_decoder_does(form: Format) -> None:
    data = random_rows(form, 5, 2 * form.numbers, 0)
    ours = unpacked(form, torch.from_numpy(data), torch.float32)
    assert torch.allclose(ours, torch.from_numpy(form.decode(data)), rtol=1e-6, atol=1e-9)


def test_torch_unpacks_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks at a time, of ten: the last part is shorter, and parts end within a row."""
    form = FORMATS["Q4_K"]
    data = torch.from_numpy(random_rows(form, 5, 2 * form.numbers, 0))
    wanted = unpacked(form, data, torch.bfloat16)
    monkeypatch.setattr("smoe.kernels.unpacked.PART_ELEMENTS", 3 * form.numbers)
    assert torch.equal(unpacked(form, data, torch.bfloat16), wanted)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_unpacked_by_torch(layer: Layer, rows: int) -> None:
    """On any device, without kernels."""
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows)).bfloat16()
    for expert, weights in enumerate(layer.weights()):
        index, ones = torch.full((rows, 1), expert), torch.ones(rows, 1).bfloat16()
        assert near(layer.math.forward(x, weights), layer.library(x, index, ones))


@needs_kernels
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_by_kernels(layer: Layer, rows: int, pool: SpinningPool) -> None:
    """Few rows are multiplied as they are stored, many unpacked."""
    layer.math = layer.math.by_pool(pool)
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows)).bfloat16()
    for expert, weights in enumerate(layer.weights()):
        assert layer.math.agrees(pool, weights)
        index, ones = torch.full((rows, 1), expert), torch.ones(rows, 1).bfloat16()
        assert near(layer.math.forward(x, weights), layer.library(x, index, ones))


def test_what_is_proven_of_rows_is_of_the_layout_that_multiplies_them() -> None:
    """Unpacked matrices lie row by row, those of the library's own module the other way round."""
    layer = BiasedLayer(FORMATS["MXFP4_PAIRS"])
    weights = layer.weights()[0]
    for shape, matrix in zip(layer.math.shapes, (weights.up, weights.down), strict=True):
        assert (shape.columns, shape.outputs) == matrix.shape
        assert shape.is_transposed is matrix.t().is_contiguous()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 40])
@pytest.mark.parametrize("has_kernels", [False, pytest.param(True, marks=needs_kernels)], ids=["torch", "kernels"])
def test_biases_are_added(has_kernels: bool, rows: int, request: pytest.FixtureRequest) -> None:
    """To the products of every number of rows, on both sides of the activation; one expert alone or several."""
    layer = BiasedLayer(FORMATS["MXFP4_PAIRS"])
    weights = layer.weights()
    if has_kernels:
        pool = request.getfixturevalue("pool")
        assert layer.math.agrees(pool, weights[0])
        layer.math = layer.math.by_pool(pool)
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows)).bfloat16()
    ones = torch.ones(rows, 1).bfloat16()
    wanted = [layer.library(x, torch.full((rows, 1), expert), ones) for expert in range(EXPERTS)]
    ours = [layer.math.forward(x, each) for each in weights]
    assert all(map(near, ours, wanted))
    if rows == 1:
        together = torch.empty(EXPERTS, HIDDEN, dtype=torch.bfloat16)
        layer.math.forward_each(x, weights, together)
        assert torch.equal(together, torch.cat(ours)), "a result that hangs on who else is there"


@needs_kernels
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_tokens_in_one_piece(layer: Layer, tokens: int, pool: SpinningPool) -> None:
    """Every number of tokens that one expert may have at once, and one more."""
    weights = layer.weights()
    kernel = proven_kernel(layer.math, pool, weights[0])
    assert kernel is not None and kernel.most_rows > 1
    layer.math = layer.math.by(ProvenKernels(pool, kernel))
    generator = torch.Generator().manual_seed(tokens)
    x, gains = torch.randn(tokens, HIDDEN, generator=generator).bfloat16(), torch.rand(tokens, 2).bfloat16()
    index = torch.stack([torch.tensor([0, 1 + token % 2]) for token in range(tokens)])
    routes = [[r for r, expert in enumerate(index.flatten().tolist()) if expert == n] for n in range(EXPERTS)]
    used = [n for n in range(EXPERTS) if routes[n]]
    taken = [routes[n] for n in used]
    run = way_of([layer.math], None)(ChosenExperts([layer.math] * len(used), x, gains, taken, range(len(used))))
    run.compute(0, [weights[n] for n in used])
    assert near(run.total(), layer.library(x, index, gains))


@needs_kernels
def test_interleaved_slots_have_the_same_bits(
    layer: Layer, pool: SpinningPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By our kernels, unpacked by them, unpacked by torch, and as numbers for comparisons."""
    gains_by_interleaving(monkeypatch)
    stored, tile, kernels = layer.math.stored, UnpackedTile(torch.bfloat16), ProvenKernels(pool)
    plain, ours = (
        QuantisedMath(layer.module, layer.parts, torch.bfloat16, stored, tile, INT8, kernels, may_interleave)
        for may_interleave in (False, True)
    )
    assert all(each.form.rows > 1 for each in ours.stored) and ours.kind == plain.kind
    placement = SlotLayout((), layer.offsets, (), 0, 0, 0)
    few, many = (torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (3, 4100))
    for expert in range(EXPERTS):

        def found(math: QuantisedMath, slot: int = expert) -> list[torch.Tensor]:
            maths = math, math.by(ProvenKernels())
            each = [of.bind(layer.arena, slot, layer.offsets) for of in maths]
            assert math.agrees(pool, each[0])
            numbers = [math.numbers(each[0], n, slice(1, 9)) for n in range(len(stored))]
            return [*(of.forward(x, w) for of, w in zip(maths, each, strict=True) for x in (few, many)), *numbers]

        wanted = found(plain)
        InterleavedSlots({(0, EXACT): ours})((0, expert, EXACT), placement, layer.arena.buffer(expert))
        assert all(map(torch.equal, found(ours), wanted))


def test_rows_are_as_in_the_file_where_nothing_gains(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    promised.needs(widest(INT8) is not None, "no kernels for this CPU")
    gains_by_interleaving(monkeypatch)
    stored, tile = layer.math.stored, UnpackedTile(torch.bfloat16)
    as_they_are = QuantisedMath(layer.module, layer.parts, torch.bfloat16, stored, tile, BF16, may_interleave=True)
    assert all(each.form.rows == 1 for each in as_they_are.stored), "rows of bf16 are multiplied otherwise"
    mixed = [stored[0]._replace(form=PLAIN["BF16"]), *stored[1:]]
    half = QuantisedMath(layer.module, layer.parts, torch.bfloat16, mixed, tile, INT8, may_interleave=True)
    assert all(each.form.rows == 1 for each in half.stored), "prompts would be unpacked"


@pytest.mark.parametrize("has_kernels", [False, pytest.param(True, marks=needs_kernels)], ids=["torch", "kernels"])
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_two_formats_in_one_call(tokens: int, has_kernels: bool, request: pytest.FixtureRequest) -> None:
    """Every copy gives what it gives alone: would catch one that is multiplied, or stacked, as the other format is."""
    layers = [Layer(FORMATS["Q8_0"], FORMATS["Q8_0"]), Layer(FORMATS["Q2_K"], FORMATS["Q4_0"])]
    of_format = [layer.weights() for layer in layers]
    if has_kernels:
        pool = request.getfixturevalue("pool")
        for layer, weights in zip(layers, of_format, strict=True):
            layer.math = layer.math.by(ProvenKernels(pool, proven_kernel(layer.math, pool, weights[0])))
    generator = torch.Generator().manual_seed(tokens)
    x, gains = torch.randn(tokens, HIDDEN, generator=generator).bfloat16(), torch.rand(tokens, 2).bfloat16()
    index = [[token % 2, 2 + token % 3 // 2] for token in range(tokens)]  # of numbers 0 to 3
    copies = [(1, 0), (0, 2), (1, 1), (0, 0)]  # (format, expert): in turn
    flat = [number for row in index for number in row]
    used = sorted(set(flat), reverse=True)
    routes = [[route for route, number in enumerate(flat) if number == n] for n in used]
    maths, weights = [layers[copies[n][0]].math for n in used], [of_format[copies[n][0]][copies[n][1]] for n in used]
    ascending = sorted(range(len(used)), key=lambda n: used[n])
    run = way_of(maths, None)(ChosenExperts(maths, x, gains, routes, ascending))
    cut = len(used) // 2
    run.compute(0, weights[:cut])
    run.compute(cut, weights[cut:])
    expected = torch.zeros_like(x)
    for n in ascending:
        for route in routes[n]:
            token = route // 2
            one = way_of([maths[n]], None)(
                ChosenExperts([maths[n]], x[token : token + 1], torch.ones(1, 1), [[0]], [0])
            )
            one.compute(0, [weights[n]])
            expected[token] += (one.total()[0] * gains.flatten()[route]).bfloat16()
    assert near(run.total(), expected)
    if tokens == 1:
        assert torch.equal(run.total(), expected)


@needs_kernels
def test_a_kernel_that_is_wrong_is_noticed(pool: SpinningPool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(FORMATS["Q4_0"], FORMATS["Q4_0"])
    weights = layer.weights()[0]
    matrix = weights.matrices[0]
    shifted = matrix._replace(address=matrix.address + FORMATS["Q4_0"].nbytes)
    weights.matrices = [shifted, *weights.matrices[1:]]
    assert not layer.math.agrees(pool, weights)


def test_points_have_no_kernels_for_gpus() -> None:
    """Their numbers cannot be had from a slot's bytes alone: they are unpacked."""
    assert Layer(FORMATS["IQ4_XS"], FORMATS["TQ2_0"]).math.slot_kind(16) is not None
    assert Layer(FORMATS["IQ4_XS"], FORMATS["IQ3_S"]).math.slot_kind(16) is None
