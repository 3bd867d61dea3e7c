"""Computes the RMSNorm of a token by our kernel: one call instead of transformers' eight operations.

A model has two to four of these modules per layer, and most of their time is the overhead of operations. The modules
are found by their results and not by name: a module with one weight and an epsilon is compared with the kernel, and
left unchanged if a bit differs.

The sum has 24 binary digits and an output only 8. So few random rows reveal a difference in the sum's last digit: for
some orders of sums, none of 256 rows of 2048 numbers. The test therefore uses special rows. In each of them the first
number, after scaling, is midway between two bf16 numbers, and the rounding of the sum decides which of the two it
becomes.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.func import functional_call

from smoe.kernels.norm import fits, normed
from smoe.kernels.proof import same_bits
from smoe.kernels.threads import threads
from smoe.kernels.verdicts import Verdicts

MOST_NUMBERS = 1 << 22
"""The largest number of elements that our kernel computes. torch divides larger inputs among threads; smaller ones are
faster on one thread."""
_EPSILONS = ("variance_epsilon", "eps")
_PROOF_NUMBERS = 1 << 17
_LEAST_PROOF_ROWS, _MOST_PROOF_ROWS, _SINGLE_ROWS = 64, 1024, 32
"""Numbers of test rows. One row in ten reveals another order of a long sum, so 64 rows miss it once in a thousand
times."""
_TUNED = 6
"""The elements from the second up to this one are chosen so that a test row's sum of squares has the required value."""
_EXTREMES = (0.0, 1e-40, 1e-20, 1e19, 3e38, float("inf"), float("nan"))
"""Extreme values: sums of zero, of numbers that vanish when squared, and of numbers that overflow."""
_PLAIN = (bool, int, float, str, type(None))


class Kind(NamedTuple):
    """The type, size and attributes of an RMSNorm module. A test of one module holds for all modules with equal values,
    because they differ only in their weights."""

    type: type[nn.Module]
    size: int
    eps: float
    attributes: tuple[tuple[str, object], ...]


def speed_up(model: nn.Module, verdicts: Verdicts | None = None) -> dict[nn.Module, float]:
    """Replace the forward function of every RMSNorm whose bits the kernel reproduces, for calls with few rows. Return
    the replaced modules with their epsilons, except those with a weight around zero, which other kernels do not have.
    `verdicts`: known results of proofs; this function adds its own.

    Takes some ten milliseconds for every distinct kind of module, and 15 once per process.
    """
    verdicts, adopted = verdicts or Verdicts(), dict[nn.Module, float]()
    for module in model.modules():
        kind = _kind(module)
        if kind is None:
            continue
        if verdicts.of("norm", kind, partial(agrees, module, kind)):
            module.forward = _forward(module, kind, False)  # type: ignore[method-assign]
            adopted[module] = kind.eps
        elif verdicts.of("norm with a weight around zero", kind, partial(agrees, module, kind, True)):
            module.forward = _forward(module, kind, True)  # type: ignore[method-assign]
    return adopted


def _kind(module: nn.Module) -> Kind | None:
    """Return the kind of a module that has one bf16 weight, an epsilon and one tensor argument; None for other
    modules."""
    weight = module._parameters.get("weight")
    if weight is None or len([*module.parameters(), *module.buffers()]) > 1 or "forward" in vars(module):
        return None
    if weight.dtype is not torch.bfloat16 or not weight.is_cpu or weight.dim() != 1 or not weight.is_contiguous():
        return None
    attributes = {name: value for name, value in vars(module).items() if name not in _OF_ALL_MODULES}
    eps = next((attributes[name] for name in _EPSILONS if name in attributes), None)
    if not isinstance(eps, float) or not all(isinstance(value, _PLAIN) for value in attributes.values()):
        return None
    if not fits(weight.numel()) or not _takes_one_tensor(module):
        return None
    return Kind(type(module), weight.numel(), eps, tuple(sorted(attributes.items())))


_OF_ALL_MODULES = frozenset(vars(nn.Module()))


def _takes_one_tensor(module: nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters.values()
    return sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters) == 1


