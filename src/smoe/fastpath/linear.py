"""Computes the non-expert linear layers by our kernel, one token at a time: projections, shared experts, output layer.

Every `nn.Linear` gets a forward function of ours if the kernel reproduces its bits and computes it faster. torch still
computes all other layers, and calls with several rows.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from smoe.bounds import BF16
from smoe.kernels.many_rows import ManyRows
from smoe.kernels.proof import agrees_on_many_rows, agrees_on_rows, part_that_agrees, same_bits
from smoe.kernels.rows import MOST_ROWS
from smoe.kernels.spinning_pool import OWN_ORDER_GAIN, Product, SpinningPool
from smoe.kernels.threads import threads
from smoe.kernels.verdicts import Verdicts
from smoe.models.quantised_linear import QuantisedLinear, QuantisedWeight, StoredEmbedding, share_inputs

_MOST_TIMED = 8
"""The maximum number of layers of one kind that are timed."""
_TURNS = 3
_MOST_SAMPLES = 1000
_SAMPLED_OUTPUTS = 1 << 16
_Kind = tuple[torch.Size, bool]


class Adopted(NamedTuple):
    """The linear layers that our kernels multiply instead of torch."""

    share: float
    """The fraction of the model's linear weights that belongs to these layers, from 0 to 1."""
    parts: Mapping[nn.Module, int]
    """The bf16 layers, each with the `Product.part` of its product."""
    quantized_share: float = 0.0
    """The fraction of the model's linear weights that is quantized and multiplied without dequantizing, for any number
    of rows."""


def speed_up(
    model: nn.Module,
    pool: SpinningPool,
    routers: Mapping[nn.Module, bool],
    activations: str = BF16,
    is_measured: bool = True,
    sure: Collection[nn.Module] = (),
    verdicts: Verdicts | None = None,
) -> Adopted:
    """Replace the one-row product of every linear layer that our kernel computes faster than torch with torch's bits.
    Return the replaced layers.

    Takes some tens of milliseconds for every distinct shape. `routers`: modules of transformers that apply their
    `weight` themselves; the value is True if they take only hidden states [T, H]. `activations`: see `multiply_codes`.
    Unless `is_measured`, our product is assumed to be faster; for the layers `sure` it is always assumed. `verdicts`:
    known results of proofs; this function adds its own.
    """
    verdicts = verdicts or Verdicts()
    kinds: dict[_Kind, list[nn.Linear]] = {}
    for module in model.modules():
        if type(module) is nn.Linear:
            kinds.setdefault((module.weight.shape, module.bias is not None), []).append(module)
    parts = {
        kind: verdicts.of("linear", _subject(pool, one.weight, kind[1]), partial(_part_of, pool, one.weight, one.bias))
        for kind, (one, *_) in kinds.items()
    }
    adopted = quantised = multiply_codes(model, pool, activations)
    parts_of: dict[nn.Module, int] = {}
    known = {kind: part for kind, part in parts.items() if part is not None}
    faster = _faster(pool, kinds, known) if is_measured else known
    for kind, part in known.items():
        for module in kinds[kind] if kind in faster else [each for each in kinds[kind] if each in sure]:
            module.forward = _forward(module, pool, part)  # type: ignore[method-assign,assignment]
            parts_of[module] = part
            adopted += module.weight.numel()
    left = [module for some in kinds.values() for module in some if "forward" not in module.__dict__]
    _speed_up_routers(pool, routers, verdicts)
    _keep_bits(pool, left, routers, verdicts)
    for module in [*left, *(router for router, can_be_asked in routers.items() if can_be_asked)]:
        module.forward = row_by_row(pool, module.forward)  # type: ignore[method-assign]
    total = quantised + sum(module.weight.numel() for some in kinds.values() for module in some)
    return Adopted(adopted / total, parts_of, quantised / total) if total else Adopted(0.0, parts_of)


def _part_of(pool: SpinningPool, weight: torch.Tensor, bias: torch.Tensor | None = None) -> int | None:
    """Return the `Product.part` with which our kernel may multiply rows with `weight` [N, K]; None if there is none. If
    the pool multiplies several rows, too, these products are also examined."""
    matrix = weight.t()
    has_many = pool.many is None or agrees_on_many_rows(pool, matrix, bias)
    has_few = pool.many is None or all(agrees_on_rows(pool, matrix, rows) for rows in (2, MOST_ROWS))
    return part_that_agrees(pool, matrix, bias) if has_many and has_few else None


def _subject(pool: SpinningPool, weight: torch.Tensor, *more: object) -> tuple[object, ...]:
    """Return what the result of a proof of a product with such a weight holds for."""
    return tuple(weight.shape), str(weight.dtype), *more, pool.kind


