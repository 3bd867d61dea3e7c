"""Choose a model's arithmetic on a CPU: torch's, our kernels with torch's bits, or our own order of sums.

Bits come first (grade E0): our kernels are used if they have torch's bits. The fastest method for one token's experts
is measured once at start: one expert on all threads, several experts on one thread each, or all in one call of machine
code. The result depends on the machine and on how its OpenMP runtime waits (`OMP_WAIT_POLICY`). On CPUs without AVX-512
BF16, where torch's bits are slow, our kernels use their own order of sums (grade E1), if they are at least a tenth
faster and as accurate as torch.
"""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from smoe.bounds import INT8
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
"""The size below which experts are not measured: our kernel computes them if its bits agree, because it wakes no
thread, else torch."""
_NEARLY_ALL = 0.9
"""The share of linear weights that our kernel must multiply before torch is limited to one thread."""
_ROUNDS = 9
_EXPERTS = 8


class ChosenArithmetic(NamedTuple):
    """The result of the choice, as far as it concerns a whole token."""

    leaves_little: bool = False
    """Whether torch has almost nothing left to compute for one token."""
    leaves_little_of_prompts: bool = False
    """Whether the same holds for a prompt."""
    token_pass: TokenPass | None = None
    """Our forward function of the whole model for one token; None if transformers' is used."""


def choose_arithmetic(
    model: PreTrainedModel, spec: ModelSpec, config: EngineConfig, compute: LayerCompute, host_threads: int
) -> ChosenArithmetic:
    """Set the best arithmetic for the experts in `compute` and for the non-expert layers."""
    activations = activations_of(config, spec.dtype.torch, compute.device)
    is_native = spec.dtype.torch is torch.bfloat16 and config.kernels != "torch" and widest(activations) is not None
    host = compute.units.get(HOST)
    if isinstance(host, HostExperts) and is_native and not compute.pacing.is_emulated:
        # an emulated device is timed with torch's products (docs/log/device.md)
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
    # torch has no kernel for quantized experts: dequantizing one for every token is no alternative
    is_given = isinstance(compute.store, QuantisedStore) or (pool is not None and config.kernels != "auto")
    choose_way(compute, spec.sites[0].layer, spec.dtype.torch, pool, is_given)
    check_activations(model, config, compute)
    norms = norm.speed_up(model)
    # even on one thread our attention is several times as fast as torch's on all
    chosen = compute.spinning_pool
    is_measured = config.kernels != "own-order"
    settled = attention.speed_up(model, chosen or SpinningPool(1, has_bf16=is_supported()), is_measured)
    if chosen is None:
        return ChosenArithmetic()
    prompts = attention.speed_up_prompts(model, chosen, is_measured) if _may_round(config, compute) else 0
    gates = spec.anatomy.gates
    routers = {model.get_submodule(path): of in gates for of, path in spec.anatomy.routers.items()}
    sure = decoder_layer.projections(model)
    adopted = linear.speed_up(model, chosen, routers, activations, is_measured, sure)
    layers = decoder_layer.speed_up(model, chosen, adopted.parts, norms)
    if _may_round(config, compute):
        experts = {model.get_submodule(site.name) for site in spec.sites}
        router.speed_up(chosen, [of for of, is_gate in routers.items() if is_gate], layers.values(), experts)
    attentions = model.config.get_text_config().num_hidden_layers
    leaves_little = settled == attentions and adopted.share > _NEARLY_ALL
    has_prompts = prompts == attentions and adopted.quantized_share > _NEARLY_ALL and compute.activations == INT8
    return ChosenArithmetic(leaves_little, leaves_little and has_prompts, token_pass.speed_up(model, layers))


def _may_round(config: EngineConfig, compute: LayerCompute) -> bool:
    """Return whether our own order of sums is allowed, because this model's experts use it or similar rounding
    anyway."""
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
    """Return a pool for the experts: with torch's bits if possible, else with our own order if allowed, else None.

    `compute` closes the pool.
    """
    orders = [False] if is_supported() and config.kernels != "own-order" else []
    may_differ = config.kernels == "auto" and not config.reproducible  # measuring finds the faster one
    if may_differ or config.kernels == "own-order" or isinstance(compute.store, QuantisedStore):
        orders.append(True)
    for in_own_order in orders:
        pool = SpinningPool(torch.get_num_threads(), config.max_sequences > 1, in_own_order=in_own_order)
        compute.compute_by(pool)  # `compute` closes the pool from here on
        if compute.agrees(pool):
            return pool
        compute.compute_by(None)
        pool.close()
    return None


def choose_way(compute: LayerCompute, layer: int, dtype: torch.dtype, pool: SpinningPool | None, always: bool) -> None:
    """Set the fastest helpers of `compute` and close the others. Takes some tens of milliseconds.

    `pool` must have been tested on this model's experts; `always`: use it without measuring.
    """
    compute.compute_by(pool)  # for small experts the kernel saves overhead, and threads cost more than they gain
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
    """Return the time of one decode layer with the slots' current contents, preceded by a dense product on all
    threads."""
    dense = torch.ones(1, 2048, dtype=dtype), torch.ones(2048, 2048, dtype=dtype).t()  # as in linear layers
    hidden = torch.zeros(1, compute.hidden_size(layer), dtype=dtype)
    torch.mm(*dense)
    started = perf_counter()
    torch.mm(*dense)
    compute.compute_slots(layer, hidden, _EXPERTS)
    return perf_counter() - started
