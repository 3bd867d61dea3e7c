"""The layers beside the experts by our kernel.

Would catch a bias left out, a batch that is taken for one row, an input that is not in one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from smoe.cpu_isa import FAMILY
from smoe.fastpath import linear
from smoe.kernels.isa import AVX2
from smoe.kernels.many_rows import ManyRows
from smoe.kernels.proof import part_that_agrees
from smoe.kernels.spinning_pool import SpinningPool
from smoe.kernels.verdicts import Verdicts
from tests import oracle, promised


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toys are too small for it to be."""
    monkeypatch.setattr(linear, "_faster", lambda pool, kinds, parts: {k: p for k, p in parts.items() if p})


def test_only_plain_linear_layers_change(pool: SpinningPool) -> None:
    class Other(nn.Linear):
        pass

    promised.needs_products(pool, (96, 64), (128, 64))
    layers = [nn.Linear(64, 96, False), nn.Linear(64, 128), Other(64, 96, False), nn.Linear(64, 97, False)]
    model = nn.ModuleList(layers).bfloat16().requires_grad_(False)
    assert linear.speed_up(model, pool, {}).share == pytest.approx((96 + 128) / (96 + 128 + 97))
    ours = [getattr(layer.forward, "__name__", "") == "forward" for layer in layers if "forward" in layer.__dict__]
    assert ours == [True, True, False], "the last is the library's, asked row by row where rows are to be alone"
    assert "forward" not in layers[2].__dict__


@pytest.mark.parametrize("shape", [(1, 1, 64), (1, 64), (64,), (3, 64), (1, 5, 64), (2, 1, 64)])
@pytest.mark.parametrize("bias", [False, True])
def test_every_shape_gives_the_librarys_bits(shape: tuple[int, ...], bias: bool, pool: SpinningPool) -> None:
    layer = nn.Linear(64, 160, bias=bias).bfloat16().requires_grad_(False)
    x = torch.randn(shape).bfloat16()
    theirs = layer(x)
    linear.speed_up(layer, pool, {})
    assert torch.equal(layer(x), theirs)
    assert torch.equal(layer(x.expand(2, *shape)[0]), theirs)
    strided = torch.randn(*shape[:-1], 128).bfloat16()[..., ::2]
    assert torch.equal(layer(strided), nn.functional.linear(strided, layer.weight, layer.bias))


