"""Chooses a model's arithmetic on a CPU: torch's operations, our kernels with torch's bits, or our kernels with their
own order of sums.

Equal bits come first (grade E0): our kernels are used if they have torch's bits. The fastest method for the experts of
one token is measured once at start. The methods are: one expert after the other on all threads, several experts on one
thread each, or all experts in one call of machine code. The result depends on the machine and on how its OpenMP runtime
waits (`OMP_WAIT_POLICY`). On CPUs without AVX-512 BF16, where torch's bits are slow, our kernels use their own order of
sums (grade E1), if they are at least a tenth faster and as accurate as torch. For quantized models, and where our
kernels multiply many rows (`kernels/many_rows.py`), times decide nothing: our kernels are used wherever they are as
accurate.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from smoe.bounds import INT8
from smoe.compute.decode_experts import proven_kernel
from smoe.compute.experts import Experts, Place
from smoe.compute.thread_pool import ThreadPool
from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.fastpath import attention, convolution, decoder_layer, delta_rule, linear, norm, router
from smoe.fastpath.fast_layer import FastLayer
from smoe.kernels.experts import TokenExperts
from smoe.kernels.isa import widest
from smoe.kernels.spinning_pool import OWN_ORDER_GAIN, SpinningPool, is_supported
from smoe.kernels.verdicts import Verdicts
from smoe.load.experts_math import activations_of, check_activations
from smoe.load.selftest import Prover
from smoe.load.slot_kernels import in_slots
from smoe.memory.quantised_store import QuantisedStore
from smoe.memory.store import ExpertStore
from smoe.models.spec import ModelSpec

MIN_EXPERT_BYTES = 1 << 20
"""The size in bytes below which experts are not measured. Our kernel computes such experts if its bits agree, because
it wakes no thread; otherwise torch does."""
_NEARLY_ALL = 0.9
"""The fraction of linear weights that our kernel must multiply before torch is limited to one thread."""
_ROUNDS = 9
_EXPERTS = 8


class ChosenArithmetic(NamedTuple):
    """The result of the choice: the arithmetic of the experts, and how much of the model our kernels compute."""

    experts: Experts
    leaves_little: bool = False
    """Whether torch has almost nothing left to compute for one token."""
    leaves_little_of_prompts: bool = False
    """Whether torch has almost nothing left to compute for a prompt either."""
    layers: Mapping[nn.Module, FastLayer] = {}
    """The decoder layers that our kernels compute for one token."""


def choose_arithmetic(
    model: PreTrainedModel,
    spec: ModelSpec,
    config: EngineConfig,
    prover: Prover,
    experts: Experts,
    made: ExitStack,
    verdicts: Verdicts,
) -> ChosenArithmetic:
    """Return the best arithmetic for the experts, and make the non-expert layers of `model` use the best arithmetic
    too. `made` closes the threads that compute experts. `verdicts`: known results of proofs; this function adds its
    own."""
    device, store, dtype = prover.device, prover.store, spec.dtype.torch
    may_be_ours = dtype is torch.bfloat16 and config.kernels != "torch"
    if may_be_ours and device.type == "cpu":
        experts = experts.filling_up_rows(dtype)
    is_ours = is_native(spec, config, device) and device.type == "cpu"
    if config.kernels == "own-order" and not is_ours:
        raise _not_here(config, "it is for bfloat16 on a CPU with AVX2, AVX-512 or NEON, and needs llvmlite")
    proven = _proven(model, config, prover, experts, made, verdicts) if is_ours else None
    if config.kernels == "own-order" and proven is None:
        raise _not_here(config, "it does not support the shape of this model's experts")
    # torch has no kernel for quantized experts: dequantizing one for every token is no alternative. Where our kernel
    # multiplies many rows, torch takes several times as long for prompts, which the measurement would not notice
    has_many = proven is not None and proven.spinning_pool is not None and proven.spinning_pool.many is not None
    is_given = isinstance(store, QuantisedStore) or has_many or (proven is not None and config.kernels != "auto")
    experts = choose_way(prover, experts, proven, spec.sites[0].layer, dtype, is_given, made)
    if not is_ours:
        experts = in_slots(prover, experts, config)
    check_activations(model, config, experts, store, device)
    if not is_ours:
        return ChosenArithmetic(experts)
    return _with_the_rest(model, spec, config, experts, store, device, verdicts)


def is_native(spec: ModelSpec, config: EngineConfig, device: torch.device) -> bool:
    """Return whether this machine has kernels of smoe for the dtype of the model's experts."""
    activations = activations_of(config, spec.dtype.torch, device)
    return spec.dtype.torch is torch.bfloat16 and config.kernels != "torch" and widest(activations) is not None


