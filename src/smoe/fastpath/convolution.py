"""Computes the convolutions along time of linear attention in float32, on CPUs whose libraries have none in bf16.

Qwen3-Next, Qwen3.5, LFM2, Kimi Linear and models with Mamba layers convolve the last values of each channel, usually
four. On CPUs with AVX2 alone, torch computes such a convolution in bf16 channel by channel: 56 to 68 ms for one token
and 8,192 channels, and in float32 0.3 ms (docs/log/whole-models.md). With four values, both round the same sum of exact
products to bf16. If results may differ by rounding, float32 is always used; otherwise only if a proof at load finds
equal bits.

transformers' functions receive the weight and call torch, so the weight is a tensor whose `conv1d` is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from smoe.kernels.proof import same_bits
from smoe.kernels.verdicts import Verdicts

_SLOW = ("AVX2", "DEFAULT")
"""The capabilities of a CPU, as torch names them, for which torch's libraries have no convolution in bf16."""
_PIECE_ELEMENTS = 1 << 21
"""The largest number of elements that are converted to float32 at a time."""
_CHANNELS, _TOKENS = 1024, 256
"""The size of the convolution in the proof."""
_VIEWS = (torch.Tensor.squeeze, torch.Tensor.unsqueeze, torch.squeeze, torch.unsqueeze)


class ChannelWeight(torch.Tensor):
    """The weight of a convolution of single channels, [channels, 1, K] or without the middle dimension: an ordinary
    parameter, except that its convolution is computed in float32."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is functional.conv1d:
                return convolved(*args, **(kwargs or {}))
            found = func(*args, **(kwargs or {}))
            return found.as_subclass(cls) if func in _VIEWS else found


def convolved(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Return torch's `conv1d` of a bf16 input [rows, channels, n] and a weight [channels, 1, K], computed in float32
    for some channels at a time. The further arguments are torch's; each channel is a group."""
    step = max(1, _PIECE_ELEMENTS // max(1, input.shape[0] * input.shape[2]))
    given = dict(kwargs)
    pieces = []
    for begin in range(0, weight.shape[0], step):
        some = slice(begin, begin + step)
        own = None if bias is None else bias[some].float()
        given["groups"] = weight[some].shape[0]
        wide: torch.Tensor = functional.conv1d(input[:, some].float(), weight[some].float(), own, *args[:3], **given)
        pieces.append(wide.to(input.dtype))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def speed_up(model: nn.Module, verdicts: Verdicts, may_round: bool) -> int:
    """Make convolutions of single channels compute in float32 on CPUs where that is faster and has the same bits.
    Return the number of these convolutions.

    `may_round`: whether results may differ from torch's by rounding. `verdicts`: known results of proofs; this function
    adds its own.
    """
    if torch.backends.cpu.get_cpu_capability() not in _SLOW:
        return 0
    adopted = 0
    for module in model.modules():
        if not isinstance(module, nn.Conv1d) or not _is_of_channels(module):
            continue
        shape = module.kernel_size[0], module.bias is not None
        if may_round or verdicts.of("convolution", shape, partial(_agrees, *shape)):
            weight = module.weight.detach().as_subclass(ChannelWeight)
            weight._is_param = True  # type: ignore[attr-defined]
            module.weight = weight  # type: ignore[assignment]
            adopted += 1
    return adopted


def _is_of_channels(module: nn.Conv1d) -> bool:
    is_alone = module.groups == module.in_channels == module.out_channels
    return is_alone and module.weight.dtype is torch.bfloat16 and module.padding_mode == "zeros"


def _agrees(length: int, has_bias: bool) -> bool:
    """Return whether a convolution with `length` values in float32 has the bits of torch's in bf16."""
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(1, _CHANNELS, _TOKENS, generator=generator).bfloat16()
    weight = torch.randn(_CHANNELS, 1, length, generator=generator).bfloat16()
    bias = torch.randn(_CHANNELS, generator=generator).bfloat16() if has_bias else None
    with torch.no_grad():
        theirs = functional.conv1d(input, weight, bias, groups=_CHANNELS)
        return same_bits(convolved(input, weight, bias), theirs)
