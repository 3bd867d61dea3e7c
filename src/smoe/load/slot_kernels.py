"""Chooses how a GPU computes experts: by kernels that read the slots (`gpu_kernels/`), or by torch's operations.

The kernels are used under four conditions: Triton is installed, they support the experts, they are as accurate as torch
on an expert of every kind, and they are not slower. Otherwise torch computes, with dequantized weights if the experts
are quantized.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter

import torch

from smoe.compute.expert_math import ExpertMath, Weights, within_rounding
from smoe.compute.experts import Experts, Place
from smoe.config import EngineConfig
from smoe.expert import EXACT
from smoe.gpu_kernels import compiled
from smoe.gpu_kernels.slot_experts import Entry, Layer, SlotExperts
from smoe.gpu_kernels.source import MOST_TOKENS, ExpertKind
from smoe.kernels.proof import is_no_further
from smoe.load.selftest import Prover
from smoe.memory.store import ExpertStore

_PROOF_OUTPUTS = 64
_FP32_LEEWAY = 16.0
"""The tolerance for 32-bit results. Both sums are nearly exact then, and it is chance which one is more accurate."""
_ROUNDS = 9
_EXPERTS = 8
_log = logging.getLogger(__name__)


def in_slots(prover: Prover, experts: Experts, config: EngineConfig) -> Experts:
    """Return the experts with GPU kernels for few tokens in all layers, if these kernels are supported, correct and not
    slower than torch. Otherwise return `experts` unchanged."""
    if not _is_gpu(prover.device) or config.kernels == "torch" or not compiled.is_available():
        return experts
    try:
        kernels = proven_kernels(prover, experts, min(config.max_sequences, MOST_TOKENS))
    except Exception as error:  # Triton has many errors, such as a missing compiler for its launcher or an unknown GPU
        _log.warning(
            "experts are computed by torch, because Triton's kernels cannot be used on this machine (%s)", error
        )
        return experts
    if kernels is None:
        return experts
    ours = experts.in_slots(kernels)
    may_measure = config.kernels == "auto" and not config.reproducible
    return ours if not may_measure or _is_no_slower(prover, ours, experts) else experts


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def proven_kernels(prover: Prover, experts: Experts, most_tokens: int) -> dict[Place, SlotExperts] | None:
    """Return a GPU kernel for every (layer, format). Return None if one of the kernels is not supported, fails its test
    or cannot be tested.

    Each kernel is tested on a resident expert, with one token and with up to `most_tokens` tokens.
    """
    samples, alignments = prover.samples(experts), _alignments(prover, experts)
    made: dict[ExpertKind, SlotExperts | None] = {}
    found: dict[Place, SlotExperts] = {}
    for place, math in experts.maths.items():
        kind = math.slot_kind(alignments[math.kind])
        if kind is None or math.kind not in samples:
            return None
        if kind not in made:
            kernel, (_, weights) = SlotExperts(kind), samples[math.kind]
            made[kind] = kernel if is_proven(kernel, math, weights, prover.device, most_tokens) else None
        proven = made[kind]
        if proven is None:
            return None
        found[place] = proven
    return found


def is_proven(kernel: SlotExperts, math: ExpertMath, weights: Weights, device: torch.device, most_tokens: int) -> bool:
    """Return whether a GPU kernel is correct on one expert, for all numbers of tokens that are compiled separately."""
    return all(_is_right(kernel, math, weights, device, tokens) for tokens in (1, 2, 4, 8) if tokens < 2 * most_tokens)


def _is_right(kernel: SlotExperts, math: ExpertMath, weights: Weights, device: torch.device, tokens: int) -> bool:
    """Return whether a GPU kernel is correct for this number of tokens. The first outputs of each matrix product are
    compared with exact ones, and the whole result with torch's."""
    kind, dtype = kernel.kind, getattr(torch, kernel.kind.dtype)
    x = torch.randn(tokens, kind.hidden, generator=torch.Generator().manual_seed(0)).to(dtype)
    routes = torch.arange(tokens, device=device).unsqueeze(1)
    layer = Layer.of(kind, x.to(device), torch.ones(tokens, 1, device=device), routes)
    kernel.multiply(layer, [Entry(weights.addresses, range(tokens))], tokens, has_sum=True)
    theirs = math.forward(layer.x, weights)
    if not within_rounding(layer.rows.to(dtype), theirs) or not within_rounding(layer.out, layer.rows.to(dtype)):
        return False
    inner, rows = layer.inner.cpu(), layer.rows.cpu()
    some, activate = min(_PROOF_OUTPUTS, kind.inner), kind.activation.of
    parts = [math.numbers(weights, matrix, rows) for matrix, rows in _first_outputs(kind, some)]
    biases = [None if each is None else each.cpu() for each in (weights.up_bias, weights.down_bias)]
    up_bias = None if biases[0] is None else torch.cat([biases[0][rows] for rows in _bias_rows(kind, some)])
    down = math.numbers(weights, len(kind.ups), slice(_PROOF_OUTPUTS))
    down_bias = None if biases[1] is None else biases[1][:_PROOF_OUTPUTS]
    first = _Product(x, torch.cat(parts), up_bias, activate)
    second = _Product(inner, down, down_bias, lambda wide: wide)
    return first.is_near(inner[:, :some], dtype) and second.is_near(rows[:, :_PROOF_OUTPUTS], dtype)


