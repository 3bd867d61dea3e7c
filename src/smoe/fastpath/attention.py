"""Attention of single tokens by our kernel, registered as transformers' `sdpa`.

Decoder layers look their attention function up by name. Some families compare the name with "sdpa" and behave
differently for others, and masks depend on it too, so the name stays. The function registered under it checks whether
the calling module has a kernel. It calls transformers' function for modules without one, and for anything but one token
of one row without a mask.

A wrong order of sums changes very few rounded outputs, so the test uses data that reveal it:

* every key occurs twice, with opposite values: what remains of an output is the rounding error of its sums;
* the last key has the largest score, zero, and weighs as much as all others: the logarithm of the sum of weights, which
torch also returns, has hardly fewer digits than the sum;
* few keys of equal score, with values one step apart: outputs are midway between two bf16 numbers.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from smoe.fastpath import prompt_attention
from smoe.fastpath.prompt_attention import SeveralQueries, fastest_seconds, hides_the_future
from smoe.fastpath.rows_of_pass import RowsOfPass
from smoe.kernels.attention import attend, fits, libm
from smoe.kernels.isa import widest
from smoe.kernels.prompt_attention import PromptAttention
from smoe.kernels.proof import is_no_further, same_bits
from smoe.kernels.spinning_pool import OWN_ORDER_GAIN, SpinningPool
from smoe.kernels.threads import threads

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

NAME = "sdpa"
_ATTRIBUTE = "one_query"
"""The attribute of a module with its kernel for one token."""
_PROMPTS = "several_queries"
"""The attribute of a module with its kernel for several tokens."""
_THREADS = "library_threads"
"""The attribute of a module with torch's number of threads for long computations."""
_ROWS = "rows_of_pass"
"""The attribute of a module with the lengths of the texts in a pass."""
_EAGER = "eager_attention_forward"
_MOST_ALONE = 1 << 20
"""The number of multiplications that one thread of torch computes in some 1 ms. For fewer, waking other threads takes
longer, and they then slow down our threads."""
_UNDERSTOOD = {"module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal", "kwargs"}
"""Parameters of transformers' function that do not matter for one token without a mask."""
_CHANGING = ("softcap", "s_aux", "output_attentions")
"""Parameters that other families pass without declaring them."""
_PAIRED = (7, 15, 37, 90, 250, 515, 701)
"""Numbers of keys to test: below and above registers of 16 and 32, blocks of 512, whole ones, and every remainder of
4."""
_MIDWAY = (6, 14)
"""Even numbers of keys with equal weight. With 14, dividing and multiplying by the reciprocal differ in many
outputs."""
_PROOF_OUTPUTS = 1 << 12
"""The number of outputs to compare per number of keys: every other order that was tried fails more than once
(docs/log/kernels.md)."""


_NEAR_KEYS = 300


class Shape(NamedTuple):
    """The shape of heads that a test applies to."""

    heads: int
    key_heads: int
    size: int


def speed_up(model: PreTrainedModel, pool: SpinningPool, is_measured: bool = True) -> int:
    """Set the kernel of every attention module whose bits it reproduces.

    A pool with its own order instead needs an error no larger than torch's and a higher speed (assumed unless
    `is_measured`). Returns the number of modules that need only one torch thread for one token: those with the kernel,
    and those whose attention by torch has the same bits on one thread. Long computations still use all threads. Takes
    some tens of milliseconds for every distinct shape, and as long once per process.
    """
    if model.config.get_text_config()._attn_implementation != NAME or libm() is None:
        return 0
    library, verdicts, settled = _behind_the_name(), dict[Shape, tuple[bool, bool]](), 0
    for module in model.modules():
        shape = _shape(module, model)
        if shape is None:
            continue
        if shape not in verdicts:
            is_ours = agrees(pool, library, module, shape) or (
                pool.own_order is not None and gains(pool, library, module, shape, is_measured)
            )
            verdicts[shape] = is_ours, is_ours or is_the_same_on_one_thread(library, module, shape)
        is_ours, is_settled = verdicts[shape]
        if is_ours:
            setattr(module, _ATTRIBUTE, OneQuery(pool, shape))
        setattr(module, _THREADS, torch.get_num_threads())
        settled += is_settled
    return settled


