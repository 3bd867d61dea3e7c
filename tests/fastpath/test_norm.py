"""RMSNorm by our kernel: bit by bit the library's modules, and left to the library where it must be.

Would catch another order of the sum, another rounding, a row that takes its neighbour's numbers, a proof that proves
nothing, a norm of another formula, an input that does not lie in one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm
from transformers.models.olmoe.modeling_olmoe import OlmoeRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated

from smoe.fastpath import norm
from smoe.fastpath.norm import MOST_NUMBERS, agrees, speed_up
from smoe.kernels import norm as kernel
from smoe.kernels import norm_code
from smoe.kernels.norm import normed
from tests import oracle, promised

SIZES = (16, 48, 64, 128, 192, 512, 528, 1040, 2048, 2880, 3072, 8192)
EXTREMES = (0.0, -0.0, 1e-40, 1e-30, 1e-20, 1e19, 3e38, float("inf"), float("-inf"), float("nan"))
ORDER = "the order in which torch sums squares"


def made(make: Callable[..., nn.Module], size: int, seed: int = 0) -> nn.Module:
    module = make(size, eps=1e-6).bfloat16().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for weight in module.parameters():
        weight.copy_(1 + 0.3 * torch.randn(size, generator=generator))
    return module


def kind_of(module: nn.Module) -> norm.Kind:
    found = norm._kind(module)
    assert found is not None
    return found


@pytest.fixture
def works() -> None:
    """The kernel agrees with the library's modules here."""
    promised.needs_machine_code()
    for size in (128, 1536, 2048):
        module = made(Qwen3MoeRMSNorm, size)
        promised.needs(agrees(module, kind_of(module)), f"{ORDER} of {size}")


def same_or_declined(module: nn.Module, x: torch.Tensor, eps: float = 1e-6) -> None:
    """The kernel's bits are the module's, or the proof says that modules of this kind are none of its."""
    ours, theirs = normed(x, module.weight, eps), module(x)
    try:
        assert_same(ours, theirs)
    except AssertionError:
        promised.holds(False, lambda: agrees(module, kind_of(module)), f"{ORDER} of {x.shape[-1]}")


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Zeros of both signs apart; whatever is no number is the same."""
    assert ours.shape == theirs.shape
    assert ours.dtype is theirs.dtype
    assert ours.stride() == theirs.stride()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(nan=7.0).view(torch.int16), theirs.nan_to_num(nan=7.0).view(torch.int16))


@pytest.mark.usefixtures("works")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", [Qwen3MoeRMSNorm, MixtralRMSNorm, OlmoeRMSNorm])
def test_the_bits_are_the_librarys(make: Callable[..., nn.Module], size: int) -> None:
    module, generator = made(make, size), torch.Generator().manual_seed(size)
    for rows in (1, 2, 3, 16, 1 + (1 << 18) // size):
        spread = torch.randn(rows, 1, generator=generator).mul(2).exp()
        x = (torch.randn(1, rows, size, generator=generator) * spread).bfloat16()
        same_or_declined(module, x)


@pytest.mark.usefixtures("works")
@pytest.mark.parametrize("size", [16, 48, 2048])
@pytest.mark.parametrize("value", EXTREMES)
def test_extreme_numbers(value: float, size: int) -> None:
    module = made(Qwen3MoeRMSNorm, size)
    module.weight[1], module.weight[2], module.weight[3] = 0.0, float("inf"), 1e-38
    x = torch.full((5, size), value).bfloat16()
    x[1, ::2] = 1.0
    x[2, 1:] = -1e-3
    x[3, :-1] = 3e-39
    x[4, 5:] = torch.randn(size - 5)
    same_or_declined(module, x)


@pytest.mark.usefixtures("works")
@pytest.mark.parametrize("eps", [1e-5, 1e-6, 0.0, 1.0])
def test_epsilon(eps: float) -> None:
    module = Qwen3MoeRMSNorm(128, eps).bfloat16().requires_grad_(False)
    same_or_declined(module, (torch.randn(200, 128) * torch.randn(200, 1).mul(4).exp()).bfloat16(), eps)


class Counted:
    """How often the kernel was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: object) -> torch.Tensor:
        self.calls += 1
        return normed(*args)  # type: ignore[arg-type]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    counted = Counted()
    monkeypatch.setattr(norm, "normed", counted)
    return counted


SHAPES = [(1, 1, 128), (1, 1, 16, 128), (128,), (3, 128), (1, 1, 255, 128)]


