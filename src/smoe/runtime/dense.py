"""The layers beside the experts, one token at a time: projections, shared experts and the output layer by our kernel.

Every `nn.Linear` whose bits the kernel reproduces and which it computes faster gets a `forward` of its own; with more
rows than one, and everywhere else, the library computes as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import torch
from torch import nn
from torch.nn import functional

from smoe.kernels.crew import Crew, Product, agrees

_LEAST_TIMINGS = 6


def speed_up(model: nn.Module, crew: Crew) -> float:
    """Replace the one-row product of every linear layer that gains by it; returns their share of the linear weights.

    Takes some tens of milliseconds for every distinct shape.
    """
    kinds: dict[tuple[torch.Size, bool], list[nn.Linear]] = {}
    for module in model.modules():
        if type(module) is nn.Linear:
            kinds.setdefault((module.weight.shape, module.bias is not None), []).append(module)
    adopted = total = 0
    for modules in kinds.values():
        first, weights = modules[0], sum(module.weight.numel() for module in modules)
        total += weights
        if agrees(crew, first.weight.t(), first.bias) and _is_faster(crew, modules):
            adopted += weights
            for module in modules:
                module.forward = _forward(module, crew)  # type: ignore[method-assign,assignment]
    return adopted / total if total else 0.0


def _forward(module: nn.Linear, crew: Crew) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(input: torch.Tensor) -> torch.Tensor:
        if input.numel() != module.in_features or not input.is_contiguous():
            return functional.linear(input, module.weight, module.bias)
        return _one_row(input, module, crew)

    return forward


def _one_row(input: torch.Tensor, module: nn.Linear, crew: Crew) -> torch.Tensor:
    """input [..., K] of one row -> [..., N]"""
    out = input.new_empty(*input.shape[:-1], module.out_features)
    crew.multiply([Product(input, module.weight.t(), out, module.bias)])
    return out


def _is_faster(crew: Crew, modules: Sequence[nn.Linear]) -> bool:
    """One matrix after the other, as a token meets them: the same one again would lie in the processor's cache."""
    x, rounds = modules[0].weight.new_ones(1, modules[0].in_features), range(-(-_LEAST_TIMINGS // len(modules)))

    def theirs(module: nn.Linear) -> torch.Tensor:
        return functional.linear(x, module.weight, module.bias)

    def ours(module: nn.Linear) -> torch.Tensor:
        return _one_row(x, module, crew)

    before, after = (
        median(_seconds(functools.partial(way, module)) for _ in rounds for module in modules) for way in (theirs, ours)
    )
    return after < before


def _seconds(job: Callable[[], object]) -> float:
    started = perf_counter()
    job()
    return perf_counter() - started
