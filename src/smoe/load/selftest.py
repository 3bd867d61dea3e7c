"""The self-test at load: compare two experts of every distinct layer with transformers' own loop.

transformers' loop runs on fused parameters of just these two experts, read by safetensors' own reader and joined by the
checkpoint's conversion rules. So the index, the order of gate and up, the slot layout and the arithmetic are all
compared. On a CPU a difference of one bit is refused. On a GPU, where products are equal up to rounding (grade E2), a
difference beyond rounding is refused.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

from smoe.compute.expert_math import ROUNDINGS
from smoe.errors import UnsupportedModelError
from smoe.memory.quantised_store import is_quantised
from smoe.memory.store import StoredLayer
from smoe.models.outline import ExpertsSite
from smoe.models.reference import reference_parameters
from smoe.routing import Phase
from smoe.runtime.execute import LayerExecutor
from smoe.runtime.seam import original_experts_forward
from smoe.runtime.step import Step

FP32_ROUNDING = 1e-5
"""The tolerance of grade E2 in 32 bits, relative to the largest value."""
_TF32_EPS = 2.0**-10
_STEPS = ((Phase.PREFILL, 3), (Phase.DECODE, 1))


def check_experts(
    site: ExpertsSite, module: nn.Module, checkpoint: StoredLayer, executor: LayerExecutor, dtype: torch.dtype
) -> None:
    """Raise `UnsupportedModelError` if our result for a layer's first two experts differs from transformers'.

    For quantized experts the comparison is with transformers' result on dequantized weights.
    """
    allowed = quantised_rounding(dtype) if is_quantised({site.layer: checkpoint}) else rounding(dtype, executor.device)
    width = min(2, site.experts)
    for (phase, tokens), type_of_weights in itertools.product(_STEPS, dict.fromkeys((dtype, torch.float32))):
        hidden = torch.randn(
            tokens, executor.compute.hidden_size(site.layer), generator=torch.Generator().manual_seed(0)
        )
        hidden = hidden.to(dtype).to(executor.device)
        index = torch.arange(width, device=executor.device).repeat(tokens, 1)
        weights = torch.linspace(0.3, 0.7, width, device=executor.device).to(type_of_weights).repeat(tokens, 1)
        try:
            theirs = library_result(module, checkpoint, list(range(width)), hidden, index, weights)
        except RuntimeError:
            if type_of_weights is dtype:
                raise
            continue  # dbrx: its router never returns such weights, and its loop cannot add them
        ours = executor.run(Step(site.layer, phase, hidden, index, weights))
        if not is_same(ours, theirs, allowed) and type_of_weights is not dtype:  # nemotron_h sums in the weights' dtype
            executor.compute.sum_as_weights()
            ours = executor.run(Step(site.layer, phase, hidden, index, weights))
        if not is_same(ours, theirs, allowed):
            difference = (ours.float() - theirs.float()).abs().max().item()
            raise UnsupportedModelError(
                f"self-test failed in layer {site.layer} ({type(module).__name__}, {phase.value}): our result differs "
                f"from the library's by {difference:.3g}; this family cannot be served exactly"
            )


def rounding(dtype: torch.dtype, device: torch.device) -> float:
    """Return the tolerance relative to the largest value: 0 on a CPU.

    In 32 bits only the order of long sums differs, unless TF32 is enabled. In 16 bits results may round to neighbours
    after the up product, the activation, the down product and the weighted sum.
    """
    if device.type == "cpu":
        return 0.0
    if dtype is torch.float32 and not _has_tf32():
        return FP32_ROUNDING
    return ROUNDINGS * (_TF32_EPS if dtype is torch.float32 else torch.finfo(dtype).eps)


def quantised_rounding(dtype: torch.dtype) -> float:
    """Return the tolerance for quantized experts on any device: our products differ from torch's, and dequantized
    matrices may be summed in another order."""
    return FP32_ROUNDING if dtype is torch.float32 else ROUNDINGS * torch.finfo(dtype).eps


def _has_tf32() -> bool:
    matmul = torch.backends.cuda.matmul
    try:
        return bool(matmul.allow_tf32)
    except RuntimeError:  # torch's newer setting is in use, and the older one may not be read
        return bool(matmul.fp32_precision == "tf32")


def is_same(ours: torch.Tensor, theirs: torch.Tensor, rounding: float) -> bool:
    """Return whether results are bit-equal, or with a `rounding` above 0 differ by no more; non-finite values are never
    equal."""
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
    """Return the result of transformers' eager loop with only the experts `chosen`; `index` counts within `chosen`."""
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