@pytest.mark.usefixtures("works")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tokens_rows_are_the_kernels(shape: tuple[int, ...], counted: Counted) -> None:
    module, x = made(Qwen3MoeRMSNorm, 128), torch.randn(shape).bfloat16()
    theirs = module(x)
    assert len(speed_up(module)) == 1
    counted.calls = 0
    assert_same(module(x), theirs)
    assert counted.calls == 1


@pytest.mark.usefixtures("works")
def test_a_part_of_a_projection_is_the_kernels(counted: Counted) -> None:
    """One row of a longer one lies in one piece."""
    module, x = made(Qwen3MoeRMSNorm, 128), torch.randn(1, 1, 192).bfloat16()[..., :128]
    theirs = module(x)
    speed_up(module)
    counted.calls = 0
    assert_same(module(x), theirs)
    assert counted.calls == 1


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(1, 3, 192).bfloat16()[..., :128],
        torch.randn(1, 3, 256).bfloat16()[..., ::2],
        torch.randn(1, 128, 3).bfloat16().transpose(1, 2),
        torch.randn(1, 1, MOST_NUMBERS // 128 + 1, 128).bfloat16(),  # a long prompt
        torch.randn(0, 128).bfloat16(),
        torch.randn(1, 1, 128),
        torch.randn(1, 1, 128).bfloat16().requires_grad_(),
        nn.Parameter(torch.randn(1, 1, 128).bfloat16(), requires_grad=False),
    ],
)
def test_other_inputs_are_the_librarys(x: torch.Tensor, counted: Counted) -> None:
    module = made(Qwen3MoeRMSNorm, 128)
    theirs = module(x)
    speed_up(module)
    counted.calls = 0
    ours = module(x)
    assert counted.calls == 0
    assert torch.equal(ours, theirs)
    assert ours.requires_grad is theirs.requires_grad


@pytest.mark.usefixtures("works")
def test_weights_that_learn_are_the_librarys(counted: Counted) -> None:
    module, x = made(Qwen3MoeRMSNorm, 128), torch.randn(1, 1, 128).bfloat16()
    module.weight.requires_grad_()
    assert len(speed_up(module)) == 1
    counted.calls = 0
    assert module(x).requires_grad
    assert module(hidden_states=x).requires_grad
    assert counted.calls == 0
    with torch.no_grad():
        assert_same(module(x), module(hidden_states=x))
    assert counted.calls == 1


def test_a_weight_may_be_replaced() -> None:
    module, x = made(Qwen3MoeRMSNorm, 128), torch.randn(1, 1, 128).bfloat16()
    speed_up(module)
    other = made(Qwen3MoeRMSNorm, 128, seed=1)
    module.weight = other.weight
    assert_same(module(x), other(x))
    module.float()
    assert module(x).dtype is torch.float32


class RoundedOnce(Qwen3MoeRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * y).to(x.dtype)


