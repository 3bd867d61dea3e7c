"""The matrix behind a router's logits, found among its parameters, or refused.

Would catch: a bias that is overlooked because it is small, a router taken for linear that is not.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from smoe.errors import UnsupportedModelError
from smoe.models.router_matrix import find_matrix

HIDDEN, EXPERTS = 16, 6
Logits = Callable[["Router", torch.Tensor], torch.Tensor]


class Router(nn.Module):
    """Two matrices and two biases; `logits` says which it uses, and how."""

    def __init__(self, logits: Logits) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.other = nn.Parameter(torch.randn(EXPERTS, HIDDEN, generator=generator))
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN, generator=generator))
        self.correction = nn.Parameter(torch.randn(EXPERTS, generator=generator))
        self.bias = nn.Parameter(1e-3 * torch.randn(EXPERTS, generator=generator))
        self._logits = logits

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self._logits(self, x)
        return logits, *logits.softmax(-1).topk(2, dim=-1)


def found(router: Router, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor | None]:
    return find_matrix(router.to(dtype), nn.Module(), HIDDEN, EXPERTS, dtype, layer=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_routers_own_parameters_are_found(dtype: torch.dtype) -> None:
    plain = Router(lambda router, x: functional.linear(x, router.weight))
    weight, bias = found(plain, dtype)
    assert weight.data_ptr() == plain.weight.data_ptr() and bias is None
    wide = Router(lambda router, x: functional.linear(x.float(), router.weight.float()))
    assert found(wide, dtype)[0].data_ptr() == wide.weight.data_ptr()


def test_a_small_bias_is_not_overlooked() -> None:
    router = Router(lambda router, x: functional.linear(x, router.weight, router.bias))
    weight, bias = found(router)
    assert weight.data_ptr() == router.weight.data_ptr()
    assert bias is not None and bias.data_ptr() == router.bias.data_ptr()


@pytest.mark.parametrize(
    "logits",
    [
        lambda router, x: functional.linear(x, router.weight).tanh(),
        lambda router, x: functional.linear(x, router.weight) * 1.05,
        lambda router, x: functional.linear(functional.normalize(x), router.weight),
        lambda router, x: functional.linear(x, router.weight) * torch.nan,
    ],
    ids=["bent", "scaled", "normalised", "not a number"],
)
def test_what_is_no_plain_product_is_refused_with_a_way_out(logits: Logits) -> None:
    with pytest.raises(UnsupportedModelError, match=r"layer 4 .*such as next-gate"):
        found(Router(logits))
