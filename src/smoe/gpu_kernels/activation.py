"""The activation functions that GPU kernels support. Which one a model uses is found by comparison with the model's own
function.

    gated     curve(min(gate, limit)) * (clamp(up, -limit, limit) + shift)
    plain     curve(up)

Gate and up are the two halves of the first product's outputs, or its outputs 2n and 2n + 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional

_CURVES: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "silu": lambda x, alpha: x * torch.sigmoid(alpha * x),
    "gelu": lambda x, _: functional.gelu(x),
    "gelu_tanh": lambda x, _: functional.gelu(x, approximate="tanh"),
    "relu": lambda x, _: functional.relu(x),
    "relu2": lambda x, _: functional.relu(x).square(),
}
_TANH = -2 * math.sqrt(2 / math.pi)
_TRITON: dict[str, str] = {
    "silu": "{x} / (1.0 + tl.exp(-{alpha} * {x}))",
    "gelu": f"0.5 * {{x}} * (1.0 + tl.erf({{x}} * {math.sqrt(0.5)!r}))",
    "gelu_tanh": f"{{x}} / (1.0 + tl.exp({_TANH!r} * ({{x}} + 0.044715 * {{x}} * {{x}} * {{x}})))",
    "relu": "tl.maximum({x}, 0.0)",
    "relu2": "tl.maximum({x}, 0.0) * tl.maximum({x}, 0.0)",
}
_PROBE = 512
_SPREAD = 5.0
"""The standard deviation of test values, which is so large that some values exceed the limits of all families."""


class Activation(NamedTuple):
    """An activation function that the GPU kernels support, described by the function of one gate value (`curve`) and
    its parameters."""

    curve: str
    has_gate: bool = True
    takes_turns: bool = False
    """Whether outputs 2n and 2n + 1 of the first product are gate and up. Otherwise they are outputs n and I + n."""
    alpha: float = 1.0
    limit: float | None = None
    shift: float = 0.0

    def of(self, wide: torch.Tensor) -> torch.Tensor:
        """Return the activation [n, I] of the first product's outputs [n, 2I] (without a gate [n, I]), computed by
        torch as the reference."""
        curve = _CURVES[self.curve]
        if not self.has_gate:
            return curve(wide, self.alpha)
        gate, up = (wide[..., ::2], wide[..., 1::2]) if self.takes_turns else wide.chunk(2, -1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return curve(gate, self.alpha) * (up + self.shift)

    def lines(self, gate: str, up: str) -> list[str]:
        """Return Triton statements that compute the activation. `gate` and `up` are the names of the inputs; the result
        is in the variable `up`. Without a gate, `gate` is not used."""
        curve = _TRITON[self.curve]
        if not self.has_gate:
            return [f"{up} = {curve.format(x=up, alpha=self.alpha)}"]
        lines = []
        if self.limit is not None:
            lines.append(f"{gate} = tl.minimum({gate}, {self.limit!r})")
            lines.append(f"{up} = tl.minimum(tl.maximum({up}, {-self.limit!r}), {self.limit!r})")
        value = curve.format(x=gate, alpha=self.alpha)
        return [*lines, f"{up} = ({value}) * ({up} + {self.shift!r})"]


def activation_of(module: Any, activate: Callable[[torch.Tensor], torch.Tensor], has_gate: bool) -> Activation | None:
    """Return the supported activation that computes the same as the function `activate`, or None if there is none.
    `activate` takes the outputs of the first product.

    `module` may have the limits of its model family as attributes.
    """
    wide = _SPREAD * torch.randn(4, 2 * _PROBE, generator=torch.Generator().manual_seed(0))
    device = next((each.device for each in (*module.parameters(), *module.buffers())), wide.device)
    try:
        wanted = activate(wide if device.type == "meta" else wide.to(device)).cpu()
    except Exception:  # the family's code was not written for such a call, so its activation stays unknown
        return None
    return next((each for each in _candidates(module, has_gate) if _is_same(each.of(wide), wanted)), None)


def _candidates(module: Any, has_gate: bool) -> Iterator[Activation]:
    if not has_gate:
        yield from (Activation(curve, has_gate=False) for curve in _CURVES)
        return
    limits = [getattr(module, name, None) for name in ("limit", "swiglu_limit")]
    alphas = [getattr(module, name, None) for name in ("alpha", "swiglu_alpha")]
    for takes_turns in (False, True):
        for limit in dict.fromkeys([None, *(float(each) for each in limits if each is not None)]):
            for alpha in dict.fromkeys([1.0, *(float(each) for each in alphas if each is not None)]):
                for shift in (0.0, 1.0):
                    for curve in _CURVES if alpha == 1.0 else ("silu",):
                        yield Activation(curve, True, takes_turns, alpha, limit, shift)


def _is_same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.shape == theirs.shape and torch.allclose(ours, theirs.float(), rtol=1e-4, atol=1e-5)
