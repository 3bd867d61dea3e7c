"""Which arithmetic a model gets on a CPU: the library's, our kernels with the library's bits, or our own order of sums.

Bits first (grade E0): our kernels stand in where theirs are the library's, and the fastest way of computing one token's
experts is measured once, at the start: one expert on all threads, several at a time on one thread each, or all in one
piece of machine code. Which wins depends on the machine and on how its OpenMP runtime waits (`OMP_WAIT_POLICY`).

Where the library's bits cannot be had at speed, as on CPUs without AVX-512 BF16, our kernels multiply in an order of
their own (grade E1), if they are a tenth faster or more and as near to the exact numbers as the library is.
"""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from smoe.compute.host_experts import HostExperts
from smoe.compute.thread_pool import ThreadPool
from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.fastpath import attention, decoder_layer, linear, norm, router, token_pass
from smoe.fastpath.token_pass import TokenPass
from smoe.kernels.isa import widest
from smoe.kernels.spinning_pool import OWN_ORDER_GAIN, SpinningPool, is_supported
from smoe.load.activations import activations_of, check_activations
from smoe.load.slot_kernels import take_slot_kernels
from smoe.memory.quantised_store import QuantisedStore
from smoe.models.spec import ModelSpec
from smoe.policy.plan import HOST
from smoe.runtime.layer import LayerCompute

MIN_EXPERT_BYTES = 1 << 20
"""Smaller experts go without measuring: by our kernel where it agrees, which wakes no thread for them, else by the
library."""
_NEARLY_ALL = 0.9
"""Share of the linear weights that our kernel must have for the library to need no more than one thread."""
_ROUNDS = 9
_EXPERTS = 8


class ChosenArithmetic(NamedTuple):
    """What one token is computed by."""

    leaves_little: bool = False
    """Whether the library has next to nothing left to compute."""
    token_pass: TokenPass | None = None
    """The whole model's way for one token; None where the library's forward runs."""


def choose_arithmetic(
    model: PreTrainedModel, spec: ModelSpec, config: EngineConfig, compute: LayerCompute, host_threads: int
) -> ChosenArithmetic:
    """Give `compute`, and the non-expert layers, what serves them best."""
    activations = activations_of(config, spec.dtype.torch, compute.device)
    is_native = spec.dtype.torch is torch.bfloat16 and config.kernels != "torch" and widest(activations) is not None
    host = compute.units.get(HOST)
    if isinstance(host, HostExperts) and is_native and not compute.pacing.is_emulated:
        # an emulated device is timed with the library's products: docs/log/device.md
        host.multiply_by(SpinningPool(host_threads, in_own_order=not is_supported()))
    if spec.dtype.torch is torch.bfloat16 and config.kernels != "torch" and compute.device.type == "cpu":
        compute.fill_up_rows(spec.dtype.torch)
    if config.kernels == "own-order" and not (is_native and compute.device.type == "cpu"):
        raise _not_here(config, "it is for bfloat16 on a CPU with AVX2, AVX-512 or NEON, and needs llvmlite")
    if not is_native or compute.device.type != "cpu":
        choose_way(compute, spec.sites[0].layer, spec.dtype.torch, None, isinstance(compute.store, QuantisedStore))
        take_slot_kernels(compute, config)
        check_activations(model, config, compute)
        return ChosenArithmetic()
    pool = _proven_pool(config, compute)
    if config.kernels == "own-order" and pool is None:
        raise _not_here(config, "it does not support the shape of this model's experts")
    # of quantised experts the library knows nothing: unpacking one for every token is no rival to measure
    is_given = isinstance(compute.store, QuantisedStore) or (pool is not None and config.kernels != "auto")
    choose_way(compute, spec.sites[0].layer, spec.dtype.torch, pool, is_given)
    check_activations(model, config, compute)
    norms = norm.speed_up(model)
    # even on one thread our attention is several times faster than the library's on all
    chosen = compute.spinning_pool
    is_measured = config.kernels != "own-order"
    settled = attention.speed_up(model, chosen or SpinningPool(1, has_bf16=is_supported()), is_measured)
    if chosen is None:
        return ChosenArithmetic()
    if _may_round(config, compute):
        attention.speed_up_prompts(model, chosen, is_measured)
    gates = spec.anatomy.gates
    routers = {model.get_submodule(path): of in gates for of, path in spec.anatomy.routers.items()}
    sure = decoder_layer.projections(model)
    adopted = linear.speed_up(model, chosen, routers, activations, is_measured, sure)
    layers = decoder_layer.speed_up(model, chosen, adopted.parts, norms)
    if _may_round(config, compute):
        experts = {model.get_submodule(site.name) for site in spec.sites}
        router.speed_up(chosen, [of for of, is_gate in routers.items() if is_gate], layers.values(), experts)
    leaves_little = settled == model.config.get_text_config().num_hidden_layers and adopted.share > _NEARLY_ALL
    return ChosenArithmetic(leaves_little, token_pass.speed_up(model, layers))


