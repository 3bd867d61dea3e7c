"""Attention of one token by our kernel, behind the library's: bit by bit, and left to the library where it must be.

Would catch another order of any sum, a tail or a block that is cut wrongly, strides that are ignored, a head that takes
its neighbour's keys, a proof that proves nothing, a mask or a batch that the kernel does not know.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from smoe.fastpath import attention, attention_proof, linear
from smoe.fastpath.attention import OneQuery, Shape, agrees
from smoe.fastpath.attention_proof import is_accurate
from smoe.kernels import attention as kernel
from smoe.kernels import attention_code, scores, softmax, weighted_values
from smoe.kernels.attention import attend, fits
from smoe.kernels.isa import widest
from smoe.kernels.spinning_pool import SpinningPool
from smoe.kernels.threads import threads
from smoe.kernels.verdicts import Verdicts
from tests import gguf_converted, oracle, promised
from tests.fastpath.layers import MODELS, model_of
from tests.gguf_windowed import LAGUNA

LENGTHS = (1, 2, 3, 4, 15, 16, 17, 31, 32, 33, 511, 512, 513, 1023, 1025)
SHAPE = Shape(heads=4, key_heads=2, size=64)
ORDER = "the order of torch's sums in attention"


def tensors(shape: Shape, n: int, seed: int = 0, spread: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Query, and K and V as views into a longer cache."""
    generator = torch.Generator().manual_seed(seed)
    heads, key_heads, size = shape
    query = (torch.randn(1, heads, 1, size, generator=generator) * spread).bfloat16()
    cache = torch.randn(2, 1, key_heads, n + 5, size, generator=generator).bfloat16()
    return query, cache[0, :, :, 2 : n + 2], cache[1, :, :, :n]


def theirs(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    return scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=True).transpose(1, 2)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Zeros of both signs apart."""
    return x.contiguous().view(torch.int16)


def caller(shape: Shape) -> nn.Module:
    """A module that calls the library's function."""
    module = nn.Module()
    module.num_key_value_groups = shape.heads // shape.key_heads  # type: ignore[assignment]
    return module


def test_heads_are_counted_layer_by_layer() -> None:
    """Laguna's: their number in the configuration is that of layers without a window."""
    model = gguf_converted.make(LAGUNA)
    shapes = [attention._shape(layer.self_attn, model) for layer in model.model.layers]
    assert shapes == [Shape(4, 2, 16), *[Shape(2, 2, 16)] * 3]


@pytest.fixture
def library(pool: SpinningPool) -> attention.Attention:
    """The library's function, where the kernel agrees with it."""
    found = attention._behind_the_name()
    promised.needs(agrees(pool, found, caller(SHAPE), SHAPE), ORDER)
    return found


@pytest.fixture(scope="module")
def single() -> SpinningPool:
    """One thread, for tests that draw examples."""
    promised.needs_machine_code()
    pool = SpinningPool(1)
    promised.needs(agrees(pool, attention._behind_the_name(), caller(SHAPE), SHAPE), ORDER)
    return pool


def assert_same_or_declined(pool: SpinningPool, shape: Shape, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Zeros of both signs apart. Where bits differ, the proof must say so for heads of this shape."""
    is_equal = torch.equal(bits(ours), bits(theirs))
    promised.holds(
        is_equal, lambda: agrees(pool, attention._behind_the_name(), caller(shape), shape), f"{ORDER} {shape}"
    )


def test_a_less_accurate_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a test of accuracy that every kernel passes."""
    promised.needs(widest() is not None, "machine code of our own")
    library, module = attention._behind_the_name(), caller(SHAPE)
    with SpinningPool(1, in_own_order=True) as own:
        assert is_accurate(own, library, module, SHAPE)
        monkeypatch.setattr(attention_proof, "attend", lambda *given: tuple(1.01 * each for each in attend(*given)))
        assert not is_accurate(own, library, module, SHAPE)


@pytest.mark.parametrize(("size", "is_asked"), [(64, True), (80, False)])
@pytest.mark.parametrize("agrees_there", [True, False])
def test_agreement_is_asked_of_sizes_that_the_kernel_has(
    size: int, is_asked: bool, agrees_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    promised.needs(attention.libm() is not None, "glibc")
    asked: list[Shape] = []
    monkeypatch.setattr(attention, "agrees", lambda pool, library, module, shape: asked.append(shape) or agrees_there)
    config, make, more = MODELS["norms of heads"]
    model = model_of(config, make, more | {"head_dim": size})
    with SpinningPool(1, in_own_order=True) as own:
        found = attention.agrees_everywhere(model, own, Verdicts())
    assert asked == [Shape(4, 2, size)] * is_asked
    assert found == (agrees_there or not is_asked)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(16, 4, 128), (6, 2, 32), (4, 4, 96), (5, 1, 256)])