class Divided(Qwen3MoeRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return self.weight * (y / torch.sqrt(y.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype)


class SummedInDouble(Qwen3MoeRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        mean = y.double().pow(2).mean(-1, keepdim=True).float()
        return self.weight * (y * torch.rsqrt(mean + self.variance_epsilon)).to(x.dtype)


class Offset(Qwen3MoeRMSNorm):
    """Two modules of one class and one size that compute different things."""

    def __init__(self, size: int, eps: float, offset: float = 1.0) -> None:
        super().__init__(size, eps)
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.offset


class OfFourParts(Qwen3MoeRMSNorm):
    """Does not take rows at all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(2, 2, 2, -1) * self.weight.view(7, -1)


class Buffered(Qwen3MoeRMSNorm):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.register_buffer("bias", torch.ones(size))


class Nested(Qwen3MoeRMSNorm):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.inner = nn.LayerNorm(size)


@pytest.mark.usefixtures("works")
@pytest.mark.parametrize("size", [128, 2048])
@pytest.mark.parametrize(
    "make",
    [
        Qwen3NextRMSNormGated,
        nn.LayerNorm,
        lambda size, eps: nn.LayerNorm(size, eps, bias=False),
        lambda size, eps: nn.LayerNorm(size, eps, elementwise_affine=False),
        RoundedOnce,
        Divided,
        SummedInDouble,
        Offset,
        OfFourParts,
        Buffered,
        Nested,
        lambda size, eps: nn.Embedding(size, 1),
    ],
)
def test_other_norms_are_left_alone(make: Callable[..., nn.Module], size: int) -> None:
    module = make(size, eps=1e-6).bfloat16().requires_grad_(False)
    assert len(speed_up(module)) == 0
    assert "forward" not in vars(module)


@pytest.mark.usefixtures("works")
def test_each_is_judged_by_itself() -> None:
    """By its class, its size and whatever else it says of itself; a weight of zeros proves nothing."""
    zero = made(Qwen3MoeRMSNorm, 128)
    zero.weight.zero_()
    wrong = made(RoundedOnce, 128)
    wrong.weight.zero_()
    modules = [zero, wrong, Offset(128, 1e-6, 0.0), Offset(128, 1e-6, 1.0), made(Qwen3MoeRMSNorm, 100)]
    model = nn.ModuleList(modules).bfloat16().requires_grad_(False)
    assert len(speed_up(model)) == 2
    assert ["forward" in vars(module) for module in modules] == [True, False, True, False, False]
    assert len(speed_up(model)) == 0, "it has been done"


def two_accumulators(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(norm_code, "_ACCUMULATORS", 2)
    patch.setattr(norm_code, "_TOGETHER", 16)
    return kernel.source()


def longer_rounds(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(norm_code, "_ROUND", 32)
    return kernel.source()


def wider_registers(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(norm_code, "_SUM_LANES", 16)
    patch.setattr(norm_code, "_TOGETHER", 64)
    return kernel.source()


def lanes_by_halves(patch: pytest.MonkeyPatch) -> str:
    return kernel.source().replace('= call float @"llvm.vector.reduce', '= call reassoc float @"llvm.vector.reduce')


def last_accumulator_first(patch: pytest.MonkeyPatch) -> str:
    right = norm_code._summed
    patch.setattr(norm_code, "_summed", lambda code, total, others: right(code, total, [*reversed(others)]))
    return kernel.source()


def reciprocal_of_the_size(patch: pytest.MonkeyPatch) -> str:
    def mean(code: Any, total: Any, count: Any) -> Any:
        one = norm_code.copies(norm_code.FLOAT, 1.0)
        return code.build.fmul(total, code.build.fdiv(one, code.build.sitofp(count, norm_code.FLOAT)))

    patch.setattr(norm_code, "_mean", mean)
    return kernel.source()


WRONG = [
    two_accumulators,
    longer_rounds,
    wider_registers,
    lanes_by_halves,
    last_accumulator_first,
    reciprocal_of_the_size,
]


@pytest.mark.usefixtures("works")
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_order_is_noticed(wrong: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernel.source()
    text = wrong(monkeypatch)
    assert text != right
    monkeypatch.setattr(kernel, "source", lambda: text)
    made_anew = kernel._functions.__wrapped__()
    monkeypatch.setattr(kernel, "_functions", lambda: made_anew)
    size = 1536
    module = made(Qwen3MoeRMSNorm, size)
    assert not agrees(module, kind_of(module))
    around_zero = made(Qwen3NextRMSNorm, size)
    assert not agrees(around_zero, kind_of(around_zero), True)


@pytest.mark.usefixtures("works")
@pytest.mark.parametrize("size", [128, 2048])
@pytest.mark.parametrize("make", [GemmaRMSNorm, Qwen3NextRMSNorm])
def test_weights_around_zero_have_the_bits_of_the_library(make: Callable[..., nn.Module], size: int) -> None:
    """They are in no other kernel, which would multiply by them."""
    module, x = made(make, size), torch.randn(1, 7, size, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        module.weight.copy_(0.3 * torch.randn(size, generator=torch.Generator().manual_seed(2)))
        theirs = module(x)
        assert speed_up(module) == {} and "forward" in vars(module)
        assert_same(module(x), theirs)


FAMILIES = ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "granitemoe", "dots1", "deepseek_v3"]


@pytest.mark.usefixtures("each_part_alone")
@pytest.mark.parametrize("family", FAMILIES)
def test_whole_models_are_exact(
    family: str, counted: Counted, toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel]
) -> None:
    folder = toy(family, dtype=torch.bfloat16, hidden_size=256)
    model = open_model(folder, "minimum", kernels="native")
    norms = [module for module in model.modules() if "RMSNorm" in type(module).__name__]
    adopted = sum("forward" in vars(module) for module in norms)
    counted.calls = 0
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    promised.needs(adopted > 2 * model.config.num_hidden_layers, ORDER)
    assert counted.calls >= (oracle.NEW_TOKENS - 1) * adopted, "norms were left to the library"


def test_the_kernel_can_be_declined(toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel]) -> None:
    model = open_model(toy("qwen3_moe", dtype=torch.bfloat16), "full", kernels="torch")
    assert not any("forward" in vars(module) for module in model.modules() if "RMSNorm" in type(module).__name__)
