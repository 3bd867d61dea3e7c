"""The self-test when a model is loaded: compares two experts of every distinct layer with transformers' own loop.

transformers' loop runs on fused parameters of only these two experts, which safetensors' own reader reads and the
checkpoint's conversion rules join. So the index, the order of gate and up, the slot layout and the arithmetic are all
compared. On a CPU a difference of one bit is an error. On a GPU, where products are equal up to rounding (grade E2), a
difference beyond rounding is an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

from smoe.compute.expert_math import ROUNDINGS, Weights
from smoe.compute.experts import Experts, Place
from smoe.errors import UnsupportedModelError
from smoe.expert import EXACT, LOW, ExpertKey
from smoe.kernels.verdicts import Verdicts
from smoe.memory.pacing import Pacing
from smoe.memory.quantised_store import is_quantised
from smoe.memory.store import StoredLayer
from smoe.models.outline import ExpertsSite
from smoe.models.reference import reference_parameters
from smoe.policy.plan import Serve
from smoe.routing import Phase
from smoe.runtime.arrivals import Arrivals
from smoe.runtime.execute import LayerExecutor
from smoe.runtime.layer import LayerCompute
from smoe.runtime.seam import original_experts_forward
from smoe.runtime.step import Step

FP32_ROUNDING = 1e-5
"""The tolerance of grade E2 for 32-bit results, relative to the largest value."""
_TF32_EPS = 2.0**-10
_STEPS = ((Phase.PREFILL, 3), (Phase.DECODE, 1))


class Prover:
    """Computes experts with the engine's slots and loads before the engine exists, to compare the results with
    transformers'."""

    def __init__(self, arrivals: Arrivals, device: torch.device) -> None:
        self.arrivals, self.device = arrivals, device
        self.store = arrivals.stores[EXACT]

    def executor(self, experts: Experts) -> LayerExecutor:
        """Return an executor of single layers that uses no compute unit except the device."""
        return LayerExecutor(compute=LayerCompute(experts, self.arrivals, self.device, {}, Pacing()))

    def samples(self, experts: Experts) -> dict[tuple[object, ...], tuple[ExpertKey, Weights]]:
        """Return one resident expert (its key and its weights) for every kind of experts (`ExpertMath.kind`)."""
        found: dict[tuple[object, ...], tuple[ExpertKey, Weights]] = {}
        for key in sorted(self.arrivals.table.ready):
            found.setdefault(experts.math_of(key).kind, (key, self.arrivals.ready(key)))
        return found

    def sample(self, experts: Experts, place: Place) -> Weights | None:
        """Return the weights of a resident expert of this layer and format, after loading one if none is resident.
        Return None if the expert does not stay in a slot."""
        layer, form = place
        weights = self._resident(place)
        if weights is None:
            math = experts.maths[place]
            hidden = torch.zeros(1, math.hidden, dtype=math.dtype, device=self.device)
            index = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            run(self.executor(experts), Step(layer, Phase.DECODE, hidden, index, hidden.new_ones(1, 1)), form)
            weights = self._resident(place)
        return weights

    def _resident(self, place: Place) -> Weights | None:
        layer, form = place
        key = min((key for key in self.arrivals.table.ready if (key[0], key[2]) == (layer, form)), default=None)
        return None if key is None else self.arrivals.ready(key)

    def compute_slots(self, experts: Experts, layer: int, hidden: torch.Tensor, count: int) -> torch.Tensor:
        """Return the output [1, H] of one token [1, H] for the experts in `count` slots. The slots may contain any
        experts, because only the time is measured."""
        weights = self.arrivals.slots_of(experts.maths[layer, EXACT], layer, count)
        serves = [Serve((layer, n, EXACT), (n,), False) for n in range(count)]
        token = experts.begin[layer](serves, hidden, hidden.new_ones(1, count))
        token.compute(0, weights)
        return token.total()


def proven_sums(
    sites: Sequence[ExpertsSite],
    model: nn.Module,
    checkpoint: Mapping[int, Mapping[int, StoredLayer]],
    prover: Prover,
    experts: Experts,
    dtype: torch.dtype,
    verdicts: Verdicts,
) -> Experts:
    """Return `experts`, with outputs summed in transformers' order and dtype, after comparing every distinct layout and
    format. Raise `UnsupportedModelError` if no dtype gives transformers' result. `verdicts`: known results of proofs;
    this function adds its own."""
    modules = dict(model.named_modules())
    kinds = {(site.experts, site.parts, experts.kind(site.layer)): site for site in reversed(sites)}
    for site in kinds.values():
        for form, of in checkpoint.items():
            given = site, modules[site.name], of[site.layer], prover, experts, dtype, form
            subject = site.layer, form, experts.maths[site.layer, form].subject, experts.sums_as_weights
            sums_as_weights = verdicts.of("experts", subject, partial(_checked_sums, *given))
            if sums_as_weights and not experts.sums_as_weights:
                experts = experts.summing_as_weights()
    return experts