def _may_round(config: EngineConfig, compute: LayerCompute) -> bool:
    """Whether sums in an order of our own are among what this model's experts are computed with anyway."""
    chosen = compute.spinning_pool
    has_own = chosen is not None and chosen.own_order is not None
    is_asked = config.kernels == "own-order"
    is_auto = config.kernels == "auto" and not config.reproducible
    return is_asked or (is_auto and (has_own or isinstance(compute.store, QuantisedStore)))


def _not_here(config: EngineConfig, why: str) -> ConfigError:
    return ConfigError(
        f"`kernels` {config.kernels}: {why}; use auto",
        setting="kernels",
        given=config.kernels,
        allowed="auto, native or torch here",
    )


def _proven_pool(config: EngineConfig, compute: LayerCompute) -> SpinningPool | None:
    """Our kernels for the experts: with the library's bits where they have them, else in their own order where that is
    allowed, else None. `compute` closes what it is given."""
    orders = [False] if is_supported() and config.kernels != "own-order" else []
    may_differ = config.kernels == "auto" and not config.reproducible  # what is faster is found by measuring
    if may_differ or config.kernels == "own-order" or isinstance(compute.store, QuantisedStore):
        orders.append(True)
    for in_own_order in orders:
        pool = SpinningPool(torch.get_num_threads(), config.max_sequences > 1, in_own_order=in_own_order)
        compute.compute_by(pool)  # whatever happens now, it closes the pool
        if compute.agrees(pool):
            return pool
        compute.compute_by(None)
        pool.close()
    return None


def choose_way(compute: LayerCompute, layer: int, dtype: torch.dtype, pool: SpinningPool | None, always: bool) -> None:
    """Give `compute` the helpers that serve it best, and close the others. Takes some tens of milliseconds.

    `pool` must have been found to agree on this model's experts; `always`: use it without measuring.
    """
    compute.compute_by(pool)  # small experts: the kernel saves dispatch, threads cost more than they give
    is_small, has_own_bits = (
        compute.store.expert_bytes < MIN_EXPERT_BYTES,
        pool is not None and pool.own_order is not None,
    )
    if always or compute.device.type != "cpu" or (is_small and not has_own_bits):
        return
    threads = torch.get_num_threads()
    ways = [None, ThreadPool(threads) if threads > 1 and not is_small else None, pool]
    seconds = [float("inf")] * len(ways)
    best = None
    try:
        for _ in range(_ROUNDS):
            for n, helpers in enumerate(ways):
                compute.compute_by(helpers)
                seconds[n] = min(seconds[n], _seconds(compute, layer, dtype))
        if has_own_bits:
            seconds[-1] *= OWN_ORDER_GAIN
        best = ways[seconds.index(min(seconds))]
    finally:
        compute.compute_by(best)
        for helpers in ways:
            if helpers is not None and helpers is not best:
                helpers.close()


def _seconds(compute: LayerCompute, layer: int, dtype: torch.dtype) -> float:
    """One layer of decoding on whatever the slots hold: a dense product on all threads first, as in a real layer."""
    dense = torch.ones(1, 2048, dtype=dtype), torch.ones(2048, 2048, dtype=dtype).t()  # as linear layers have it
    hidden = torch.zeros(1, compute.hidden_size(layer), dtype=dtype)
    torch.mm(*dense)
    started = perf_counter()
    torch.mm(*dense)
    compute.compute_slots(layer, hidden, _EXPERTS)
    return perf_counter() - started
