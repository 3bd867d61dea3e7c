"""Computes the attention of single tokens by our kernel, which is registered under transformers' name `sdpa`.

Decoder layers look up their attention function by name. Some families compare the name with "sdpa" and behave
differently for other names, and masks depend on the name too, so it stays the same. The function registered under it
checks whether the calling module has a kernel. It calls transformers' function for modules without a kernel, and for
every call that is not one token of one row without a mask.

A kernel is used if a proof finds torch's bits (`attention_proof.py`).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from smoe.fastpath import latent_attention, prompt_attention
from smoe.fastpath.attention_proof import Attention, Shape, agrees, is_accurate, is_the_same_on_one_thread
from smoe.fastpath.prompt_attention import SeveralQueries, hides_the_future
from smoe.fastpath.rows_of_pass import RowsOfPass
from smoe.kernels.attention import TILE, attend, fits, libm
from smoe.kernels.isa import widest
from smoe.kernels.prompt_attention import PromptAttention
from smoe.kernels.spinning_pool import SpinningPool
from smoe.kernels.threads import threads
from smoe.kernels.verdicts import Verdicts

NAME = "sdpa"
_ATTRIBUTE = "one_query"
"""The attribute of a module that holds its kernel for one token."""
_PROMPTS = "several_queries"
"""The attribute of a module that holds its kernel for several tokens."""
_THREADS = "library_threads"
"""The attribute of a module that holds torch's number of threads for long computations."""
_ROWS = "rows_of_pass"
"""The attribute of a module that holds the lengths of the texts in the running pass."""
_EAGER = "eager_attention_forward"
_OWN_ORDER = "attention in our own order"
_MOST_ALONE = 1 << 20
"""The number of multiplications that one thread of torch computes in some 1 ms. For fewer, waking other threads takes
longer than computing, and they then slow down the threads of our kernels."""
_UNDERSTOOD = {"module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal", "kwargs"}
"""Parameters of transformers' function that do not matter for one token without a mask."""
_CHANGING = ("softcap", "s_aux", "output_attentions")
"""Parameters that other families pass without declaring them."""


def speed_up(model: PreTrainedModel, pool: SpinningPool, verdicts: Verdicts | None = None) -> int:
    """Make attention modules compute single tokens by our kernel, wherever the kernel reproduces torch's bits. Return
    the number of modules for which one torch thread suffices for one token.

    These are the modules with the kernel, and those whose attention by torch has the same bits on one thread as on all.
    Long computations still use all threads. A pool that sums in its own order cannot have torch's bits; its kernel is
    used if its error is no larger than torch's. Its time is not compared: alone both take about as long, but only with
    our attention can a token go through a layer as one job, which halves the time of a token. `verdicts`: known
    results of proofs; this function adds its own. Takes some tens of milliseconds for every distinct shape, and as long
    once per process.
    """
    if model.config.get_text_config()._attn_implementation != NAME or libm() is None:
        return 0
    library, settled = _behind_the_name(), 0
    verdicts = verdicts or Verdicts()
    for module in model.modules():
        shape = _shape(module, model)
        if shape is None:
            continue
        subject, given = _subject(library, shape, pool), (pool, library, module, shape)
        is_ours = verdicts.of("attention", subject, partial(agrees, *given)) or (
            pool.own_order is not None and verdicts.of(_OWN_ORDER, subject, partial(is_accurate, *given))
        )
        if is_ours:
            setattr(module, _ATTRIBUTE, OneQuery(pool, shape))
        setattr(module, _THREADS, torch.get_num_threads())
        settled += is_ours or verdicts.of(
            "attention on one thread", subject, partial(is_the_same_on_one_thread, library, module, shape)
        )
    return settled


def agrees_everywhere(model: PreTrainedModel, pool: SpinningPool, verdicts: Verdicts) -> bool:
    """Return whether the kernel has torch's bits for the attention of single tokens in all modules of a model that it
    supports. `verdicts`: known results of proofs; this function adds its own."""
    if model.config.get_text_config()._attn_implementation != NAME or libm() is None:
        return True
    library = _behind_the_name()
    shapes = {shape: module for module in model.modules() if (shape := _shape(module, model)) is not None}
    return all(
        verdicts.of("attention", _subject(library, shape, pool), partial(agrees, pool, library, module, shape))
        for shape, module in shapes.items()
        if shape.size % TILE == 0
    )


