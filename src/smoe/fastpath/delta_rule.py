"""Computes one token of the gated delta rule (linear attention of Qwen3-Next, Qwen3.5, Qwen3.6 and Qwen3.8) in place.

For each head the rule changes a state S [K, V] by a key k, a value v, a decay a and a gate b:

    S <- a S        S <- S + k (b (v - S^T k))^T        output = S^T q

transformers computes this in float32 by elementwise operations, each of which makes a new tensor as large as all states
of a layer (2 MB for 32 heads of 128 x 128). Here the state is changed in place, and sums are matrix products. They add
in another order, so results equal transformers' up to rounding (E1).

transformers' function is a global of the model's Python file and gets no `nn.Module`. `speed_up` replaces the global in
memory. The new function calls the original, unless a module with the fast rule is running in the same thread.

For one text, a module of usual sizes does not call that function: one kernel computes everything between the module's
projections (`kernels/delta_token.py`).
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from smoe.kernels import delta_token
from smoe.kernels.delta_token import TAPS, Sizes
from smoe.kernels.spinning_pool import SpinningPool

_NAME = "torch_recurrent_gated_delta_rule"
"""transformers' function for one token, in the source files of model classes."""
_SMALLEST = 1e-6
"""transformers adds this number to the square of a norm."""
_running = threading.local()
"""Its attribute `is_fast` is true while a module with the fast rule is running in this thread."""
_ACTIVATIONS = ("silu", "swish")
Rule = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def speed_up(model: nn.Module, pool: SpinningPool) -> int:
    """Make modules with the gated delta rule compute single tokens in place, in a kernel on `pool` where it supports
    them. Return the number of modules with the kernel."""
    adopted = 0
    for module in model.modules():
        if hasattr(module, "A_log") and _stands_before(sys.modules[type(module).__module__]):
            module.register_forward_pre_hook(_begin)
            module.register_forward_hook(_end, always_call=True)
            sizes = _sizes_of(module)
            if sizes is not None and delta_token.fits(sizes):
                module.forward = _in_one_kernel(module, sizes, pool, module.forward)
                adopted += 1
    return adopted


