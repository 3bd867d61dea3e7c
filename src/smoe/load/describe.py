"""Describes the experts to workers without torch: the names of their stored tensors, and their arithmetic."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from smoe.cluster.described import NUMBER, Description, LayerKeys
from smoe.cluster.describing import LightWorker
from smoe.compute.expert_math import ExpertMath
from smoe.compute.kernel_math import DOWN, UP
from smoe.compute.kernel_rows import kernel_rows
from smoe.compute.quantised_math import QuantisedMath
from smoe.errors import UnsupportedModelError
from smoe.kernels.spinning_pool import SpinningPool, is_supported
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import StoredLayer

_PLAIN = "BF16"


def describe(
    weights: str, stored: Mapping[int, StoredLayer], math: Mapping[int, ExpertMath], arithmetic: str, threads: int
) -> LightWorker:
    """Return the description of a model's experts for a worker without torch. `stored`: the experts' tensors by layer;
    `math`: their arithmetic by layer.

    `arithmetic`: the kernels that the coordinator uses for few rows, one of `KERNELS`. The function is called on a
    thread of its own, because its test of kernels takes up to a second. Raises `UnsupportedModelError` if our kernels
    alone cannot compute the experts as the coordinator does.
    """
    any_math = next(iter(math.values()))
    table = None if isinstance(any_math, QuantisedMath) else any_math.gate_table()
    if table is None or not all(_is_alike(each, any_math, table) for each in math.values()):
        raise _unfit("its experts are quantised, differ from layer to layer, or are not gated products without biases")
    if any(tensor.dtype != _PLAIN for tensor in _tensors(stored)):
        raise _unfit("its experts are not stored in bf16")
    layers = tuple(_keys(stored[layer]) for layer in sorted(stored))
    bits = table.view(torch.uint16).numpy().astype(np.uint16)
    description = Description(weights, any_math.hidden, any_math.inner, layers, bits)
    if arithmetic == "own-order":
        with SpinningPool(1, in_own_order=True) as pool:
            return LightWorker(description, arithmetic, pool.most_own_rows)
    if not is_supported():
        raise _unfit("the coordinator computes with `kernels=torch`, and its CPU has no AVX-512 BF16")
    torch.set_num_threads(threads)  # the setting holds for this thread; the results to compare with had the same number
    with SpinningPool(threads, several=True) as pool:
        rows = kernel_rows(pool, any_math.shapes)
    if not rows:
        raise _unfit("the coordinator's torch and smoe's kernels give different bits")
    return LightWorker(description, "native", rows)


def _unfit(why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"a worker without torch cannot compute for this coordinator: {why}; install torch on the worker's machine"
    )


def _is_alike(math: ExpertMath, other: ExpertMath, table: torch.Tensor) -> bool:
    is_same = (math.shapes, math.up_width) == (other.shapes, 2 * other.inner)
    return is_same and math.is_gated_product and math.has_activation(table)


def _tensors(stored: Mapping[int, StoredLayer]) -> Iterator[StoredTensor]:
    for layer in stored.values():
        for parts in layer.sources:
            for tensors in parts.values():
                yield from tensors


def _keys(experts: StoredLayer) -> LayerKeys:
    up, down = (_part(experts, name) for name in (UP, DOWN))
    return LayerKeys(experts.layer, experts.experts, up, down)


def _part(experts: StoredLayer, name: str) -> tuple[str, ...]:
    """Return the names of the stored tensors that form the weight `name` of an expert, in the order of the weight's
    rows. A placeholder replaces the expert's number."""
    keys = [[tensor.key for tensor in sources[name]] for sources in experts.sources]
    found = []
    for piece in zip(*keys, strict=True):
        if len(set(piece)) == 1 and len(piece) > 1:  # rows of a fused tensor
            found.append(piece[0])
            continue
        open_key = re.sub(r"(experts\.)0(\.)", rf"\g<1>{NUMBER}\g<2>", piece[0], count=1)
        if any(open_key.replace(NUMBER, str(n)) != key for n, key in enumerate(piece)):
            raise _unfit(
                f"the tensor names of its experts ({piece[0]!r}, ...) do not differ in the expert's number alone"
            )
        found.append(open_key)
    return tuple(found)
