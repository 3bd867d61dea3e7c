"""Attention of single tokens by our kernel, behind the library's own `sdpa`.

Decoder layers look their attention up by name. Some families compare the name with "sdpa" and take another way under
any other, and masks are made by it too, so the name stays: what is registered under it asks the module that calls
whether it carries a kernel, and is the library's function for all that do not, and for all but one token of one row
without a mask.

A wrong order of a sum shows in very few rounded outputs, so the proof is made of data in which it shows:

* every key comes twice, with opposite values: what is left of an output is the rounding of its sums;
* the last key has the largest score, zero, and weighs as much as all others: the logarithm of the sum of weights, which
  torch returns too, has hardly fewer digits than the sum;
* few keys of equal score, values one step apart: outputs lie midway between two bf16 numbers.
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
"""Where a module carries its kernel for one token, ..."""
_PROMPTS = "several_queries"
"""... that for several, ..."""
_THREADS = "library_threads"
"""... and the number of threads that the library has for what one of them takes long for."""
_ROWS = "rows_of_pass"
"""Where a module finds how long the texts of a pass are."""
_EAGER = "eager_attention_forward"
_MOST_ALONE = 1 << 20
"""Products of a query's with a key's number that one thread of the library takes some 1 ms for: for fewer, waking the
others takes longer, and once awake they hold up our threads."""
_UNDERSTOOD = {"module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal", "kwargs"}
"""What the library's function takes that means nothing else for one token without a mask."""
_CHANGING = ("softcap", "s_aux", "output_attentions")
"""What it is handed by other families without naming it."""
_PAIRED = (7, 15, 37, 90, 250, 515, 701)
"""Keys of the proof: below and above registers of 16 and 32, blocks of 512, whole ones and every remainder of 4."""
_MIDWAY = (6, 14)
"""Keys of equal weight, even numbers. By 14, dividing and multiplying by the reciprocal differ in many outputs."""
_PROOF_OUTPUTS = 1 << 12
"""For each number of keys: enough for every other order that was tried to fail more than once (docs/log/kernels.md)."""


_NEAR_KEYS = 300


class Shape(NamedTuple):
    """What a proof is good for."""

    heads: int
    key_heads: int
    size: int


def speed_up(model: PreTrainedModel, pool: SpinningPool, is_measured: bool = True) -> int:
    """Give every attention module whose bits the kernel reproduces the kernel. A pool that multiplies in its own order
    need not have the bits: as near to the exact numbers as the library, and faster (unless `is_measured`, that is taken
    for granted), is enough.

    Returns how many modules need the library's threads no longer for one token: those with the kernel, and those whose
    attention by the library has the same bits on one thread. What is long for one thread still goes on all.

    Takes some tens of milliseconds for every distinct shape, and as long once a process.
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
    """Give every attention module the kernel for several tokens, where that is as near to the exact numbers as the
    library, and faster: where time must show that, only if it does, or unless `may_measure`. Its bits are not the
    library's.

    Returns how many modules have it. Takes some tens of milliseconds for every distinct shape.
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
    """Have attention look, for every row of a pass, at that row's own keys alone, as if no other row were there: the
    last ones, so many as `rows` says. False for a model whose attention asks neither for `sdpa` nor for what its own
    file calls eager."""
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
    """Whether ours stands before the function that the file of this module's class has."""
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
    """`is_causal`: without a mask, several queries do not see what comes later."""

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
    """[1, n, heads, d] -> [1, tokens, heads, d], the last n of which are given."""
    missing = tokens - output.shape[1]
    return functional.pad(output, (0, 0, 0, 0, missing, 0)) if missing else output


class OneQuery:
    """The kernel for one shape of heads."""

    def __init__(self, pool: SpinningPool, shape: Shape) -> None:
        self._pool = pool
        self.shape = shape

    def serves(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether this is what was proven."""
        shape = Shape(query.shape[1], keys.shape[1], query.shape[3])
        return shape == self.shape and fits(query, keys, values) and not query.requires_grad

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        return attend(self._pool, query, keys, values, scale)[0]


def kernel_of(module: nn.Module) -> OneQuery | None:
    """What an attention module carries, where it does."""
    return getattr(module, _ATTRIBUTE, None)


def agrees(pool: SpinningPool, library: Attention, module: nn.Module, shape: Shape) -> bool:
    """Whether the kernel's bits are torch's on one thread, and those of `library`, as `module` calls it, on all."""
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
    """Whether the library's bits of one token's attention do not depend on its number of threads."""
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
    """Whether the kernel is no further from the exact attention than `library` is, on average, and faster."""
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
    """Queries [1, heads, 1, size], K and V [1, key heads, n, size], scales."""
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
    """What torch makes of the largest scores and the sums of weights [heads, 2], by libm as torch does."""
    mathematics = libm()
    assert mathematics is not None
    logarithm = mathematics.logf
    logarithm.argtypes, logarithm.restype = (ctypes.c_float,), ctypes.c_float
    return sums[:, 0] + torch.tensor([logarithm(total) for total in sums[:, 1].tolist()])


def _shape(module: nn.Module, model: PreTrainedModel) -> Shape | None:
    """Of an attention module as the library writes them; None for all others."""
    size, heads = getattr(module, "head_dim", None), model.config.get_text_config().num_attention_heads
    if size is None or not hasattr(module, "is_causal"):
        return None
    return Shape(heads, heads // getattr(module, "num_key_value_groups", 1), size)


def _products(query: torch.Tensor, keys: torch.Tensor) -> int:
    return query.numel() * keys.shape[-2]


def _behind_the_name() -> Attention:
    """The library's function; from now on ours stands before it, once a process."""
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
    """What each row would be asked alone. A window that it does not fill yet is no window, and has no mask; neither
    has a text that begins with this pass, unless its window is shorter, where the function `is_causal` without one."""
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
    """Whether a mask [1, 1, n, n] hides what comes later, and nothing else."""
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
    """Which of a module's kernels, if any, knows what is asked."""
    one: OneQuery | None = getattr(module, _ATTRIBUTE, None)
    if one is not None and mask is None and one.serves(query, key, value):
        return one
    several: SeveralQueries | None = getattr(module, _PROMPTS, None)
    if several is None:
        return None
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal  # as the library has it
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