def test_the_bits_are_the_librarys(heads: int, key_heads: int, size: int, n: int, pool: SpinningPool) -> None:
    shape = Shape(heads, key_heads, size)
    query, keys, values = tensors(shape, n)
    ours, _ = attend(pool, query, keys, values, size**-0.5)
    assert_same_or_declined(pool, shape, ours, theirs(query, keys, values, size**-0.5))


@settings(deadline=None, max_examples=60)
@given(
    key_heads=st.integers(1, 4),
    shared=st.integers(1, 9),
    size=st.sampled_from([32, 64, 96, 128, 192, 256]),
    n=st.one_of(st.integers(1, 80), st.integers(500, 560)),
    spread=st.sampled_from([0.0, 0.1, 1.0, 10.0, 300.0]),
    scale=st.sampled_from([0.01, 0.125, 1.0, 3.0]),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_any_scores(
    single: SpinningPool, key_heads: int, shared: int, size: int, n: int, spread: float, scale: float, seed: int
) -> None:
    """Equal scores, moderate ones, ones of which all but one vanish."""
    shape = Shape(key_heads * shared, key_heads, size)
    query, keys, values = tensors(shape, n, seed, spread)
    ours, _ = attend(single, query, keys, values, scale)
    assert_same_or_declined(single, shape, ours, theirs(query, keys, values, scale))


@pytest.mark.usefixtures("library")
def test_strides_are_followed(pool: SpinningPool) -> None:
    """Keys side by side for all heads, values head by head, the query every second head of a larger one."""
    heads, key_heads, size = SHAPE
    query = torch.randn(1, 2 * heads, 1, size).bfloat16()[:, ::2]
    keys = torch.randn(1, 70, key_heads, size).bfloat16().transpose(1, 2)
    values = torch.randn(1, key_heads, 140, size).bfloat16()[:, :, ::2]
    ours, _ = attend(pool, query, keys, values, 0.1)
    assert torch.equal(bits(ours), bits(theirs(query, keys, values, 0.1)))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("begin", [1, 3, 17])
def test_addresses_may_be_odd(begin: int, pool: SpinningPool) -> None:
    bank = torch.randn(begin + 2 * 300 * 64).bfloat16()[begin:]
    query, keys, values = (
        bank[: 4 * 64].view(1, 4, 1, 64),
        bank.view(2, 1, 2, 150, 64)[0],
        bank.view(2, 1, 2, 150, 64)[1],
    )
    ours, _ = attend(pool, query, keys, values, 0.125)
    assert torch.equal(bits(ours), bits(theirs(query, keys, values, 0.125)))


@pytest.mark.usefixtures("library")
def test_the_sums_are_the_librarys(pool: SpinningPool) -> None:
    query, keys, values = tensors(SHAPE, 600)
    _, sums = attend(pool, query, keys, values, 0.125)
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, scale=0.125)
    assert torch.equal(attention_proof._logarithms(sums), found[1].flatten())


def four_in_pairs(code: Any, old: Any, p: Any, v: Any) -> Any:
    first, second = (code.fma(p[n + 1], v[n + 1], code.build.fmul(p[n], v[n])) for n in (0, 2))
    return code.build.fadd(old, code.build.fadd(first, second))


def from_first(code: Any, begin: Any, end: Any, body: Callable[[Any], None]) -> None:
    code.loop(begin, end, 1, [], lambda key, _: body(key) or [])


def one_sum(code: Any, sums: Any, exponentials: Any) -> Any:
    return [sums[0], code.build.fadd(sums[1], exponentials)]


def rounded_product(code: Any, factor: Any, before: Any, added: Any) -> Any:
    return code.build.fadd(code.build.fmul(factor, before), added)


def divided(code: Any, total: Any) -> Callable[[Any], Any]:
    every = code.splat(total, 16)
    return lambda register: code.build.fdiv(register, every)


def added_with(order: Callable[..., Any]) -> Callable[..., Any]:
    return lambda code, s0, s2, s1, s3: order(code.build.fadd, s0, s1, s2, s3)