@pytest.mark.skipif(not (AVX2.is_here and AVX2.family == FAMILY), reason="this CPU has no AVX2")
@pytest.mark.parametrize("bias", [False, True])
def test_several_rows_in_our_own_order(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows and many, with bias and without, and in parts that are not in one piece."""
    monkeypatch.setattr(linear, "_faster", lambda pool, kinds, parts: parts)
    layer = nn.Linear(96, 160, bias=bias).bfloat16().requires_grad_(False)
    with SpinningPool(2, in_own_order=True) as pool:
        pool.many = ManyRows(pool, AVX2)
        assert linear.speed_up(layer, pool, {}).share == 1
        called, multiply = [], pool.many.multiply
        monkeypatch.setattr(pool.many, "multiply", lambda x, *more: called.append(len(x)) or multiply(x, *more))
        for shape in ((2, 96), (1, 5, 96), (4, 9, 96), (1, 100, 96), (0, 96)):
            x = torch.randn(shape).bfloat16()
            exact = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
            assert layer(x).shape == exact.shape
            assert torch.allclose(layer(x).double(), exact, rtol=2.0**-7, atol=1e-3)
        assert set(called) - {0} == ({2, 5, 36, 100} if bias else {36, 100})
        called.clear()
        strided = torch.randn(40, 192).bfloat16()[:, ::2]
        assert torch.equal(layer(strided), nn.functional.linear(strided, layer.weight, layer.bias)) and not called
        x = torch.randn(40, 96).bfloat16()
        with pool.summing_rows_alone():
            assert torch.equal(layer(x), torch.cat([layer(row) for row in x.split(1)])) and not called


class PlainRouter(nn.Module):
    """A router of 96 experts that applies its weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(96, 64).bfloat16(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


@pytest.mark.skipif(not (AVX2.is_here and AVX2.family == FAMILY), reason="this CPU has no AVX2")
def test_several_rows_of_a_router_in_our_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a prompt whose routers torch computes, and rows that are to be summed alone but are not."""
    router = PlainRouter()
    with SpinningPool(2, in_own_order=True) as pool:
        pool.many = ManyRows(pool, AVX2)
        linear.speed_up(router, pool, {router: True})
        called, multiply = [], pool.many.multiply
        monkeypatch.setattr(pool.many, "multiply", lambda x, *more: called.append(len(x)) or multiply(x, *more))
        for rows in (2, 36, 100):
            x = torch.randn(rows, 64).bfloat16()
            exact = nn.functional.linear(x.double(), router.weight.double())
            assert torch.allclose(router(x).double(), exact, rtol=2.0**-7, atol=1e-2)
        assert set(called) == {36, 100}, "a few rows are multiplied by the kernel for few rows"
        called.clear()
        with pool.summing_rows_alone():
            assert torch.equal(router(x), torch.cat([router(row) for row in x.split(1)])) and not called


def test_a_routers_weight_is_an_ordinary_parameter_beside(pool: SpinningPool) -> None:
    router, rows = PlainRouter(), torch.randn(5, 64).bfloat16()
    state, theirs = router.state_dict(), [router(rows[:1]), router(rows), router(rows[0])]
    before = router.weight.float()
    promised.needs(part_that_agrees(pool, router.weight.t()) is not None, "torch's order for a small router")
    linear.speed_up(router, pool, {router: True})
    called: list[int] = []
    multiply, pool.multiply = pool.multiply, lambda products: called.append(len(products)) or multiply(products)  # type: ignore[method-assign,func-returns-value,assignment]
    ours = [router(rows[:1]), router(rows), router(rows[0])]
    assert called == [1, 1]
    assert all(torch.equal(a, b) and type(a) is torch.Tensor for a, b in zip(ours, theirs, strict=True))
    assert [name for name, _ in router.named_parameters()] == ["weight"]
    assert torch.equal(router.state_dict()["weight"], state["weight"])
    assert type(router.weight.float()) is torch.Tensor
    assert torch.equal(router.weight.float(), before)


class Counting(nn.Module):
    """A router whose bits depend on the number of threads, or on nothing: it has no sums."""

    def __init__(self, depends: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64), requires_grad=False)
        self.depends = depends

    def forward(self, x: torch.Tensor, more: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x * self.weight[0] + (torch.get_num_threads() if self.depends else 0) + more


def test_what_is_left_keeps_its_bits_on_one_thread(pool: SpinningPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that depends on the threads, one that does not, one that cannot be asked, and a linear layer."""
    monkeypatch.setattr(linear, "_faster", lambda pool, kinds, parts: {})
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        cut, whole, unasked, left = Counting(True), Counting(False), Counting(True), nn.Linear(2048, 64, bias=False)
        linear._keep_bits(pool, [left.requires_grad_(False)], {cut: True}, Verdicts())
        linear._keep_bits(pool, [], {whole: True}, Verdicts())
        linear._keep_bits(pool, [], {unasked: False}, Verdicts())
        x, rows = torch.randn(1, 64), torch.randn(500, 1, 2048)
        expected, linears = cut(x)[1], [left(row) for row in rows]
        torch.set_num_threads(1)  # as within a step
        assert torch.equal(cut(x)[1], expected)
        assert torch.equal(unasked(x, more=1.0)[1], x * unasked.weight[0] + 2 + 1.0)
        assert all(torch.equal(left(row), theirs) for row, theirs in zip(rows, linears, strict=True))
        assert [("forward" in m.__dict__) for m in (cut, whole, unasked)] == [True, False, True]
    finally:
        torch.set_num_threads(before)


INNER = {"mixtral": "intermediate_size", "olmoe": "intermediate_size", "granitemoe": "intermediate_size"}


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "deepseek_v3", "mixtral", "olmoe", "granitemoe", "dots1"])
@pytest.mark.parametrize("budget", ["full", "minimum"])
def test_whole_models_are_exact(
    family: str, budget: str, toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel]
) -> None:
    """Experts and the rest by our kernel where it agrees, greedy decoding, every logit."""
    wide = {"hidden_size": 256, INNER.get(family, "moe_intermediate_size"): 64}
    folder = toy(family, dtype=torch.bfloat16, **wide)
    model = open_model(folder, budget, kernels="native")
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    promised.needs(model.offload.executor.compute.experts.spinning_pool is not None, "torch's order for these experts")
    linears = [m for m in model.modules() if type(m) is nn.Linear]
    promised.needs(any("forward" in m.__dict__ for m in linears), "torch's order for the other layers")


@pytest.mark.slow
def test_two_threads_are_exact_where_the_library_cuts_sums(
    toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel]
) -> None:
    """A router of real size, whose bits depend on the library's number of threads, and attention heads that fit."""
    wide = {"hidden_size": 2048, "num_experts": 64, "moe_intermediate_size": 128, "head_dim": 64}
    folder = toy("qwen3_moe", dtype=torch.bfloat16, num_hidden_layers=2, **wide)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model, whole = open_model(folder, "full", kernels="native"), oracle.reference(folder)
        oracle.assert_same_steps(oracle.greedy(model), oracle.greedy(whole))
        path = model.offload.anatomy.routers[min(model.offload.anatomy.routers)]
        router, reference = model.get_submodule(path), whole.get_submodule(path)
        rows = torch.randn(2000, 1, 2048).bfloat16()
        theirs = [reference(row) for row in rows]
        if model.offload.passes._leaves_little:
            torch.set_num_threads(1)  # as within a step
        ours = [router(row) for row in rows]
        for answer, expected in zip(ours, theirs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(answer, expected, strict=True))
        promised.needs(model.offload.passes._leaves_little, "nearly all products of a token by our kernels")
    finally:
        torch.set_num_threads(before)


def test_the_kernel_can_be_declined(toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel]) -> None:
    model = open_model(toy("qwen3_moe", dtype=torch.bfloat16), "full", kernels="torch")
    assert not any("forward" in m.__dict__ for m in model.modules() if type(m) is nn.Linear)


def test_layers_that_are_sure_are_not_timed(own_order: SpinningPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are part of a larger work: what one takes by itself does not matter."""
    monkeypatch.setattr(linear, "_faster", lambda *_: {})
    model = nn.ModuleList([nn.Linear(64, 96, bias=False) for _ in range(2)]).bfloat16().requires_grad_(False)
    adopted = linear.speed_up(model, own_order, {}, sure={model[1]})
    assert list(adopted.parts) == [model[1]]
    assert adopted.share == 0.5
