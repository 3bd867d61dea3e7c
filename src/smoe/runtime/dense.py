"""The layers beside the experts, one token at a time: projections, shared experts and the output layer by our kernel.

Every `nn.Linear` whose bits the kernel reproduces and which it computes faster gets a `forward` of its own; with more
rows than one, and everywhere else, the library computes as before.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
from torch import nn
from torch.nn import functional

from smoe.kernels.crew import Crew, agrees

_ROUNDS = 5


def speed_up(model: nn.Module, crew: Crew) -> int:
    """Replace the one-row product of every linear layer that gains by it; returns how many.

    Takes some tens of milliseconds for every distinct shape.
    """
    verdicts: dict[torch.Size, bool] = {}
    adopted = 0
    for module in model.modules():
        if type(module) is not nn.Linear or module.bias is not None:
            continue
        shape = module.weight.shape
        if shape not in verdicts:
            verdicts[shape] = agrees(crew, module.weight.t()) and _is_faster(crew, module.weight)
        if verdicts[shape]:
            module.forward = _forward(module, crew)  # type: ignore[method-assign]
            adopted += 1
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


def _is_faster(crew: Crew, weight: torch.Tensor) -> bool:
    x = weight.new_ones(1, weight.shape[1])
    ours = theirs = float("inf")
    for _ in range(_ROUNDS):
        theirs = min(theirs, _seconds(lambda: functional.linear(x, weight)))
        ours = min(ours, _seconds(lambda: _one_row(x, weight, crew)))
    return ours < theirs


def _seconds(job: Callable[[], object]) -> float:
    started = perf_counter()
    job()
    return perf_counter() - started
