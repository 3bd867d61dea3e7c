"""Computes the attention of single tokens on a cache of latent vectors, without expanding them to keys and values.

With multi-head latent attention (MLA, DeepSeek-V2, section 2.1) the KV cache has one latent vector c and one rotated
key for each position, for all heads. transformers computes the keys W_k c and the values W_v c of all positions
for every token, so the time of a token grows by 2 million multiplications a layer and position for DeepSeek-V2-Lite.
The same scores and outputs need only a product for each head:

    q . (W_k c) = (W_k^T q) . c        p . (W_v c) = W_v (p . c)

So the query is multiplied by W_k^T, all heads attend to the latent vectors as to keys and values of one shared head
(`kernels/attention.py`), and the result is multiplied by W_v. Both matrices are bf16 copies of `kv_b_proj`; the memory
budget includes them (`ModelSpec.latent_bytes`). Prompts are computed by transformers' method, in which one expansion
serves many queries.

Results equal transformers' up to rounding (E1). A proof at load compares both with float64.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from smoe.fastpath.attention_proof import Attention
from smoe.kernels.attention import attend, libm
from smoe.kernels.attention import fits as fits_attention
from smoe.kernels.proof import is_no_further
from smoe.kernels.row_product import fits
from smoe.kernels.spinning_pool import Product, SpinningPool
from smoe.kernels.verdicts import Verdicts
from smoe.models.quantised_linear import QuantisedLinear

LATENT = "latent_query"
"""The attribute of a module that holds its kernel for one token on latent vectors."""
_POSITIONS = 300
"""The number of positions in the proof."""
_LEEWAY = 2.5
"""The largest allowed mean square error relative to transformers' way with bf16 weights. Here the result of attention
is rounded to bf16 once more, before it is multiplied by W_v, which alone may double it (1.1 and 1.7 were measured).
With quantized weights, transformers' way rounds the latent vectors to 8 bits, and the ratio is far below 1."""
_SAMPLED_ROWS = 16
"""The number of rows of a weight that are compared with the copy for each token."""
Expand = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class LatentShape(NamedTuple):
    """The sizes of latent attention. The result of a proof holds for all modules of one shape."""

    heads: int
    nope: int
    """The elements of a query that are not rotated."""
    rope: int
    """The elements that are rotated."""
    rank: int
    """The elements of a latent vector."""
    value: int
    """The elements of a head's output."""