def _sizes_of(module: Any) -> Sizes | None:
    """Return the sizes of a module whose arithmetic the kernel has, or None for another module."""
    is_split = all(hasattr(module, name) for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
    is_joined = hasattr(module, "in_proj_qkvz") and hasattr(module, "fix_query_key_value_ordering")
    if not (is_split or is_joined) or not type(module.norm).__name__.endswith("RMSNormGated"):
        return None
    convolution, norm = module.conv1d, module.norm
    is_usual = {module.activation, norm.activation} <= set(_ACTIVATIONS) and convolution.bias is None
    weights = convolution.weight, norm.weight
    if not is_usual or convolution.kernel_size != (TAPS,) or any(each.dtype is not torch.bfloat16 for each in weights):
        return None
    return Sizes(module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim)


def _in_one_kernel(module: Any, sizes: Sizes, pool: SpinningPool, library: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `forward` of a module with the gated delta rule, which computes one token of one text in a kernel, and
    everything else by `library`. The kernel computes nothing once a module within was replaced or has hooks."""
    convolution, norm = module.conv1d, module.norm
    hooks = [each for part in (convolution, norm) for each in (part._forward_hooks, part._forward_pre_hooks)]

    @functools.wraps(library)
    def forward(
        hidden_states: torch.Tensor, cache_params: Any = None, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        is_untouched = module.conv1d is convolution and module.norm is norm and not any(hooks)
        states = _states_of(module, hidden_states, cache_params, kwargs) if is_untouched else None
        mixed, z, gate, step = _projected(module, hidden_states) if states is not None else (hidden_states,) * 4
        taps, weight = convolution.weight, norm.weight
        if states is None or not _are_usual(mixed, z, taps, weight):
            return library(hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs)
        decay = torch.exp(-module.A_log.float().exp() * functional.softplus(step.float() + module.dt_bias))
        last, state = states
        given = mixed, last, taps, state, decay.view(-1), gate.sigmoid().float().view(-1), z, weight
        found = delta_token.attend(pool, sizes, *given, norm.variance_epsilon)
        return module.out_proj(found.view(1, 1, -1))

    return forward


def _are_usual(*numbers: torch.Tensor) -> bool:
    """Return whether machine code can read all these numbers as bf16, one after the other."""
    return all(each.dtype is torch.bfloat16 and each.is_contiguous() for each in numbers)


def _states_of(
    module: Any, hidden: torch.Tensor, cache: Any, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the last values of the convolution's channels, and the state of the rule, which the kernel changes in
    place. None if this is not one token after others of one text, or if the cache has states of another form."""
    if cache is None or hidden.shape[:2] != (1, 1) or hidden.dtype is not torch.bfloat16 or hidden.requires_grad:
        return None
    layer = module.layer_idx
    if kwargs.get("cu_seq_lens_q") is not None or cache.is_recording_past(layer):
        return None
    last, state = cache.get_conv_state(layer, state_idx=0), cache.get_recurrent_state(layer, state_idx=0)
    if last is None or state is None or last.shape[2] != TAPS:
        return None
    is_usual = last.dtype is torch.bfloat16 and state.dtype is torch.float32 and state.device.type == "cpu"
    return (last, state) if is_usual and last.is_contiguous() and state.is_contiguous() else None


def _projected(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the projections of a token: queries, keys and values in one tensor, z, and for each value head the numbers
    of which gate and decay are made."""
    if hasattr(module, "in_proj_qkv"):
        mixed, z = module.in_proj_qkv(hidden), module.in_proj_z(hidden)
        return mixed, z, module.in_proj_b(hidden), module.in_proj_a(hidden)
    joined = module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
    query, key, value, z, gate, step = module.fix_query_key_value_ordering(*joined)
    mixed = torch.cat([each.reshape(-1) for each in (query, key, value)])
    return mixed, z.contiguous(), gate, step


def _begin(module: nn.Module, args: Any) -> None:
    _running.is_fast = True


def _end(module: nn.Module, args: Any, output: Any) -> None:
    _running.is_fast = False


def _stands_before(file: Any) -> bool:
    """Replace transformers' function in a source file by one that may compute in place. Return False if the file has no
    such function."""
    library = getattr(file, _NAME, None)
    if library is None:
        return False
    if not hasattr(library, "library"):
        ours = _one_token_in_place(library)
        ours.library = library  # type: ignore[attr-defined]
        setattr(file, _NAME, ours)
    return True


def _one_token_in_place(library: Rule) -> Rule:
    @functools.wraps(library)
    def rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        is_fast = getattr(_running, "is_fast", False) and use_qk_l2norm_in_kernel and output_final_state
        if is_fast and initial_state is not None and _serves(query, initial_state):
            return one_token(query, key, value, g, beta, initial_state), initial_state
        given = {"initial_state": initial_state, "output_final_state": output_final_state}
        given["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
        return library(query, key, value, g=g, beta=beta, **given, **kwargs)

    return rule


def _serves(query: torch.Tensor, state: torch.Tensor) -> bool:
    is_plain = state.dtype is torch.float32 and state.device.type == "cpu" and state.is_contiguous()
    return is_plain and query.shape[1] == 1 and not query.requires_grad


def one_token(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    gate: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Return the output [rows, 1, heads, V] of one token, and change `state` [rows, heads, K, V] in place.

    `query` and `key` [rows, 1, key heads, K], each shared by as many heads; `value` [rows, 1, heads, V]; `decay`, in
    logarithms, and `gate` [rows, 1, heads].
    """
    rows, heads, keys, values = state.shape
    shared = heads // key.shape[2]
    q = _normalised(query).mul_(keys**-0.5).repeat_interleave(shared, 1).view(rows * heads, 1, keys)
    k = _normalised(key).repeat_interleave(shared, 1).view(rows * heads, 1, keys)
    state.mul_(decay.float().exp().view(rows, heads, 1, 1))
    of_heads = state.view(rows * heads, keys, values)
    change = value.float().view(rows * heads, 1, values) - torch.bmm(k, of_heads)
    change *= gate.float().view(rows * heads, 1, 1)
    of_heads.baddbmm_(k.mT, change)
    return torch.bmm(q, of_heads).view(rows, 1, heads, values).to(query.dtype)


def _normalised(vectors: torch.Tensor) -> torch.Tensor:
    """Return vectors [rows, 1, heads, K] with a norm of one, in float32, [rows, heads, K]."""
    wide = vectors[:, 0].float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _SMALLEST)