def speed_up_prompts(model: PreTrainedModel, pool: SpinningPool, may_measure: bool = True) -> int:
    """Set the kernel for several tokens of every attention module where it is as accurate as torch and faster.

    The bits differ from torch's. If only a measurement can decide about speed, it is made if `may_measure`, else the
    kernel is used. Returns the number of modules with the kernel. Takes some tens of milliseconds for every distinct
    shape.
    """
    is_measured = may_measure and prompt_attention.must_be_measured()
    if model.config.get_text_config()._attn_implementation != NAME or widest() is None:
        return 0
    library, attend = _behind_the_name(), PromptAttention(pool)
    verdicts, adopted = dict[Shape, bool](), 0
    for module in model.modules():
        shape = _shape(module, model)
        if shape is None:
            continue
        if shape not in verdicts:
            verdicts[shape] = prompt_attention.gains(attend, library, module, *shape, is_measured)
        if verdicts[shape]:
            setattr(module, _PROMPTS, SeveralQueries(attend, *shape))
            adopted += 1
    return adopted


def listen_to(rows: RowsOfPass, model: PreTrainedModel) -> bool:
    """Make attention use only a row's own keys in every pass, as if there were no other rows: the last ones, as many as
    `rows` states.

    Returns False for a model whose attention uses neither `sdpa` nor the eager function in its source file.
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
    """Return whether our function replaces the eager function in the source file of this module's class."""
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
    """Return a function that calls `library` row by row; `is_causal`: without a mask, queries do not see later keys."""

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
    """Pad [1, n, heads, d] to [1, tokens, heads, d] with zeros at the beginning."""
    missing = tokens - output.shape[1]
    return functional.pad(output, (0, 0, 0, 0, missing, 0)) if missing else output