class LatentQuery:
    """The attention of one query token for one module. While the module processes one token, `expand` returns latent
    vectors in place of keys and values, and transformers passes them to the attention function."""

    def __init__(self, module: nn.Module, shape: LatentShape, pool: SpinningPool) -> None:
        self.shape = shape
        self._pool = pool
        self._module = weakref.ref(module)
        self._library: Expand = module.expand_kv  # type: ignore[assignment]
        self._is_one_token = False
        self._linear: nn.Linear | QuantisedLinear = module.kv_b_proj  # type: ignore[assignment]
        self._sample = _sample_of(self._linear)
        of_heads = _weight(module.kv_b_proj).view(shape.heads, shape.nope + shape.value, shape.rank)  # type: ignore[arg-type]
        self._keys = of_heads[:, : shape.nope].transpose(1, 2).contiguous()
        """W_k^T of each head, [heads, rank, nope]."""
        self._values = of_heads[:, shape.nope :].contiguous()
        """W_v of each head, [heads, value, rank]."""

    @property
    def is_supported(self) -> bool:
        """Whether the kernels support the shape."""
        return all(fits(weight[0].t()) for weight in (self._keys, self._values))

    def note_tokens(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record, before the module is called, whether each row has one token."""
        hidden = args[0] if args else kwargs["hidden_states"]
        self._is_one_token = hidden.shape[1] == 1

    def expand(self, latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values for latent vectors [rows, 1, n, rank] and rotated keys [rows, 1, n, rope]. For one
        token they are not expanded: both results are the latent vectors with the rotated keys, [rows, 1, n, rank +
        rope]."""
        if not self._is_one_token or not self._is_as_copied:
            return self._library(latent, rotated)
        both = torch.cat((latent, rotated), -1)
        return both, both

    @property
    def _is_as_copied(self) -> bool:
        """Whether the module calls the attention function of this kernel, and its `kv_b_proj` is the layer whose weight
        was copied. Adapters replace the layer or change its weight."""
        module, linear = self._module(), self._linear
        if module is None or module.kv_b_proj is not linear or linear._forward_hooks or linear._forward_pre_hooks:
            return False
        is_sdpa = getattr(module.config, "_attn_implementation", None) == "sdpa"
        return is_sdpa and torch.equal(_sample_of(linear), self._sample)

    def is_latent(self, keys: torch.Tensor) -> bool:
        """Return whether keys are latent vectors that `expand` has returned, or some rows of them."""
        return self._is_one_token and keys.shape[1] == 1 and keys.shape[3] == self.shape.rank + self.shape.rope

    def expanded(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values that transformers computes from latent vectors."""
        return self._library(*keys.split((self.shape.rank, self.shape.rope), -1))

    def selected(self, keys: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return the latent vectors of the positions that `mask` leaves visible, or None if the mask is not one of
        visible positions for one row."""
        if mask is None:
            return keys
        if mask.dtype is not torch.bool or mask.shape != (1, 1, 1, keys.shape[2]) or not bool(mask.any()):
            return None
        return keys[:, :, mask[0, 0, 0]]

    def serves(self, query: torch.Tensor, keys: torch.Tensor) -> bool:
        """Return whether the kernel can compute attention for a query [1, heads, 1, nope + rope] and latent vectors [1,
        1, n, rank + rope]."""
        is_known = query.shape == (1, self.shape.heads, 1, self.shape.nope + self.shape.rope)
        return is_known and query.dtype is torch.bfloat16 and fits_attention(self._room(), keys, keys)

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the attention's output [1, 1, heads, value] for a query and latent vectors that `serves` describes."""
        heads, nope, _, rank, value = self.shape
        plain, long = query[0, :, 0, :nope].contiguous(), self._room()
        turned = plain.new_empty(heads, rank)
        self._multiply(plain, self._keys, turned)
        long[0, :, 0, :rank], long[0, :, 0, rank:] = turned, query[0, :, 0, nope:]
        found = attend(self._pool, long, keys, keys, scale)[0][0, 0, :, :rank].contiguous()
        out = plain.new_empty(1, 1, heads, value)
        self._multiply(found, self._values, out[0, 0])
        return out

    def _room(self) -> torch.Tensor:
        return self._keys.new_empty(1, self.shape.heads, 1, self.shape.rank + self.shape.rope)

    def _multiply(self, rows: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply row h [K] of `rows` by matrix h of `weights` [heads, N, K] into row h [N] of `out`."""
        each = zip(rows.split(1), weights, out.split(1), strict=True)
        self._pool.multiply([Product(row, weight.t(), to) for row, weight, to in each])


def speed_up(model: PreTrainedModel, library: Attention, pool: SpinningPool, verdicts: Verdicts) -> int:
    """Make modules with latent attention compute single tokens without expanding the cache, wherever this is about
    as accurate as transformers' method. Return the number of these modules.

    `library`: transformers' attention function. `verdicts`: known results of proofs; this function adds its own.
    """
    adopted = 0
    for module in model.modules():
        shape = _shape(module)
        if shape is None or libm() is None:
            continue
        kernel = LatentQuery(module, shape, pool)
        proof = partial(_is_accurate, kernel, library, module)
        if kernel.is_supported and verdicts.of("latent attention", (*shape, pool.kind), proof):
            module.register_forward_pre_hook(kernel.note_tokens, with_kwargs=True)
            setattr(module, "expand_kv", kernel.expand)  # noqa: B010 - a method of the class
            setattr(module, LATENT, kernel)
            adopted += 1
    return adopted


def kernel_of(module: nn.Module) -> LatentQuery | None:
    """Return the kernel for one token on latent vectors that an attention module uses, or None."""
    return getattr(module, LATENT, None)


def _shape(module: nn.Module) -> LatentShape | None:
    """Return the sizes of a module's latent attention, or None if the module is of another kind."""
    weight = getattr(module, "kv_b_proj", None)
    if not hasattr(module, "expand_kv") or not isinstance(weight, (nn.Linear, QuantisedLinear)):
        return None
    names = ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "v_head_dim")
    sizes = [getattr(module, name, None) for name in names]
    if weight.bias is not None or not all(isinstance(size, int) for size in sizes):
        return None
    shape = LatentShape(*sizes)  # type: ignore[arg-type]
    outputs = shape.heads * (shape.nope + shape.value)
    return shape if (weight.out_features, weight.in_features) == (outputs, shape.rank) else None


def _weight(linear: nn.Linear | QuantisedLinear) -> torch.Tensor:
    """Return a layer's weight in bf16, [outputs, inputs]."""
    if isinstance(linear, QuantisedLinear):
        return torch.cat([linear.numbers(begin, end) for begin, end in linear.pieces()]).bfloat16()
    return linear.weight.detach().bfloat16()


def _sample_of(linear: nn.Linear | QuantisedLinear) -> torch.Tensor:
    """Return a few elements of a layer's weight or codes, by which a change is noticed."""
    weight = linear.codes if isinstance(linear, QuantisedLinear) else linear.weight.detach()
    return weight[:: max(1, len(weight) // _SAMPLED_ROWS), 0].clone()


def _is_accurate(kernel: LatentQuery, library: Attention, module: nn.Module) -> bool:
    """Return whether the kernel is about as accurate as transformers' method: expanding, then `library`."""
    heads, nope, rope, rank, value = kernel.shape
    generator, scale = torch.Generator().manual_seed(0), (nope + rope) ** -0.5
    query = torch.randn(1, heads, 1, nope + rope, generator=generator).bfloat16()
    keys = torch.randn(1, 1, _POSITIONS, rank + rope, generator=generator).bfloat16()
    if not kernel.serves(query, keys):
        return False
    latent, rotated = keys.double().split((rank, rope), -1)
    of_heads = _weight(module.kv_b_proj).double().view(heads, nope + value, rank)  # type: ignore[arg-type]
    plain = query[..., :nope].double() @ (latent @ of_heads[:, :nope].mT).mT
    scores = (plain + query[..., nope:].double() @ rotated.mT) * scale
    exact = (scores.softmax(-1) @ (latent @ of_heads[:, nope:].mT)).transpose(1, 2)
    with torch.no_grad():
        theirs = library(module, query, *kernel.expanded(keys), None, dropout=0.0, scaling=scale)[0]
        return is_no_further(kernel(query, keys, scale), theirs, exact, _LEEWAY)
