"""Linear layers and embeddings by codes, against the library's on the numbers that the codes stand for.

Would catch: a bias that is lost, a piece of the outputs in another's place, tied layers of which one is left empty.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from smoe.bounds import INT8
from smoe.fastpath.linear import multiply_codes
from smoe.formats.activations import in_8_bits
from smoe.formats.base import Format
from smoe.formats.registry import FORMATS
from smoe.kernels.isa import widest
from smoe.kernels.spinning_pool import SpinningPool, is_supported
from smoe.models import quantised_linear
from smoe.models.quantised_linear import (
    QuantisedEmbedding,
    QuantisedLinear,
    keep_quantised,
    layers_of_weights,
    share_inputs,
)
from tests.formats.blocks import random_rows
from tests.kernels.products import gains_by_interleaving

OUTPUTS, COLUMNS = 70, 512
needs_kernels = pytest.mark.skipif(widest() is None, reason="this CPU has no instruction set that kernels are for")


@pytest.fixture(params=["Q8_0", "Q4_0", "Q4_K", "Q6_K"])
def form(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


@pytest.fixture
def pool():
    with SpinningPool(2, has_bf16=is_supported()) as made:
        yield made


def codes_of(form: Format) -> torch.Tensor:
    return torch.from_numpy(random_rows(form, OUTPUTS, COLUMNS, seed=1))


def numbers_of(form: Format, codes: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(form.decode(codes.numpy()))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("by_kernel", [pytest.param(True, marks=needs_kernels), False])
def test_a_linear_layer(
    form: Format, rows: int, has_bias: bool, by_kernel: bool, pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised_linear, "PIECE_ELEMENTS", 30 * COLUMNS)  # several pieces, the last one shorter
    codes, bias = codes_of(form), torch.randn(OUTPUTS).bfloat16() if has_bias else None
    ours = QuantisedLinear(form, codes, torch.bfloat16, bias)
    ours.pool = pool if by_kernel else None
    x = torch.randn(1, rows, COLUMNS, generator=torch.Generator().manual_seed(rows)).bfloat16()
    wanted = x.double() @ numbers_of(form, codes).double().T + (0 if bias is None else bias.double())
    result = ours(x)
    assert result.shape == (1, rows, OUTPUTS) and result.dtype is torch.bfloat16
    assert float((result.double() - wanted).abs().max()) <= 2.0**-7 * float(wanted.abs().max())


@needs_kernels
@pytest.mark.parametrize("rows", [1, 3])
def test_activations_in_8_bits(form: Format, rows: int, pool) -> None:
    codes, x = codes_of(form), torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(rows)).bfloat16()
    ours = QuantisedLinear(form, codes, torch.bfloat16, None)
    ours.pool, ours.activations = pool, INT8
    seen = torch.from_numpy(in_8_bits(form, x.float().numpy()))
    wanted = seen @ numbers_of(form, codes).double().T
    assert torch.allclose(ours(x).double(), wanted, rtol=2.0**-8, atol=1e-5 * float(wanted.abs().max()))


@needs_kernels
def test_more_rows_than_a_product_takes_have_the_same_bits(form: Format, pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a long prompt in one pass whose weights are dequantized, and multiplied by torch on one thread."""
    layer = QuantisedLinear(form, codes_of(form), torch.bfloat16, None)
    layer.multiply_by(pool, INT8)
    x = torch.randn(1, 23, COLUMNS, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = layer(x)
    monkeypatch.setattr(quantised_linear, "MOST_BYTE_ROWS", 8)
    monkeypatch.setattr(quantised_linear, "most_quantised_rows", lambda matrices: 8)
    monkeypatch.setattr(layer, "numbers", None)
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("by_kernel", [pytest.param(True, marks=needs_kernels), False])
def test_columns_in_another_order(form: Format, rows: int, by_kernel: bool, pool) -> None:
    """Would catch inputs that are moved in the wrong direction, and a group of layers that share an input."""
    order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(2))
    plain = QuantisedLinear(form, codes_of(form), torch.bfloat16, None)
    moved = QuantisedLinear(form, codes_of(form), torch.bfloat16, None, order)
    for layer in (plain, moved) if by_kernel else ():
        layer.multiply_by(pool, INT8)
    share_inputs(nn.ModuleList([plain, moved]))
    x = torch.randn(1, rows, COLUMNS, generator=torch.Generator().manual_seed(rows)).bfloat16()
    assert torch.equal(moved(x[..., order]), plain(x))
    assert torch.equal(moved.weight, plain.weight[:, order])
    assert moved.shared is None


