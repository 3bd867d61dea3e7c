"""Attention of a prompt in tiles, on every instruction set that this CPU has, against float64 and torch.

Would catch: a tile, a block of keys or one of rows that is cut wrongly, a head that takes its neighbour's keys, a row
that sees a later key, strides that are ignored, bits that hang on other rows, on pieces or on who computes a unit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from smoe.kernels.isa import ISAS, Isa, widest
from smoe.kernels.prompt_attention import PromptAttention, fits
from smoe.kernels.spinning_pool import SpinningPool, is_supported

pytestmark = pytest.mark.skipif(widest() is None, reason="needs llvmlite and AVX2")
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
LEEWAY = 1.05
"""Both errors are nearly all rounding of the result to bf16."""


@pytest.fixture(scope="module")
def pool() -> Iterator[SpinningPool]:
    with SpinningPool(2, has_bf16=is_supported()) as made:
        yield made


@functools.cache
def single() -> SpinningPool:
    """One thread, for tests that draw examples."""
    return SpinningPool(1, has_bf16=is_supported())


def tensors(heads: int, key_heads: int, size: int, tokens: int, keys: int, spread: float = 1.0) -> Tensors:
    """Queries, and K and V as views into a longer cache."""
    generator = torch.Generator().manual_seed(tokens + keys)
    query = (torch.randn(1, heads, tokens, size, generator=generator) * spread).bfloat16()
    cache = torch.randn(2, 1, key_heads, keys + 5, size, generator=generator).bfloat16()
    cache[1, :, :, keys:] = float("nan")  # no kernel may read what lies behind the last key
    return query, cache[0, :, :, 5:], cache[1, :, :, :keys]


def library(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    tokens, count, shared = query.shape[2], keys.shape[2], query.shape[1] // keys.shape[1]
    mask = torch.ones(tokens, count, dtype=torch.bool).tril(count - tokens)
    wide = (each.repeat_interleave(shared, 1) for each in (keys, values))
    return scaled_dot_product_attention(query, *wide, attn_mask=mask, scale=scale).transpose(1, 2)


def exact(given: Sequence[torch.Tensor], scale: float) -> torch.Tensor:
    query, keys, values = (each.double() for each in given)
    return library(query, keys, values, scale)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).square().mean().sqrt())


def assert_near(ours: torch.Tensor, given: Tensors, scale: float) -> None:
    wanted = exact(given, scale)
    assert error(ours, wanted) <= LEEWAY * error(library(*given, scale), wanted)
    assert float((ours.double() - wanted).abs().max()) <= 2.0**-7 * float(given[2].abs().max())


@pytest.mark.parametrize(
    ("tokens", "keys"),
    [(2, 2), (3, 400), (7, 127), (16, 128), (17, 17), (48, 129), (97, 256), (300, 300), (41, 600)],
)
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(8, 2, 128), (3, 3, 64), (5, 1, 32)])
def test_errors_are_no_larger_than_the_librarys(
    isa: Isa, pool: SpinningPool, heads: int, key_heads: int, size: int, tokens: int, keys: int
) -> None:
    given = tensors(heads, key_heads, size, tokens, keys)
    assert_near(PromptAttention(pool, isa)(*given, size**-0.5), given, size**-0.5)


@pytest.mark.parametrize("size", [96, 256])
def test_other_sizes_of_heads(isa: Isa, pool: SpinningPool, size: int) -> None:
    given = tensors(4, 2, size, 40, 140)
    assert_near(PromptAttention(pool, isa)(*given, size**-0.5), given, size**-0.5)


@settings(deadline=None, max_examples=40)
@given(
    key_heads=st.integers(1, 3),
    shared=st.integers(1, 9),
    size=st.sampled_from([32, 64, 128]),
    tokens=st.integers(1, 150),
    past=st.one_of(st.just(0), st.integers(0, 150)),
    spread=st.sampled_from([0.0, 0.1, 1.0, 30.0, 3e4]),
    scale=st.sampled_from([0.01, 0.125, 1.0]),
)
def test_any_shape_and_any_scores(
    key_heads: int, shared: int, size: int, tokens: int, past: int, spread: float, scale: float
) -> None:
    """Equal scores, moderate ones, ones of which all but one vanish, on every instruction set. Which of two keys wins
    may hang on how large scores are rounded; the value of either is then right."""
    given = tensors(key_heads * shared, key_heads, size, tokens, past + tokens, spread)
    wanted = exact(given, scale)
    for isa in (each for each in ISAS if each.is_here):
        ours = PromptAttention(single(), isa)(*given, scale)
        bound = 1e-4 * spread * scale * size + 2.0**-8  # what rounding a score may change of a weight, and the result's
        assert bool(((ours.double() - wanted).abs() <= bound * float(given[2].abs().max())).all())


@pytest.mark.parametrize("piece", [2, 17, 64])
def test_pieces_have_the_bits_of_the_whole(isa: Isa, pool: SpinningPool, piece: int) -> None:
    """So a text does not depend on the piece that a budget allows."""
    query, keys, values = tensors(8, 2, 64, 256, 256)
    attend = PromptAttention(pool, isa)
    whole = attend(query, keys, values, 0.125)
    for begin in range(0, 256, piece):
        end = min(256, begin + piece)
        part = attend(query[:, :, begin:end], keys[:, :, :end], values[:, :, :end], 0.125)
        assert torch.equal(part, whole[:, begin:end]), begin


def test_threads_do_not_change_bits(isa: Isa, pool: SpinningPool) -> None:
    given = tensors(8, 2, 64, 200, 333)
    one = PromptAttention(single(), isa)(*given, 0.125)
    with SpinningPool(5, has_bf16=is_supported()) as five:
        for threads in (pool, five):
            assert torch.equal(PromptAttention(threads, isa)(*given, 0.125), one)


def test_later_keys_do_not_count(isa: Isa, pool: SpinningPool) -> None:
    query, keys, values = tensors(4, 2, 64, 150, 150)
    attend = PromptAttention(pool, isa)
    before = attend(query, keys, values, 0.125)
    keys[:, :, 70:], values[:, :, 70:] = 100.0, -100.0
    after = attend(query, keys, values, 0.125)
    assert torch.equal(before[:, :70], after[:, :70])
    assert not torch.equal(before[:, 70], after[:, 70])


def test_what_is_no_number_stays_so(isa: Isa, pool: SpinningPool) -> None:
    """In the row of that query alone, and in those that see that key."""
    query, keys, values = tensors(4, 2, 64, 150, 150)
    query[0, 1, 20, 3] = float("nan")
    keys[0, 1, 130, 5] = float("nan")
    ours = PromptAttention(pool, isa)(query, keys, values, 0.125)[0].isnan().all(-1)
    wanted = torch.zeros(150, 4, dtype=torch.bool)
    wanted[20, 1], wanted[130:, 2:] = True, True
    assert torch.equal(ours, wanted)


def test_strides_are_followed(isa: Isa, pool: SpinningPool) -> None:
    """Keys side by side for all heads, every second value, the queries of every second head of a larger one."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 70, 8, 64, generator=generator).bfloat16().transpose(1, 2)[:, ::2]
    keys = torch.randn(1, 70, 2, 64, generator=generator).bfloat16().transpose(1, 2)
    values = torch.randn(1, 2, 140, 64, generator=generator).bfloat16()[:, :, ::2]
    ours = PromptAttention(pool, isa)(query, keys, values, 0.1)
    plain = PromptAttention(pool, isa)(*(each.contiguous() for each in (query, keys, values)), 0.1)
    assert torch.equal(ours, plain)
    assert_near(ours, (query, keys, values), 0.1)


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q.expand(2, -1, -1, -1), k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1)),  # two texts
        lambda q, k, v: (q, k[:, :, :8], v[:, :, :8]),  # fewer keys than queries
        lambda q, k, v: (q, k, v[..., :32]),  # values of another size than keys
        lambda q, k, v: (q[..., :48], k[..., :48], v[..., :48]),  # not a whole tile
        lambda q, k, v: (q, k.transpose(2, 3).contiguous().transpose(2, 3), v),  # numbers of a key apart
        lambda q, k, v: (q.half(), k.half(), v.half()),
        lambda q, k, v: (q.to("meta"), k.to("meta"), v.to("meta")),
    ],
)
def test_other_tensors_do_not_fit(change: Callable[..., Tensors]) -> None:
    given = tensors(4, 2, 64, 9, 64)
    assert fits(*given)
    assert not fits(*change(*given))