def _subject(library: Attention, shape: Shape, pool: SpinningPool) -> tuple[object, ...]:
    """Return what the results of proofs of attention hold for."""
    name = getattr(library, "__qualname__", type(library).__qualname__)
    return library.__module__, name, shape, pool.kind


def speed_up_prompts(model: PreTrainedModel, pool: SpinningPool, verdicts: Verdicts | None = None) -> int:
    """Make attention modules compute several tokens by our kernel, wherever the kernel is as accurate as torch. Return
    the number of these modules.

    The kernel's bits differ from torch's. `verdicts`: known results of proofs; this function adds its own. Takes some
    tens of milliseconds for every distinct shape.
    """
    if model.config.get_text_config()._attn_implementation != NAME or widest() is None:
        return 0
    library, attend = _behind_the_name(), PromptAttention(pool)
    verdicts, adopted = verdicts or Verdicts(), 0
    for module in model.modules():
        shape = _shape(module, model)
        if shape is None:
            continue
        gained = partial(prompt_attention.is_accurate, attend, library, module, *shape)
        if verdicts.of("attention of prompts", _subject(library, shape, pool), gained):
            setattr(module, _PROMPTS, SeveralQueries(attend, *shape))
            adopted += 1
    return adopted


def speed_up_latent(model: PreTrainedModel, pool: SpinningPool, verdicts: Verdicts) -> int:
    """Make attention modules with latent vectors in the KV cache compute single tokens without expanding them. Return
    the number of these modules (`latent_attention.py`)."""
    if model.config.get_text_config()._attn_implementation != NAME:
        return 0
    return latent_attention.speed_up(model, _behind_the_name(), pool, verdicts)


def listen_to(rows: RowsOfPass, model: PreTrainedModel) -> bool:
    """Make attention in every pass use only the keys of a row's own text, as if the row were alone. `rows` gives the
    number of keys of each row; they are the last keys of the KV cache.

    Return False, and change nothing, if the model's attention uses neither `sdpa` nor the eager function in its source
    file.
    """
    attentions = [module for module in model.modules() if hasattr(module, "is_causal")]
    name = model.config.get_text_config()._attn_implementation
    if name == NAME:
        _behind_the_name()
    elif name != "eager" or not all(map(_stands_before_eager, attentions)):
        return False
    for module in attentions:
        setattr(module, _ROWS, rows)
    return bool(attentions)


def _stands_before_eager(module: nn.Module) -> bool:
    """Replace the eager attention function in the source file of this module's class by a function that calls the
    original row by row. Return False if the file has no eager attention function."""
    file = sys.modules[type(module).__module__]
    library = getattr(file, _EAGER, None)
    if library is None:
        return False
    if not hasattr(library, "library"):
        ours = _row_by_row(library, is_causal=False)
        ours.library = library  # type: ignore[attr-defined]
        setattr(file, _EAGER, ours)
    return True