class OneQuery:
    """The kernel for one shape of heads."""

    def __init__(self, pool: SpinningPool, shape: Shape) -> None:
        self._pool = pool
        self.shape = shape

    def serves(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Return whether the kernel has been tested for this call."""
        shape = Shape(query.shape[1], keys.shape[1], query.shape[3])
        return shape == self.shape and fits(query, keys, values) and not query.requires_grad

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        return attend(self._pool, query, keys, values, scale)[0]


def kernel_of(module: nn.Module) -> OneQuery | None:
    """Return the kernel of an attention module, or None."""
    return getattr(module, _ATTRIBUTE, None)


def agrees(pool: SpinningPool, library: Attention, module: nn.Module, shape: Shape) -> bool:
    """Return whether the kernel has the bits of torch on one thread, and of `library`, as `module` calls it, on all
    threads."""
    flash = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    if flash is None:
        return False
    found: dict[int, tuple[torch.Tensor, tuple[Any, ...]]] = {}
    with torch.no_grad(), threads(1):
        for query, keys, values, scale in _data(shape):
            if not fits(query, keys, values):
                return False
            ours, sums = attend(pool, query, keys, values, scale)
            theirs, logarithms = flash(query, keys, values, scale=scale)
            if not (same_bits(ours.transpose(1, 2), theirs) and same_bits(_logarithms(sums), logarithms.flatten())):
                return False
            found[keys.shape[2]] = ours, (query, keys, values, scale)
    with torch.no_grad():
        return all(
            same_bits(ours, library(module, *tensors, None, dropout=0.0, scaling=scale)[0])
            for ours, (*tensors, scale) in found.values()
        )


def is_the_same_on_one_thread(library: Attention, module: nn.Module, shape: Shape) -> bool:
    """Return whether torch's bits of one token's attention do not depend on the number of threads."""
    if torch.get_num_threads() == 1:
        return True
    answers = []
    for count in (1, torch.get_num_threads()):
        with torch.no_grad(), threads(count):
            answers.append(
                [library(module, *tensors, None, dropout=0.0, scaling=scale)[0] for *tensors, scale in _data(shape)]
            )
    return all(map(same_bits, *answers))


def gains(pool: SpinningPool, library: Attention, module: nn.Module, shape: Shape, is_measured: bool) -> bool:
    """Return whether the kernel's mean error is no larger than that of `library`, and the kernel is faster."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, shape.heads, 1, shape.size, generator=generator).bfloat16()
    keys, values = torch.randn(2, 1, shape.key_heads, _NEAR_KEYS, shape.size, generator=generator).bfloat16()
    if not fits(query, keys, values):
        return False
    scale, shared = shape.size**-0.5, shape.heads // shape.key_heads
    wide_keys, wide_values = (each.double().repeat_interleave(shared, 1) for each in (keys, values))
    exact = functional.scaled_dot_product_attention(query.double(), wide_keys, wide_values, scale=scale).transpose(1, 2)

    def ours() -> torch.Tensor:
        return attend(pool, query, keys, values, scale)[0]

    def theirs() -> torch.Tensor:
        return library(module, query, keys, values, None, dropout=0.0, scaling=scale)[0]

    with torch.no_grad():
        if not is_no_further(ours(), theirs(), exact):
            return False
        return not is_measured or OWN_ORDER_GAIN * fastest_seconds(ours) < fastest_seconds(theirs)


def _data(shape: Shape) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]]:
    """Yield queries [1, heads, 1, size], K and V [1, key heads, n, size], and scales."""
    heads, key_heads, size = shape
    generator = torch.Generator().manual_seed(0)

    def numbers(*sizes: int) -> torch.Tensor:
        return torch.rand(sizes, generator=generator)

    for n in _PAIRED:
        half = n // 2
        keys, values = -numbers(1, key_heads, half, size), numbers(1, key_heads, half, size) - 0.5
        last = torch.zeros(1, key_heads, 1, size)
        keys = torch.cat([keys, keys.flip(2), last], 2).bfloat16()
        values = torch.cat([values, -values.flip(2), last], 2).bfloat16()
        for _ in range(-(-_PROOF_OUTPUTS // (heads * size))):
            yield numbers(1, heads, 1, size).bfloat16(), keys, values, 4 * math.log(n) / size
    for n in _MIDWAY:
        first = numbers(1, key_heads, 1, size).bfloat16().view(torch.int16)
        values = (first + torch.arange(n, dtype=torch.int16).view(1, 1, n, 1) % 2).view(torch.bfloat16)
        yield torch.zeros(1, heads, 1, size).bfloat16(), torch.zeros_like(values), values, 1.0


def _logarithms(sums: torch.Tensor) -> torch.Tensor:
    """Return the logarithms that torch computes from largest scores and sums of weights [heads, 2], with libm as torch
    does."""
    mathematics = libm()
    assert mathematics is not None
    logarithm = mathematics.logf
    logarithm.argtypes, logarithm.restype = (ctypes.c_float,), ctypes.c_float
    return sums[:, 0] + torch.tensor([logarithm(total) for total in sums[:, 1].tolist()])


def _shape(module: nn.Module, model: PreTrainedModel) -> Shape | None:
    """Return the shape of heads of an attention module of transformers, or None for other modules. Where layers differ
    in the number of heads, modules state it."""
    size = getattr(module, "head_dim", None)
    if size is None or not hasattr(module, "is_causal"):
        return None
    heads = getattr(module, "num_heads", None) or model.config.get_text_config().num_attention_heads
    return Shape(heads, heads // getattr(module, "num_key_value_groups", 1), size)


def _products(query: torch.Tensor, keys: torch.Tensor) -> int:
    return query.numel() * keys.shape[-2]


def _behind_the_name() -> Attention:
    """Return transformers' function after registering ours in its place, once per process."""
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
    """Yield the arguments with which attention of each row would be called alone.

    There is no mask for a window that the row does not fill yet. There is none either for a text that begins with this
    pass, unless its window is shorter, if the function `is_causal` without one.
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
    """Return whether a mask [1, 1, n, n] hides exactly the later keys."""
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
    """Return the module's kernel that supports a call, or None."""
    one: OneQuery | None = getattr(module, _ATTRIBUTE, None)
    if one is not None and mask is None and one.serves(query, key, value):
        return one
    several: SeveralQueries | None = getattr(module, _PROMPTS, None)
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