WRONG: dict[str, tuple[ModuleType, str, Callable[..., Any]]] = {
    "q.k: (s0 + s1) + (s2 + s3)": (scores, "_added", added_with(lambda add, a, b, c, d: add(add(a, b), add(c, d)))),
    "q.k: ((s0 + s2) + s1) + s3": (scores, "_added", added_with(lambda add, a, b, c, d: add(add(add(a, c), b), d))),
    "p.v: (p0 v0 + p1 v1) + (p2 v2 + p3 v3)": (weighted_values, "_with_four", four_in_pairs),
    "p.v: the last keys first one first": (weighted_values, "_from_last", from_first),
    "exp: one running sum instead of two": (softmax, "_alternating", one_sum),
    "sum: product with the factor rounded": (softmax, "_rescaled", rounded_product),
    "out: divided by the sum": (weighted_values, "_divided_by", divided),
}
"""What makes a part of the kernel, and what is put in its place, each with an order that is as good as torch's."""


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_order_is_noticed(
    name: str, pool: SpinningPool, library: attention.Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = kernel.source()
    monkeypatch.setattr(*WRONG[name])
    text = kernel.source()
    assert text != right
    compiled_anew(monkeypatch, text)
    assert not agrees(pool, library, caller(SHAPE), SHAPE)


def test_wrong_blocks_are_noticed(
    pool: SpinningPool, library: attention.Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_code, "BLOCK", 1024)
    monkeypatch.setattr(attention_code, "_ROW", 1040)
    compiled_anew(monkeypatch, kernel.source())
    assert not agrees(pool, library, caller(SHAPE), SHAPE)


def compiled_anew(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(kernel, "source", lambda: text)
    made = kernel.functions.__wrapped__()
    monkeypatch.setattr(kernel, "functions", lambda: made)


def test_another_library_is_noticed(pool: SpinningPool, library: attention.Attention) -> None:
    """What stands behind the name may not be torch's attention at all."""

    def other(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return library(*args, **kwargs)[0].nextafter(torch.tensor(9.0)), None

    assert not agrees(pool, other, caller(SHAPE), SHAPE)


def test_only_what_was_proven_is_served(pool: SpinningPool) -> None:
    query, keys, values = tensors(SHAPE, 9)
    ours = OneQuery(pool, SHAPE)
    assert ours.serves(query, keys, values)
    assert not ours.serves(query[:, :2], keys[:, :1], values[:, :1])  # another shape
    assert not ours.serves(query.float(), keys.float(), values.float())
    assert not ours.serves(query.requires_grad_(), keys, values)


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q.expand(2, -1, -1, -1), k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1)),  # two rows
        lambda q, k, v: (q.expand(-1, -1, 3, -1), k, v),  # three tokens
        lambda q, k, v: (q, k, v[..., :32]),  # values of another size than keys
        lambda q, k, v: (q[..., :48], k[..., :48], v[..., :48]),  # not a whole tile
        lambda q, k, v: (q, k.transpose(2, 3).contiguous().transpose(2, 3), v),  # numbers of a key apart
        lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]),
        lambda q, k, v: (q.half(), k.half(), v.half()),
        lambda q, k, v: (q.to("meta"), k.to("meta"), v.to("meta")),
    ],
)
def test_other_tensors_are_left_to_the_library(change: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    query, keys, values = tensors(SHAPE, 64)
    assert fits(query, keys, values)
    assert not fits(*change(query, keys, values))


class Counting(OneQuery):
    """How often the kernel was asked."""

    calls = 0

    def __call__(self, *args: Any) -> torch.Tensor:
        type(self).calls += 1
        return super().__call__(*args)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> type[Counting]:
    monkeypatch.setattr(attention, "OneQuery", Counting)
    Counting.calls = 0
    return Counting


@pytest.mark.usefixtures("library")
def test_the_library_keeps_what_the_kernel_does_not_know(pool: SpinningPool, counting: type[Counting]) -> None:
    module, (query, keys, values) = caller(SHAPE), tensors(SHAPE, 40)
    module.one_query = attention.OneQuery(pool, SHAPE)  # type: ignore[assignment]
    module.is_causal = True  # type: ignore[assignment]
    registered = attention.ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert torch.equal(registered(module, query, keys, values, None, scaling=0.1)[0], theirs(query, keys, values, 0.1))
    assert counting.calls == 1
    mask = torch.zeros(1, 1, 1, 40, dtype=torch.bool)
    mask[..., ::2] = True
    for options in ({"attention_mask": mask}, {"attention_mask": None, "position_bias": mask.bfloat16()}):
        out, _ = registered(module, query, keys, values, scaling=0.1, **options)
        assert not torch.equal(out, theirs(query, keys, values, 0.1))
    registered(module, query, keys, values, None)  # no scale given: the library's own
    registered(caller(SHAPE), query, keys, values, None, scaling=0.1)  # a module of another model
    assert counting.calls == 1


def attending(model: PreTrainedModel) -> int:
    return sum(hasattr(module, "one_query") for module in model.modules())


FAMILIES = ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "granitemoe", "dots1"]
WIDE = {"hidden_size": 256, "head_dim": 64}


