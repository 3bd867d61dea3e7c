"""Computes rows through a layer's router in machine code: softmax, the K largest scores, and their weights.

transformers uses five operations, which take more time in Python than the router's product. The bits of the weights may
differ from transformers' by one rounding. So this is used only for models with quantized weights or with products in an
order of our own (grade E1). The code is used for a router if a comparison finds equal logits, experts with equal
logits, and weights equal up to a rounding of bf16. If a layer's block consists only of a router and experts, the router
becomes a part of the attention's job (`kernels/token_attention.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from smoe.fastpath.fast_layer import FastLayer, RoutedBlock
from smoe.fastpath.linear import RouterWeight, row_by_row
from smoe.kernels.matrix import Matrix
from smoe.kernels.spinning_pool import Product, SpinningPool
from smoe.kernels.token_attention import AttachedRouter, Projection
from smoe.kernels.token_router import Routed, TokenRouter
from smoe.kernels.verdicts import Verdicts

_PROOF_ROWS = 32
_SEVERAL = 3
"""The number of tokens in the test of a block with several tokens."""
_ROUNDING = 2.0**-7
"""The largest relative difference of two numbers that round to neighbours in bf16."""

_ATTRIBUTE = "our_router"
"""The attribute of a module that holds its forward function of ours."""

Forward = Callable[..., Any]


def speed_up(
    pool: SpinningPool,
    routers: Iterable[nn.Module],
    layers: Iterable[FastLayer],
    experts: Collection[nn.Module],
    verdicts: Verdicts | None = None,
) -> Collection[nn.Module]:
    """Replace the forward function of every supported router, and make the router a part of its decoder
    layer's job where possible. Return the replaced routers.

    `routers` take only hidden states [T, H]; `layers`: the decoder layers with a forward function of ours; `experts`:
    the modules that contain the experts; `verdicts`: known results of proofs, to which this function adds its own.
    """
    verdicts, found = verdicts or Verdicts(), dict[nn.Module, OurRouter]()
    for number, router in enumerate(routers):  # each is tested with its own weights
        kind = verdicts.of("routing", (number, type(router), pool.kind), partial(_proven, router, pool))
        if kind is not None:
            number_of_experts, top_k, is_normalised = map(int, kind.split())
            found[router] = OurRouter(router, TokenRouter(number_of_experts, top_k, bool(is_normalised)), pool)
    for router, ours in found.items():
        router.forward = row_by_row(pool, ours.forward)  # type: ignore[method-assign]
        setattr(router, _ATTRIBUTE, ours)
    for layer in layers:
        parts = list(layer.block.children())
        gate = next((part for part in parts if part in found), None)
        own = next((part for part in parts if part in experts), None)
        if gate is None or own is None or len(parts) != 2:
            continue
        plain = partial(_is_plain, layer.block, gate, own, found[gate].columns)
        if verdicts.of("block", (layer.index, type(layer.block), pool.kind), plain):
            layer.route_by(found[gate].attached, RoutedBlock(layer.block, gate, own, found[gate].router))
    return found


def is_by_kernel(module: nn.Module) -> bool:
    """Return whether a module is a router that our machine code computes. Its weights can differ from transformers' by
    rounding, and of experts with equal logits it can choose others."""
    return hasattr(module, _ATTRIBUTE)


class OurRouter:
    """The forward function of a router. Our machine code computes one row, and what follows the product of several
    rows; transformers' function computes every other call."""

    def __init__(self, module: nn.Module, router: TokenRouter, pool: SpinningPool) -> None:
        self.library: Forward = module.forward
        self.router = router
        self._parameters, self._pool = module._parameters, pool
        weight = self._weight
        self.columns, self._part = weight.shape[1], weight.part
        self._logits = router.logits

    @property
    def _weight(self) -> RouterWeight:
        return self._parameters["weight"]  # type: ignore[return-value]

    @property
    def attached(self) -> AttachedRouter:
        """The router as an argument for the job of a decoder layer."""
        weight = self._weight
        matrix = Matrix(weight.data_ptr(), *weight.shape)
        return AttachedRouter(
            Projection(matrix, lambda: self._weight.data_ptr(), weight.nbytes, None, self._part), self.router
        )

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the logits [T, E], routing weights [T, K] and expert indices [T, K] for `hidden` [..., H]."""
        weight = self._weight
        if args or kwargs or type(weight) is not RouterWeight or hidden.dtype is not torch.bfloat16:
            return self.library(hidden, *args, **kwargs)
        if hidden.numel() != self.columns or not hidden.is_contiguous():
            return self._several(hidden)
        if hidden.data_ptr() != self.router.row_at:
            with torch._C.DisableTorchFunctionSubclass():
                self._pool.multiply([Product(hidden, weight.t(), self._logits, None, self._part)])
            self.router.choose()
        return tuple(self.router.routed())

    def _several(self, hidden: torch.Tensor) -> Any:
        """Return the same as `forward` for several rows."""
        if not self.router.takes_rows or not hidden.numel():
            return self.library(hidden)
        logits = functional.linear(hidden.reshape(-1, self.columns), self._weight)
        return tuple(self.router.choose_each(self._pool, logits))


def _proven(module: nn.Module, pool: SpinningPool) -> str | None:
    """Return the arguments of the `TokenRouter` whose results agree with those of transformers' function, as a text, or
    None."""
    weight: torch.Tensor | None = module._parameters.get("weight")
    if not isinstance(weight, RouterWeight) or len(module._parameters) != 1 or weight.dtype is not torch.bfloat16:
        return None
    several = torch.randn(_PROOF_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = (*several.split(1), several)
    try:
        with torch.no_grad():
            theirs = [module.forward(row) for row in rows]
        if not all(map(_is_selection, theirs)):
            return None
        experts, top_k = theirs[0][0].shape[1], theirs[0][2].shape[1]
        for is_normalised in (True, False):
            ours = OurRouter(module, TokenRouter(experts, top_k, is_normalised), pool)
            if all(_agree(Routed(*ours.forward(row)), Routed(*given)) for row, given in zip(rows, theirs, strict=True)):
                return f"{experts} {top_k} {is_normalised:d}"
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # the module has another signature
        pass
    return None


def _is_selection(output: object) -> bool:
    """Return whether a router's output is logits bf16 [T, E], weights bf16 [T, K] and indices int64 [T, K]."""
    if not isinstance(output, tuple) or len(output) != 3 or not all(isinstance(each, torch.Tensor) for each in output):
        return False
    types = [each.dtype for each in output]
    are_rows = all(each.dim() == 2 and len(each) == len(output[0]) for each in output)
    return are_rows and types == [torch.bfloat16, torch.bfloat16, torch.int64] and output[1].shape == output[2].shape