def _checked_sums(
    site: ExpertsSite,
    module: nn.Module,
    checkpoint: StoredLayer,
    prover: Prover,
    experts: Experts,
    dtype: torch.dtype,
    form: int,
) -> bool:
    """Return whether transformers sums the outputs in the dtype of the routing weights. Raise as `check_experts`."""
    return check_experts(site, module, checkpoint, prover, experts, dtype, form).sums_as_weights


def check_experts(
    site: ExpertsSite,
    module: nn.Module,
    checkpoint: StoredLayer,
    prover: Prover,
    experts: Experts,
    dtype: torch.dtype,
    form: int = EXACT,
) -> Experts:
    """Raise `UnsupportedModelError` if our result for a layer's first two experts differs from transformers' result.
    Return the experts, set to sum in the dtype of the routing weights if transformers does.

    Quantized experts are compared with transformers' result on dequantized weights.
    """
    allowed = quantised_rounding(dtype) if is_quantised({site.layer: checkpoint}) else rounding(dtype, prover.device)
    width = min(2, site.experts)
    for (phase, tokens), type_of_weights in itertools.product(_STEPS, dict.fromkeys((dtype, torch.float32))):
        hidden = torch.randn(tokens, experts.hidden_size(site.layer), generator=torch.Generator().manual_seed(0))
        hidden = hidden.to(dtype).to(prover.device)
        index = torch.arange(width, device=prover.device).repeat(tokens, 1)
        weights = torch.linspace(0.3, 0.7, width, device=prover.device).to(type_of_weights).repeat(tokens, 1)
        try:
            theirs = library_result(module, checkpoint, list(range(width)), hidden, index, weights)
        except RuntimeError:
            if type_of_weights is dtype:
                raise
            continue  # dbrx: its router never returns such weights, and its loop cannot add them
        step = Step(site.layer, phase, hidden, index, weights)
        ours = run(prover.executor(experts), step, form)
        if not is_same(ours, theirs, allowed) and type_of_weights is not dtype:  # nemotron_h sums in the weights' dtype
            experts = experts.summing_as_weights()
            ours = run(prover.executor(experts), step, form)
        if not is_same(ours, theirs, allowed):
            difference = (ours.float() - theirs.float()).abs().max().item()
            raise UnsupportedModelError(
                f"the self-test failed in layer {site.layer} ({type(module).__name__}, {phase.value}): smoe's result "
                f"differs from transformers' by {difference:.3g}; this family cannot be served exactly"
            )
    return experts


def run(executor: LayerExecutor, step: Step, form: int) -> torch.Tensor:
    """Return the result of a step, computed with the experts' copies of the format `form`."""
    with executor.by_low_copies() if form == LOW else nullcontext():
        return executor.run(step)


def rounding(dtype: torch.dtype, device: torch.device) -> float:
    """Return the tolerance of the comparison, relative to the largest value. It is 0 on a CPU.

    With 32 bits only the order of long sums differs, unless TF32 is enabled. With 16 bits, results may be rounded to
    neighbouring numbers after the up product, the activation, the down product and the weighted sum.
    """
    if device.type == "cpu":
        return 0.0
    if dtype is torch.float32 and not _has_tf32():
        return FP32_ROUNDING
    return ROUNDINGS * (_TF32_EPS if dtype is torch.float32 else torch.finfo(dtype).eps)


def quantised_rounding(dtype: torch.dtype) -> float:
    """Return the tolerance for quantized experts, on any device. Our products differ from torch's, and dequantized
    matrices may be summed in another order."""
    return FP32_ROUNDING if dtype is torch.float32 else ROUNDINGS * torch.finfo(dtype).eps


def _has_tf32() -> bool:
    matmul = torch.backends.cuda.matmul
    try:
        return bool(matmul.allow_tf32)
    except RuntimeError:  # torch's newer setting is in use, and the older one may not be read
        return bool(matmul.fp32_precision == "tf32")


def is_same(ours: torch.Tensor, theirs: torch.Tensor, rounding: float) -> bool:
    """Return whether two results are equal: in every bit if `rounding` is 0, else up to a relative difference of
    `rounding`. Non-finite values are never equal."""
    if rounding == 0:
        return torch.equal(ours, theirs)
    far = (ours.float() - theirs.float()).abs().max()
    return bool(far <= rounding * theirs.float().abs().max())


def library_result(
    module: nn.Module,
    checkpoint: StoredLayer,
    chosen: list[int],
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return the result of transformers' eager loop over only the experts `chosen`. The entries of `index` are
    positions in `chosen`."""
    parameters = reference_parameters(checkpoint, chosen, hidden.dtype)
    experts = module.num_experts
    try:
        module.num_experts = len(chosen)  # type: ignore[assignment]
        for name, value in parameters.items():
            setattr(module, name, value.to(hidden.device))
        with torch.no_grad():
            return original_experts_forward(module)(hidden, index, weights)
    finally:
        module.num_experts = experts
        for name in parameters:
            delattr(module, name)