@pytest.mark.usefixtures("each_part_alone")
@pytest.mark.parametrize("family", FAMILIES)
def test_whole_models_are_exact(
    family: str, counting: type[Counting], toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel]
) -> None:
    folder = toy(family, dtype=torch.bfloat16, **WIDE)
    model = open_model(folder, "minimum", kernels="native")
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    promised.needs(attending(model) == model.config.num_hidden_layers, ORDER)
    assert counting.calls >= (oracle.NEW_TOKENS - 1) * model.config.num_hidden_layers, (
        "attention was left to the library"
    )


def test_a_look_ahead_may_run_through_it(
    counting: type[Counting], toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel]
) -> None:
    folder = toy("qwen3_moe", dtype=torch.bfloat16, **WIDE)
    model = open_model(folder, "minimum", kernels="native", prefetch="look-ahead")
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    promised.needs(counting.calls > 0, ORDER)


def test_another_attention_is_kept(toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel]) -> None:
    folder = toy("qwen3_moe", dtype=torch.bfloat16, **WIDE)
    model = open_model(folder, "full", kernels="native")
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    library = oracle.reference(folder)
    library.set_attn_implementation("eager")
    oracle.assert_same_steps(oracle.greedy(model), oracle.greedy(library))


def test_the_kernel_can_be_declined(toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel]) -> None:
    model = open_model(toy("qwen3_moe", dtype=torch.bfloat16, **WIDE), "full", kernels="torch")
    assert attending(model) == 0


def test_a_kernel_that_disagrees_is_not_used(
    monkeypatch: pytest.MonkeyPatch, toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel]
) -> None:
    monkeypatch.setattr(attention, "agrees", lambda *_: False)
    folder = toy("qwen3_moe", dtype=torch.bfloat16, **WIDE)
    model = open_model(folder, "full", kernels="native")
    assert attending(model) == 0
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))


def test_units_have_whole_groups() -> None:
    """Enough units for all threads, and never a part of one head's work."""
    assert kernel.group_of(4, 16, 1) == 4
    assert kernel.group_of(4, 16, 4) == 2
    assert kernel.group_of(4, 16, 64) == 1
    assert kernel.group_of(48, 48, 1) == 16
    assert math.gcd(kernel.group_of(6, 6, 2), 6) == kernel.group_of(6, 6, 2)


@pytest.mark.parametrize(
    ("keys", "masked", "is_known", "expected"),
    [(8, False, True, 1), (5000, False, True, 3), (8, True, True, 3), (5000, True, False, 1)],
)
def test_what_the_library_keeps_goes_on_one_thread_where_that_is_short_and_proven(
    keys: int, masked: bool, is_known: bool, expected: int
) -> None:
    """Within a step the library has one thread; a mask was in no proof."""
    counts: list[int] = []

    def library(module, query, key, value, attention_mask, **kwargs):
        counts.append(torch.get_num_threads())
        return query, None

    module, query, key = nn.Module(), torch.zeros(1, 4, 1, 64), torch.zeros(1, 4, keys, 64)
    if is_known:
        module.library_threads = 3
    with threads(1):
        attention._standing_before(library)(module, query, key, key, torch.zeros(1) if masked else None, scaling=1.0)
    assert counts == [expected]


def test_without_the_kernel_a_token_still_needs_one_thread_only(
    monkeypatch: pytest.MonkeyPatch, toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel]
) -> None:
    """As on CPUs with AMX, where torch attends in an order of its own: would catch threads that hold up ours."""
    monkeypatch.setattr(attention, "agrees", lambda *_: False)
    monkeypatch.setattr(linear, "_faster", lambda pool, kinds, parts: parts)
    folder = toy("qwen3_moe", dtype=torch.bfloat16, **WIDE)
    with threads(2):
        model = open_model(folder, "full", kernels="native")
        assert attending(model) == 0
        oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
        promised.needs(model.offload.arithmetic == "native", "torch's order for these experts")
        promised.needs(model.offload.passes._leaves_little, "torch's order for these layers")


def test_sums_do_not_take_the_processs_default_dtype(pool: SpinningPool) -> None:
    """Another thread may be building a model: too small a tensor would be written past its end."""
    given = (*tensors(SHAPE, 33), 0.125)
    expected = attend(pool, *given)[1]
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = attend(pool, *given)[1]
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype is torch.float32 and torch.equal(found, expected)