def _with_the_rest(
    model: PreTrainedModel,
    spec: ModelSpec,
    config: EngineConfig,
    experts: Experts,
    store: ExpertStore,
    device: torch.device,
    verdicts: Verdicts,
) -> ChosenArithmetic:
    """Make non-expert layers use our kernels where a test allows it. Return the arithmetic chosen for experts and for
    non-expert layers together."""
    norms = norm.speed_up(model, verdicts)
    # even on one thread our attention is several times as fast as torch's on all
    chosen, may_round = experts.spinning_pool, _may_round(config, experts, store)
    # of quantized models a result must not depend on times, which differ between loads
    is_measured = config.kernels != "own-order" and not isinstance(store, QuantisedStore)
    settled = attention.speed_up(model, chosen or SpinningPool(1, has_bf16=is_supported()), verdicts)
    convolution.speed_up(model, verdicts, may_round)
    if chosen is None:
        return ChosenArithmetic(experts)
    prompts = attention.speed_up_prompts(model, chosen, verdicts) if may_round else 0
    activations = activations_of(config, spec.dtype.torch, device)
    gates = spec.anatomy.gates
    routers = {model.get_submodule(path): of in gates for of, path in spec.anatomy.routers.items()}
    sure = decoder_layer.projections(model)
    adopted = linear.speed_up(model, chosen, routers, activations, is_measured, sure, verdicts)
    layers = decoder_layer.speed_up(model, chosen, adopted.parts, norms, verdicts)
    if may_round:
        settled += delta_rule.speed_up(model, chosen)
        if spec.latent_bytes(config):
            settled += attention.speed_up_latent(model, chosen, verdicts)
        modules = {model.get_submodule(site.name) for site in spec.sites}
        plain = [of for of, is_gate in routers.items() if is_gate]
        router.speed_up(chosen, plain, layers.values(), modules, verdicts)
    attentions = model.config.get_text_config().num_hidden_layers
    leaves_little = settled == attentions and adopted.share > _NEARLY_ALL
    multiplied = adopted.share if chosen.many is not None else adopted.quantized_share
    has_experts = experts.activations == INT8 or all(math.prompt_kernel for math in experts.maths.values())
    has_prompts = prompts == attentions and multiplied > _NEARLY_ALL and has_experts
    return ChosenArithmetic(experts, leaves_little, leaves_little and has_prompts, layers)


def _may_round(config: EngineConfig, experts: Experts, store: ExpertStore) -> bool:
    """Return whether modules outside the experts may differ from torch by rounding. They may if the model's experts use
    our own order of sums or are quantized."""
    chosen = experts.spinning_pool
    has_own = chosen is not None and chosen.own_order is not None
    is_asked = config.kernels == "own-order"
    is_auto = config.kernels == "auto" and not config.reproducible
    return is_asked or (is_auto and (has_own or isinstance(store, QuantisedStore)))


def _not_here(config: EngineConfig, why: str) -> ConfigError:
    return ConfigError(
        f"`kernels={config.kernels}`: {why}; use `kernels=auto`",
        setting="kernels",
        given=config.kernels,
        allowed="auto, native or torch here",
    )


def _proven(
    model: PreTrainedModel,
    config: EngineConfig,
    prover: Prover,
    experts: Experts,
    made: ExitStack,
    verdicts: Verdicts,
) -> Experts | None:
    """Return the experts with our kernel as their arithmetic: with torch's bits if possible, else with our own order of
    sums if the settings allow it. Return None if neither is possible.

    Products of quantized experts have no order of torch's. There our own order also replaces torch's if attention in
    torch's order lacks torch's bits on this CPU, as on those with AMX: torch itself would have to compute it.
    """
    is_quantised = isinstance(prover.store, QuantisedStore)
    may_differ = config.kernels == "auto" and not config.reproducible
    orders = [False] if is_supported() and config.kernels != "own-order" else []
    if may_differ or config.kernels == "own-order" or is_quantised:
        orders.append(True)
    second_best = None
    for in_own_order in orders:
        pool = SpinningPool(torch.get_num_threads(), config.max_sequences > 1, in_own_order=in_own_order)
        made.callback(pool.close)
        kernels = agreeing_kernels(prover, experts, pool, verdicts)
        if kernels is None:
            pool.close()
        elif in_own_order or not (is_quantised and may_differ) or attention.agrees_everywhere(model, pool, verdicts):
            if second_best is not None:
                _close(second_best)
            return experts.by(pool, kernels)
        else:
            second_best = experts.by(pool, kernels)
    return second_best


