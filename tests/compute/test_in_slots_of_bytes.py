"""Experts of one layer in slots, as a plan has them computed: some at once, some late, some elsewhere.

Would catch: rows that were computed elsewhere put to other routes, a partial sum that counts what is still to come, two
formats in one layer of which one is computed by the other's kernel.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smoe.compute.decode_experts import ChosenExperts, DecodeExperts, way_of
from smoe.compute.expert_math import ProvenKernels
from smoe.compute.in_slots import InSlots
from smoe.formats.registry import FORMATS
from smoe.gpu_kernels.slot_experts import SlotExperts
from smoe.gpu_kernels.source import MOST_TOKENS
from tests.gpu_kernels.slots_of_bytes import DEVICE, WHOLE, Slots, choices, quantised, routes_of

pytest.importorskip("triton", reason="Triton is not installed")

HIDDEN, INNER, EXPERTS, WIDTH = 64, 32, 5, 2
OWN = Slots(quantised(FORMATS["Q8_0"], FORMATS["Q8_0"], HIDDEN, INNER), EXPERTS)
LOW = Slots(quantised(FORMATS["Q4_1"], FORMATS["Q4_0"], HIDDEN, INNER), EXPERTS, seed=7)
KERNELS = {id(each): SlotExperts(each.kind, WHOLE) for each in (OWN, LOW)}


class Layer:
    """What a layer's router chose, and what serves each expert."""

    def __init__(self, tokens: int) -> None:
        self.choice = choices(tokens, WIDTH, EXPERTS, seed=tokens)
        self.routes = routes_of(self.choice)
        self.order = list(self.routes)[::-1]
        self.slots = [LOW if expert % 3 == 1 else OWN for expert in self.order]
        self.x = torch.randn(tokens, HIDDEN).bfloat16()
        self.gains = torch.rand(tokens, WIDTH)

    def run(self) -> DecodeExperts:
        maths: list[Any] = [SimpleNamespace(kernels=ProvenKernels(slots=KERNELS[id(of)])) for of in self.slots]
        routes = [self.routes[expert] for expert in self.order]
        ascending = sorted(range(len(self.order)), key=lambda n: self.order[n])
        return way_of(maths, None)(ChosenExperts(maths, self.x.to(DEVICE), self.gains.to(DEVICE), routes, ascending))

    def weights(self, n: int) -> Any:
        return SimpleNamespace(addresses=self.slots[n].addresses(self.order[n]))

    def rows(self, n: int) -> torch.Tensor:
        """Exact, as somebody else might compute them."""
        return self.slots[n].exact(self.order[n], self.x[[route // WIDTH for route in self.routes[self.order[n]]]])

    def exact(self, numbers: range) -> torch.Tensor:
        out, flat = torch.zeros(len(self.x), HIDDEN, dtype=torch.float64), self.gains.flatten().double()
        for n in numbers:
            for route, row in zip(self.routes[self.order[n]], self.rows(n), strict=True):
                out[route // WIDTH] += flat[route] * row
        return out


def assert_near(ours: torch.Tensor, exact: torch.Tensor) -> None:
    assert ours.dtype is torch.bfloat16
    assert (ours.cpu().double() - exact).abs().max() <= 2**-7 * exact.abs().max()


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_some_here_some_late_some_elsewhere(tokens: int) -> None:
    layer = Layer(tokens)
    count = len(layer.order)
    run = layer.run()
    assert isinstance(run, InSlots)
    here = count - 1 if count > 2 else 1
    run.compute(0, [layer.weights(n) for n in range(here)])
    assert_near(run.partial(here), layer.exact(range(here)))
    for n in range(here, count):
        run.put(n, layer.rows(n).bfloat16().to(DEVICE))
    assert_near(run.total(), layer.exact(range(count)))
    alone = layer.run()
    for n in reversed(range(count)):
        alone.compute(n, [layer.weights(n)])
    together = layer.run()
    together.compute(0, [layer.weights(n) for n in range(count)])
    assert torch.equal(alone.total(), together.total())


def test_a_padded_token_gets_nothing() -> None:
    """Its routes belong to no expert."""
    layer = Layer(2)
    layer.routes = {expert: [route for route in routes if route < WIDTH] for expert, routes in layer.routes.items()}
    layer.routes = {expert: routes for expert, routes in layer.routes.items() if routes}
    layer.order, layer.slots = list(layer.routes), [OWN] * len(layer.routes)
    run = layer.run()
    run.compute(0, [layer.weights(n) for n in range(len(layer.order))])
    assert_near(run.total(), layer.exact(range(len(layer.order))))
    assert not run.total()[1].any()


def test_more_tokens_than_the_kernels_take_go_another_way() -> None:
    maths: list[Any] = [SimpleNamespace(kernels=ProvenKernels(slots=KERNELS[id(OWN)]))]
    many = torch.ones(MOST_TOKENS + 1, HIDDEN), torch.ones(MOST_TOKENS + 1, 1)
    run = way_of(maths, None)(ChosenExperts(maths, *many, [[0]], [0]))
    assert not isinstance(run, InSlots)
    mixed: list[Any] = [*maths, SimpleNamespace(kernels=ProvenKernels())]
    chosen = ChosenExperts(mixed, torch.ones(1, 2), torch.ones(1, 2), [[0], [1]], [0, 1])
    assert not isinstance(way_of(mixed, None)(chosen), InSlots)