def test_without_threads_of_kernels_no_kernel_is_compiled(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch kernels that are compiled within a pass with `kernels=torch`."""
    layer = QuantisedLinear(form, codes_of(form), torch.bfloat16, None)
    monkeypatch.setattr(quantised_linear, "products_of", None)
    monkeypatch.setattr(quantised_linear, "MOST_BYTE_ROWS", 8)
    assert layer(torch.ones(23, COLUMNS).bfloat16()).shape == (23, OUTPUTS)


@needs_kernels
@pytest.mark.parametrize("rows", [1, 3])
def test_interleaved_rows_have_the_same_bits(form: Format, rows: int, pool, monkeypatch: pytest.MonkeyPatch) -> None:
    gains_by_interleaving(monkeypatch)
    monkeypatch.setattr(quantised_linear, "PIECE_ELEMENTS", 32 * COLUMNS)
    codes = torch.from_numpy(random_rows(form, 64, COLUMNS, seed=1))
    plain, ours = (QuantisedLinear(form, codes.clone(), torch.bfloat16, None) for _ in range(2))
    x = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(rows)).bfloat16()
    for each in (plain, ours):
        each.multiply_by(pool, INT8)
        each(x)
    ours.interleave()
    ours.interleave()
    assert not torch.equal(ours.codes, codes) and ours.form.rows > 1
    assert torch.equal(ours(x), plain(x)) and torch.equal(ours.weight, plain.weight)
    assert all(begin % ours.form.rows == 0 for begin, _ in ours.pieces())
    many = x.float().expand(5, rows, COLUMNS)  # not in bf16: by dequantized weights
    assert torch.equal(ours(many), plain(many))


@needs_kernels
def test_rows_that_fill_no_group_are_left_as_they_are(form: Format, pool, monkeypatch: pytest.MonkeyPatch) -> None:
    gains_by_interleaving(monkeypatch)
    ours = QuantisedLinear(form, codes_of(form), torch.bfloat16, None)
    ours.multiply_by(pool, INT8)
    ours.interleave()
    assert torch.equal(ours.codes, codes_of(form)) and ours.form is form


def test_in_32_bits(form: Format) -> None:
    codes, x = codes_of(form), torch.randn(3, COLUMNS)
    ours = QuantisedLinear(form, codes, torch.float32, None)(x)
    assert torch.allclose(ours, x @ numbers_of(form, codes).T, rtol=1e-4, atol=1e-5)


def test_an_embedding(form: Format) -> None:
    codes, ids = codes_of(form), torch.tensor([[3, 0], [OUTPUTS - 1, 3]])
    ours = QuantisedEmbedding(form, codes, torch.float32, None)(ids)
    assert torch.allclose(ours, numbers_of(form, codes)[ids], rtol=1e-6, atol=1e-9)


@needs_kernels
@pytest.mark.parametrize("tokens", [[[2]], [[OUTPUTS - 1], [0]], [[0, 1, 2, 3, 4, 5, 6, 7]]])
def test_an_embedding_has_the_same_bits_by_our_kernel(form: Format, tokens: list[list[int]], pool) -> None:
    ids = torch.tensor(tokens)
    library = QuantisedEmbedding(form, codes_of(form), torch.bfloat16, None)
    ours = QuantisedEmbedding(form, library.codes, torch.bfloat16, None)
    ours.pool = pool
    assert torch.equal(ours(ids), library(ids))


@needs_kernels
def test_an_embedding_s_codes_are_not_interleaved(form: Format, pool, monkeypatch: pytest.MonkeyPatch) -> None:
    gains_by_interleaving(monkeypatch)
    model = nn.Module()
    codes = torch.from_numpy(random_rows(form, 64, COLUMNS, seed=1))
    model.embedding = QuantisedEmbedding(form, codes, torch.bfloat16, None)
    model.tied = QuantisedLinear(form, codes, torch.bfloat16, None)
    model.other = QuantisedLinear(form, codes.clone(), torch.bfloat16, None)
    multiply_codes(model, pool, INT8)
    assert (model.tied.form.rows, model.embedding.form.rows) == (1, 1) and model.other.form.rows > 1
    assert torch.equal(model.tied.weight, model.other.weight)


def test_tied_layers_share_their_codes(form: Format) -> None:
    model = nn.Module()
    model.embedding, model.output = nn.Embedding(OUTPUTS, COLUMNS), nn.Linear(COLUMNS, OUTPUTS, bias=False)
    model.output.weight = model.embedding.weight
    keep_quantised(model, layers_of_weights(model)["embedding.weight"], form, codes_of(form), torch.float32)
    assert isinstance(model.embedding, QuantisedEmbedding) and isinstance(model.output, QuantisedLinear)
    assert model.output.codes.data_ptr() == model.embedding.codes.data_ptr()
    assert not list(model.parameters())