def _agree(ours: Routed, theirs: Routed) -> bool:
    """Return whether two routings of the same rows agree. Weights may differ by rounding, and experts with equal logits
    may be exchanged."""
    is_same = torch.equal(ours.logits, theirs.logits)
    chosen = [each.logits.gather(1, each.chosen) for each in (ours, theirs)]
    near = torch.allclose(ours.weights.float(), theirs.weights.float(), rtol=_ROUNDING, atol=0)
    are_distinct = all(len(set(row)) == len(row) for row in ours.chosen.tolist())
    return is_same and torch.equal(*chosen) and near and are_distinct


def _is_plain(block: nn.Module, router: nn.Module, experts: nn.Module, hidden: int) -> bool:
    """Return whether a block only passes its input to the router and the experts, and returns the experts' output
    unchanged."""
    return all(_passes_on(block, router, experts, (1, tokens, hidden)) for tokens in (1, _SEVERAL))


def _passes_on(block: nn.Module, router: nn.Module, experts: nn.Module, shape: tuple[int, ...]) -> bool:
    """Return whether a block does so with hidden states of one shape."""
    seen: list[tuple[torch.Tensor, ...]] = []

    class Stub(nn.Module):
        def forward(self, *given: torch.Tensor) -> torch.Tensor:
            seen.append(given)
            return given[0].flip(-1)

    name = next(name for name, child in block._modules.items() if child is experts)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    block._modules[name] = Stub()
    try:
        with torch.no_grad():
            selection, output = Routed(*router(x[0])), block(x)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # the module has another signature
        return False
    finally:
        block._modules[name] = experts
    if not isinstance(output, torch.Tensor) or len(seen) != 1 or len(seen[0]) != 3:
        return False
    given = zip(seen[0], (x[0], selection.chosen, selection.weights), strict=True)
    return torch.equal(output, x.flip(-1)) and all(torch.equal(one, other) for one, other in given)