def _first_outputs(kind: ExpertKind, some: int) -> list[tuple[int, slice]]:
    """Return as pairs (matrix, rows) the rows of the first product's matrices that give the first `some` outputs after
    the activation."""
    if len(kind.ups) > 1:
        return [(0, slice(some)), (1, slice(some))]
    return [(0, rows) for rows in _bias_rows(kind, some)]


def _bias_rows(kind: ExpertKind, some: int) -> list[slice]:
    """Return the indices of the first product's outputs that give the first `some` outputs after the activation."""
    if not kind.activation.has_gate:
        return [slice(some)]
    return [slice(2 * some)] if kind.activation.takes_turns else [slice(some), slice(kind.inner, kind.inner + some)]


class _Product:
    """A product of rows x [n, K] and a matrix [outputs, K], plus a bias, followed by an activation. It can be computed
    exactly and in torch's arithmetic."""

    def __init__(
        self,
        x: torch.Tensor,
        numbers: torch.Tensor,
        bias: torch.Tensor | None,
        activate: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._x, self._numbers, self._bias, self._activate = x, numbers, bias, activate

    def is_near(self, ours: torch.Tensor, dtype: torch.dtype) -> bool:
        """Return whether our rounded result is as accurate as torch's result. torch also rounds the input of the
        product."""
        leeway = {"leeway": _FP32_LEEWAY} if dtype is torch.float32 else {}
        return is_no_further(ours.to(dtype), self._in(dtype), self._in(torch.float64), **leeway)

    def _in(self, dtype: torch.dtype) -> torch.Tensor:
        wide = self._x.to(dtype) @ self._numbers.to(dtype).T
        return self._activate(wide if self._bias is None else wide + self._bias.to(dtype))


def _alignments(prover: Prover, experts: Experts) -> dict[tuple[object, ...], int]:
    """Return, for each kind of experts, a power of two in bytes that divides the addresses of all matrices of these
    experts.

    All slots share this value. Otherwise each slot might need another kernel, and bits would depend on the slot.
    """
    found: dict[tuple[object, ...], int] = {}
    for (layer, form), math in experts.maths.items():
        store = prover.arrivals.stores[form]
        found[math.kind] = min(found.get(math.kind, 16), alignment_in(store, layer))
    return found


def alignment_in(store: ExpertStore, layer: int) -> int:
    """Return the largest power of two, at most 16, that divides the offsets of all matrices of a layer's experts."""
    bits = 16
    for expert in range(store.layers[layer].experts):
        for name, offset in store.placement(layer, expert).parts.items():
            bits |= 0 if name.endswith("_bias") else offset
    return bits & -bits


def _is_no_slower(prover: Prover, ours: Experts, theirs: Experts) -> bool:
    """Return whether the kernels are at least as fast as torch for one token through the first layer. The fastest of
    several alternating runs decides."""
    layer = next(layer for layer, form in ours.maths if form == EXACT)
    seconds = [float("inf")] * 2
    for _ in range(_ROUNDS):
        for n, experts in enumerate((ours, theirs)):
            seconds[n] = min(seconds[n], _seconds(experts, prover, layer))
    return seconds[0] <= seconds[1]


def _seconds(experts: Experts, prover: Prover, layer: int) -> float:
    """Return the seconds until the device has computed the experts of one token."""
    hidden = torch.zeros(1, experts.hidden_size(layer), dtype=experts.maths[layer, EXACT].dtype, device=prover.device)
    _finish(prover.device)
    started = perf_counter()
    prover.compute_slots(experts, layer, hidden, _EXPERTS)
    _finish(prover.device)
    return perf_counter() - started


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