def multiply_codes(model: nn.Module, pool: SpinningPool, activations: str = BF16) -> int:
    """Make the layers that stay quantized use our kernels; few rows are multiplied in the type `activations`
    (`EngineConfig.activations`). Return the number of weights in these layers."""
    layers = [module for module in model.modules() if isinstance(module, QuantisedWeight)]
    for layer in layers:
        layer.multiply_by(pool, activations)
    users = Counter(layer.codes.data_ptr() for layer in layers)
    for layer in layers:
        if isinstance(layer, QuantisedLinear) and users[layer.codes.data_ptr()] == 1:
            layer.interleave()
    for embedding in (module for module in model.modules() if isinstance(module, StoredEmbedding)):
        embedding.unpack_by(pool)
    share_inputs(model)
    return sum(layer.shape.numel() for layer in layers if isinstance(layer, QuantisedLinear))


def _forward(module: nn.Linear, pool: SpinningPool, part: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(input: torch.Tensor) -> torch.Tensor:
        if input.is_contiguous():
            if input.numel() == module.in_features:
                return _one_row(input, module.weight, module.bias, pool, part)
            if pool.rows_are_alone:
                return _each_row(input, module.weight, module.bias, pool, part)
            if pool.many is not None:
                return _several_rows(input, module.weight, module.bias, pool, pool.many)
        return functional.linear(input, module.weight, module.bias)

    return forward


def _each_row(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pool: SpinningPool, part: int = 0
) -> torch.Tensor:
    """Return the product of `input` [..., K] and `weight` [N, K], which is [..., N]. Each row gets the same bits as in
    a product of this row alone."""
    rows = input.view(-1, weight.shape[1])
    out = input.new_empty(rows.shape[0], weight.shape[0])
    if bias is None and not part:
        for some, to in zip(rows.split(MOST_ROWS), out.split(MOST_ROWS), strict=True):
            pool.multiply_rows(some, weight.t(), to)
    else:
        pairs = zip(rows.split(1), out.split(1), strict=True)
        pool.multiply([Product(row, weight.t(), to, bias, part) for row, to in pairs])
    return out.view(*input.shape[:-1], weight.shape[0])


def _several_rows(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pool: SpinningPool, many: ManyRows
) -> torch.Tensor:
    """Return the product of `input` [..., K] and `weight` [N, K], which is [..., N], in our own order of sums."""
    rows = input.view(-1, weight.shape[1])
    out = input.new_empty(rows.shape[0], weight.shape[0])
    if bias is None and 0 < len(rows) <= pool.few_rows:
        pool.multiply_rows(rows, weight.t(), out)
    else:
        many.multiply(rows, weight.t(), out, bias)
    return out.view(*input.shape[:-1], weight.shape[0])


def _one_row(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pool: SpinningPool, part: int = 0
) -> torch.Tensor:
    """Return the product of one row `input` [..., K] and `weight` [N, K], which is [..., N]."""
    out = input.new_empty(*input.shape[:-1], weight.shape[0])
    pool.multiply([Product(input, weight.t(), out, bias, part)])
    return out


def _faster(
    pool: SpinningPool, kinds: Mapping[_Kind, Sequence[nn.Linear]], parts: Mapping[_Kind, int]
) -> dict[_Kind, int]:
    """Return the kinds of linear layers that our kernel computes faster than torch, each with its `Product.part`.

    Layers are timed in the order in which a token passes them, so their weights are no more in the CPU's caches than
    for a token. torch has one thread, as it has when nearly all products are computed by our kernels.
    """
    chosen = {module: kind for kind in parts for module in kinds[kind][:_MOST_TIMED]}
    theirs: dict[_Kind, list[float]] = {kind: [] for kind in parts}
    ours: dict[_Kind, list[float]] = {kind: [] for kind in parts}
    with threads(1):
        for _ in range(_TURNS):
            for way, seconds in ((_by_library, theirs), (_by_kernel, ours)):
                for module, kind in chosen.items():
                    seconds[kind].append(_seconds(partial(way, module, _some_row(module), pool)))
    gain = 1.0 if pool.own_order is None else OWN_ORDER_GAIN
    return {kind: part for kind, part in parts.items() if gain * median(ours[kind]) < median(theirs[kind])}


def _some_row(module: nn.Linear) -> torch.Tensor:
    return module.weight.new_ones(1, module.in_features)


def _by_library(module: nn.Linear, x: torch.Tensor, pool: SpinningPool) -> torch.Tensor:
    return functional.linear(x, module.weight, module.bias)


def _by_kernel(module: nn.Linear, x: torch.Tensor, pool: SpinningPool) -> torch.Tensor:
    return _one_row(x, module.weight, module.bias, pool)


def _seconds(job: Callable[[], object]) -> float:
    started = perf_counter()
    job()
    return perf_counter() - started


class RouterWeight(torch.Tensor):
    """A router's weight: an ordinary parameter, except that our kernel computes its product with one row, and with
    several where the pool multiplies many rows."""

    one_row: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """The product for one row: (x [..., K], weight [N, K]) -> [..., N]."""
    each_row: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """The product for several rows, each with the bits that it has alone."""
    several_rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    """The product for several rows in our own order of sums; None if torch computes it."""
    pool: SpinningPool
    part: int
    """The `Product.part` of its product."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is functional.linear and len(args) == 2 and not kwargs:
                x, weight = args
                if type(x) is torch.Tensor and x.dtype is weight.dtype:
                    if x.numel() == weight.shape[1]:
                        return weight.one_row(x.contiguous(), weight)
                    if weight.pool.rows_are_alone:
                        return weight.each_row(x.contiguous(), weight)
                    if weight.several_rows is not None:
                        return weight.several_rows(x.contiguous(), weight)
            return func(*args, **(kwargs or {}))


def _speed_up_routers(pool: SpinningPool, routers: Iterable[nn.Module], verdicts: Verdicts) -> None:
    """Make routers use our kernel. A router's weight has a few hundred kilobytes, and torch's product takes ten times
    as long as reading them."""
    for router in routers:
        weight = getattr(router, "weight", None)
        if type(router) is nn.Linear or not isinstance(weight, nn.Parameter):
            continue
        part = verdicts.of("router", _subject(pool, weight), partial(_part_of, pool, weight))
        if part is not None:
            ours = weight.detach().as_subclass(RouterWeight)
            ours.one_row = partial(_one_row, bias=None, pool=pool, part=part)
            ours.each_row = partial(_each_row, bias=None, pool=pool, part=part)
            many = pool.many
            ours.several_rows = None if many is None else partial(_several_rows, bias=None, pool=pool, many=many)
            ours.pool, ours.part = pool, part
            ours._is_param = True  # type: ignore[attr-defined]
            router.weight = ours


def _keep_bits(
    pool: SpinningPool, linears: Iterable[nn.Linear], routers: Mapping[nn.Module, bool], verdicts: Verdicts
) -> None:
    """Make linear layers use all threads if their bits would otherwise differ when a token is computed on one thread.

    For some shapes torch divides a sum among the threads, so its bits depend on their number: with 64 outputs of 2048
    numbers and two threads, 2 of 96000 outputs differ. For a router, all results that it returns are compared, because
    some routers compute in float32. A router that cannot be called with a single row always uses all threads.
    """
    threads = torch.get_num_threads()
    for module, can_be_asked in (dict.fromkeys(linears, True) | dict(routers)).items():
        weight = next((weight for weight in module.parameters() if weight.dim() == 2), None)
        if weight is not None and can_be_asked:
            subject = _subject(pool, weight, type(module), type(weight))
            on_one = partial(_is_the_same_on_one_thread, module, weight)
            if verdicts.of("product on one thread", subject, on_one):
                continue
        module.forward = _on_all(threads, module.forward)  # type: ignore[method-assign]


def row_by_row(pool: SpinningPool, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `forward` for each row separately while `pool.rows_are_alone` is true."""

    def run(rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not pool.rows_are_alone or rows.shape[0] == 1 or args or kwargs:
            return forward(rows, *args, **kwargs)
        each = [forward(row) for row in rows.split(1)]
        if isinstance(each[0], torch.Tensor):
            return torch.cat(each)
        return tuple(torch.cat(parts) for parts in zip(*each, strict=True))

    return run


def _is_the_same_on_one_thread(module: nn.Module, weight: torch.Tensor) -> bool:
    """Return whether a linear layer's or router's outputs have the same bits on one thread and on all threads."""
    if torch.get_num_threads() == 1:
        return True
    generator = torch.Generator().manual_seed(0)
    samples = min(_MOST_SAMPLES, -(-_SAMPLED_OUTPUTS // weight.shape[0]))  # with many outputs, each thread has some
    x = torch.randn(samples, 1, weight.shape[1], generator=generator).to(weight.dtype)
    on_all = [_tensors(module.forward(row)) for row in x]
    with threads(1):
        on_one = [_tensors(module.forward(row)) for row in x]
    pairs = zip(itertools.chain(*on_all), itertools.chain(*on_one), strict=True)
    return all(same_bits(ours, theirs) for theirs, ours in pairs)


def _tensors(answer: Any) -> list[torch.Tensor]:
    parts = answer if isinstance(answer, tuple) else (answer,)
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _on_all(count: int, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with threads(count):
            return forward(*args, **kwargs)

    return run