def agreeing_kernels(
    prover: Prover, experts: Experts, pool: SpinningPool, verdicts: Verdicts
) -> dict[Place, TokenExperts] | None:
    """Return the kernels for few tokens, by layer and format, for those layers and formats that have one. Return None
    if products by `pool` lack the library's bits for an expert; one expert of every shape is tested."""
    found: dict[tuple[object, ...], TokenExperts | None] = {}
    for place in sorted(experts.maths):
        math = experts.maths[place]
        if math.kind in found:
            continue
        subject = math.subject, place, math.sums_as_weights, pool.kind
        rows = verdicts.of("experts by our kernel", subject, partial(_proven_rows, prover, experts, place, pool))
        if rows is None:
            return None
        found[math.kind] = math.by_pool(pool).kernel_of(pool, rows) if rows else None
    of_places = ((place, found.get(math.kind), math) for place, math in experts.maths.items())
    return {place: kernel for place, kernel, math in of_places if kernel and math.has_activation(kernel.table)}


def _proven_rows(prover: Prover, experts: Experts, place: Place, pool: SpinningPool) -> int | None:
    """Return the number of tokens of one expert that our kernel may compute, 0 if only products by `pool` may be used,
    or None if not even these may."""
    math, weights = experts.maths[place], prover.sample(experts, place)
    if weights is None or not math.agrees(pool, weights):
        return None
    kernel = proven_kernel(math, pool, weights)
    return 0 if kernel is None else kernel.most_rows


def choose_way(
    prover: Prover,
    experts: Experts,
    proven: Experts | None,
    layer: int,
    dtype: torch.dtype,
    always: bool,
    made: ExitStack,
) -> Experts:
    """Return the experts with the arithmetic that is fastest for one token, and close the threads of the slower ones.
    Takes some tens of milliseconds.

    `proven`: the experts computed by our kernel, or None. `always`: whether to choose `proven` without measuring.
    """
    is_small = prover.store.expert_bytes < MIN_EXPERT_BYTES
    has_own_bits = proven is not None and proven.arithmetic == "own-order"
    if always or prover.device.type != "cpu" or (is_small and not has_own_bits):
        return proven or experts  # for small experts the kernel saves overhead, and threads cost more than they gain
    threads, ways = torch.get_num_threads(), [experts]
    if threads > 1 and not is_small:
        ways.append(experts.by(ThreadPool(threads)))
        made.callback(_close, ways[-1])
    if proven is not None:
        ways.append(proven)
    seconds = [float("inf")] * len(ways)
    for _ in range(_ROUNDS):
        for n, way in enumerate(ways):
            seconds[n] = min(seconds[n], _seconds(way, prover, layer, dtype))
    if has_own_bits:
        seconds[-1] *= OWN_ORDER_GAIN
    best = ways[seconds.index(min(seconds))]
    for way in ways:
        if way is not best:
            _close(way)
    return best


def _close(experts: Experts) -> None:
    for helper in experts.helpers:
        helper.close()


def _seconds(experts: Experts, prover: Prover, layer: int, dtype: torch.dtype) -> float:
    """Return the time of the experts of one decode step in one layer, in seconds. The slots may contain any experts. A
    product on all threads precedes the experts, as in a model."""
    dense = torch.ones(1, 2048, dtype=dtype), torch.ones(2048, 2048, dtype=dtype).t()  # as in linear layers
    hidden = torch.zeros(1, experts.hidden_size(layer), dtype=dtype)
    torch.mm(*dense)
    started = perf_counter()
    torch.mm(*dense)
    prover.compute_slots(experts, layer, hidden, _EXPERTS)
    return perf_counter() - started
