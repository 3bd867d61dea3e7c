"""The layers beside the experts, one token at a time: projections, shared experts and the output layer by our kernel.

Every `nn.Linear` whose bits the kernel reproduces and which it computes faster gets a `forward` of its own; with more
rows than one, and everywhere else, the library computes as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import torch
from torch import nn
from torch.nn import functional

from smoe.kernels.crew import Crew, agrees

_LEAST_TIMINGS = 6


def speed_up(model: nn.Module, crew: Crew) -> int:
    """Replace the one-row product of every linear layer that gains by it; returns how many.

    Takes some tens of milliseconds for every distinct shape.
    """
    by_shape: dict[torch.Size, list[nn.Linear]] = {}
    for module in model.modules():
        if type(module) is nn.Linear and module.bias is None:
            by_shape.setdefault(module.weight.shape, []).append(module)
    adopted = 0
    for modules in by_shape.values():
        weights = [module.weight for module in modules]
        if agrees(crew, weights[0].t()) and _is_faster(crew, weights):
            adopted += len(modules)
            for module in modules:
                module.forward = _forward(module, crew)  # type: ignore[method-assign]
    return adopted


def _forward(module: nn.Linear, crew: Crew) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(input: torch.Tensor) -> torch.Tensor:
        weight = module.weight
        if input.numel() != weight.shape[1] or not input.is_contiguous():
            return functional.linear(input, weight)
        return _one_row(input, weight, crew)

    return forward


def _one_row(input: torch.Tensor, weight: torch.Tensor, crew: Crew) -> torch.Tensor:
    """input [..., K] of one row, weight [N, K] -> [..., N]"""
    out = input.new_empty(*input.shape[:-1], weight.shape[0])
    crew.multiply([(input, weight.t(), out)])
    return out


def _is_faster(crew: Crew, weights: Sequence[torch.Tensor]) -> bool:
    """One matrix after the other, as a token meets them: the same one again would lie in the processor's cache."""
    x = weights[0].new_ones(1, weights[0].shape[1])
    rounds = range(-(-_LEAST_TIMINGS // len(weights)))
    theirs = [_seconds(lambda w=w: functional.linear(x, w)) for _ in rounds for w in weights]
    ours = [_seconds(lambda w=w: _one_row(x, w, crew)) for _ in rounds for w in weights]
    return median(ours) < median(theirs)


def _seconds(job: Callable[[], object]) -> float:
    started = perf_counter()
    job()
    return perf_counter() - started