def _row_by_row(library: Attention, is_causal: bool) -> Attention:
    """Return an attention function that calls the attention function `library` once for each row if the rows of the
    pass are separate texts. `is_causal`: whether `library` hides later keys from queries if it gets no mask."""

    @functools.wraps(library)
    def forward(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        texts = getattr(module, _ROWS, None)
        if texts is None or texts.keys is None or query.shape[0] != len(texts.keys):
            return library(module, query, key, value, attention_mask, *args, **kwargs)
        each = _each_row(texts.keys, query, key, value, attention_mask, is_causal)
        outputs = [library(module, *row, *args, **kwargs)[0] for row in each]
        return torch.cat([_below_nothing(output, query.shape[2]) for output in outputs]), None

    return forward


def _below_nothing(output: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return an attention output [1, n, heads, d] padded at its beginning with zeros to [1, tokens, heads, d]."""
    missing = tokens - output.shape[1]
    return functional.pad(output, (0, 0, 0, 0, missing, 0)) if missing else output


class OneQuery:
    """The attention kernel for a single query token, for one shape of heads."""

    def __init__(self, pool: SpinningPool, shape: Shape) -> None:
        self._pool = pool
        self.shape = shape

    def serves(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Return whether the kernel can compute attention for these tensors: their shape of heads was tested, and their
        layout is supported."""
        shape = Shape(query.shape[1], keys.shape[1], query.shape[3])
        return shape == self.shape and fits(query, keys, values) and not query.requires_grad

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the attention's output for one query [1, heads, 1, size]."""
        return attend(self._pool, query, keys, values, scale)[0]


def kernel_of(module: nn.Module) -> OneQuery | None:
    """Return the kernel for one token that an attention module uses, or None."""
    return getattr(module, _ATTRIBUTE, None)


def prompt_kernel_of(module: nn.Module) -> SeveralQueries | None:
    """Return the kernel for several tokens that an attention module uses, or None."""
    return getattr(module, _PROMPTS, None)


def _shape(module: nn.Module, model: PreTrainedModel) -> Shape | None:
    """Return the shape of heads of a module, or None if it is not an attention module of transformers."""
    size = getattr(module, "head_dim", None)
    if size is None or not hasattr(module, "is_causal"):
        return None
    heads = getattr(module, "num_heads", None) or model.config.get_text_config().num_attention_heads
    return Shape(heads, heads // getattr(module, "num_key_value_groups", 1), size)


def _products(query: torch.Tensor, keys: torch.Tensor) -> int:
    return query.numel() * keys.shape[-2]


def _behind_the_name() -> Attention:
    """Return transformers' own attention function `sdpa`. The first call in a process also registers our function under
    the name `sdpa`."""
    registered: Attention = ALL_ATTENTION_FUNCTIONS[NAME]
    library: Attention | None = getattr(registered, "library", None)
    if library is not None:
        return library
    ours = _row_by_row(_standing_before(registered), is_causal=True)
    ours.library = registered  # type: ignore[attr-defined]
    ALL_ATTENTION_FUNCTIONS.register(NAME, ours)
    return registered


def _each_row(
    keys: Sequence[int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    is_causal: bool,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Yield for each row the query, key, value and mask with which attention would be called if the row were alone in
    the pass. `keys`: the number of keys of each row.

    The mask is None in two cases: if the text of a row is still shorter than the attention window, and if the text
    begins with this pass and the function hides later keys without a mask (`is_causal`). The second case requires that
    the mask hides only later keys.
    """
    new, there = query.shape[2], key.shape[2]
    for row, count in enumerate(keys):
        own = slice(row, row + 1)
        asks, has = max(0, new - count), max(0, there - count)
        mask = attention_mask
        if mask is not None:
            mask = mask[own if mask.shape[0] > 1 else slice(None), :, asks:, has:]
            mask = None if has and (new == 1 or (is_causal and _hides_the_future(mask))) else mask
        yield query[own, :, asks:], key[own, :, has:], value[own, :, has:], mask


def _hides_the_future(mask: torch.Tensor) -> bool:
    """Return whether a mask [1, 1, n, n] hides exactly the keys after each query."""
    tokens, keys = mask.shape[-2:]
    return tokens == keys and hides_the_future(mask if mask.dtype is torch.bool else mask == 0, tokens, keys)


def _that_serves(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool | None,
) -> OneQuery | SeveralQueries | None:
    """Return the kernel of an attention module that can compute a call with these tensors, or None if none of its
    kernels can."""
    one = kernel_of(module)
    if one is not None and mask is None and one.serves(query, key, value):
        return one
    several = prompt_kernel_of(module)
    if several is None:
        return None
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal  # as in transformers
    return several if several.serves(query, key, value, mask, scale, is_causal) else None


def _standing_before(library: Attention) -> Attention:
    others = (*(name for name in inspect.signature(library).parameters if name not in _UNDERSTOOD), *_CHANGING)

    @functools.wraps(library)
    def forward(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        is_plain = all(kwargs.get(name) is None or kwargs[name] is False for name in others)
        latent = latent_attention.kernel_of(module)
        if latent is not None and latent.is_latent(key):
            seen = latent.selected(key, attention_mask)
            if is_plain and not dropout and scaling is not None and seen is not None and latent.serves(query, seen):
                return latent(query, seen, scaling), None
            key, value = latent.expanded(key)
        if is_plain and not dropout and scaling is not None:
            kernel = _that_serves(module, query, key, value, attention_mask, scaling, kwargs.get("is_causal"))
            if kernel is not None:
                return kernel(query, key, value, scaling), None
        given = functools.partial(library, module, query, key, value, attention_mask)
        count = getattr(module, _THREADS, None)
        if count is None or (attention_mask is None and _products(query, key) <= _MOST_ALONE):
            return given(dropout=dropout, scaling=scaling, **kwargs)
        with threads(count):
            return given(dropout=dropout, scaling=scaling, **kwargs)

    return forward