def _forward(module: nn.Module, kind: Kind, is_around_zero: bool) -> Callable[..., torch.Tensor]:
    """Return the new forward function of an RMSNorm module. It calls our kernel for few contiguous rows, and
    transformers' function for all other inputs. `is_around_zero`: as in `normed`."""
    library, parameters = module.forward, module._parameters
    size, eps = kind.size, kind.eps
    bf16, plain = torch.bfloat16, torch.Tensor

    def forward(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        x, weight = args[0] if len(args) == 1 and not kwargs else None, parameters["weight"]
        if (
            type(x) is plain
            and x.dtype is bf16
            and x.is_cpu
            and weight is not None
            and weight.dtype is bf16
            and size <= x.numel() <= MOST_NUMBERS
            and x.shape[-1] == size
            and x.is_contiguous()
            and not ((x.requires_grad or weight.requires_grad) and torch.is_grad_enabled())
        ):
            return normed(x, weight, eps, is_around_zero)
        theirs: torch.Tensor = library(*args, **kwargs)
        return theirs

    return forward


def agrees(module: nn.Module, kind: Kind, is_around_zero: bool = False) -> bool:
    """Return whether the RMSNorm kernel has the module's bits, on one thread and on all, with the module's weight and
    with another weight. `is_around_zero`: as in `normed`."""
    own, generator = module.get_parameter("weight").detach(), torch.Generator().manual_seed(0)
    another = 0.2 * torch.randn(kind.size, generator=generator)
    another[0] = 0  # so that the first weight changes no bit
    if not is_around_zero:
        another += 1
    with torch.no_grad():
        with threads(1):
            cases = list(itertools.product((own, another.to(own.dtype)), _data(kind, generator)))
            ours = [normed(x, weight, kind.eps, is_around_zero) for weight, x in cases]
        for count in {1, torch.get_num_threads()}:
            with threads(count):
                if not all(
                    same_bits(y, _theirs(module, x, weight)) for y, (weight, x) in zip(ours, cases, strict=True)
                ):
                    return False
    return True


def _theirs(module: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> object:
    try:
        return functional_call(module, {"weight": weight}, (x,))
    except (AttributeError, RuntimeError, TypeError, ValueError, IndexError):  # the module is not a norm of single rows
        return None


def _data(kind: Kind, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield test inputs: several rows at once, and single rows [1, 1, size] as in decoding."""
    extreme = torch.tensor(_EXTREMES).repeat_interleave(2).unsqueeze(1).repeat(1, kind.size)
    extreme[1::2, 1::2] = 1.0  # extreme values among ordinary numbers
    on_edge = _on_edge(kind, generator)
    several = MOST_NUMBERS // kind.size
    for rows in (*extreme.split(several), *on_edge.split(several), *on_edge[:_SINGLE_ROWS].split(1)):
        yield rows.to(torch.bfloat16).unsqueeze(0)


def _on_edge(kind: Kind, generator: torch.Generator) -> torch.Tensor:
    """Return test rows of bf16 numbers, as float64 [rows, size]. In each row the first element, after scaling by the
    norm, is midway between two neighbouring bf16 numbers.

    The sum of squares of the other elements is chosen to achieve this, up to half a digit of float32. The lower of the
    two bf16 numbers is even, so a result exactly midway is rounded down. The smallest increase of the result makes it
    round up.
    """
    rows = min(max(_PROOF_NUMBERS // kind.size, _LEAST_PROOF_ROWS), _MOST_PROOF_ROWS)
    x = torch.randn(rows, kind.size, generator=generator, dtype=torch.float64)
    x[:, 0] = 1 + torch.rand(rows, generator=generator)
    x *= 2.0 ** torch.randint(-3, 4, (rows, 1), generator=generator)
    x = _cut(x)
    x[:, 1:_TUNED] = 0
    lower = _cut(0.97 * x[:, 0] * (x.square().mean(1) + kind.eps).rsqrt(), 17)
    last_digit = (lower.frexp().exponent - 24).double().exp2()
    edge = lower + last_digit * (2.0**15 + 0.5)
    missing = kind.size * ((x[:, 0] / edge).square() - kind.eps) - x.square().sum(1)
    for column in range(1, _TUNED):
        x[:, column] = _cut(missing.sqrt())
        missing -= x[:, column].square()
    return x


def _cut(x: torch.Tensor, bits: int = 16) -> torch.Tensor:
    """Return x as float64 after setting the last `bits` bits of its float32 form to zero. 16 bits make it a bf16
    number."""
    return (x.float().view(torch.int32) & -(1 << bits)).view(torch.float32).double()
