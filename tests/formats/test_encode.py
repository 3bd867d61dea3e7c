"""From codes to bytes and back: would catch a code, a scale or a minimum in another's place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe.formats.base import Format
from smoe.formats.encode import Blocks, encode
from smoe.formats.registry import FORMATS, GGML
from tests.formats.blocks import by_gguf

BITS = {"Q8_0": 8, "Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q2_K": 2, "Q3_K": 3, "Q4_K": 4, "Q5_K": 5}
BITS |= {"INT4": 4, "INT3": 3, "INT2": 2}
GROUP_BITS = {"Q2_K": 4, "Q3_K": 6, "Q4_K": 6, "Q5_K": 6, "INT2": 4}


@pytest.mark.parametrize("name", BITS)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_what_is_encoded_is_decoded(name: str, seed: int) -> None:
    """Against plain arithmetic on the codes; ggml's formats by the gguf package's decoder too."""
    form, chance, count = FORMATS[name], np.random.default_rng(seed), 3
    codes = chance.integers(0, 2 ** BITS[name], (count, form.numbers))
    scale, minimum = chance.uniform(0.001, 0.1, (2, count)).astype(np.float16)
    groups = len(form.groups)
    scales, minimums = chance.integers(0, 2 ** GROUP_BITS.get(name, 1), (2, count, groups))
    scales -= form.scale_zero
    has_scales, has_minimums = bool(form.groups[0].scale), bool(form.groups[0].minimum)
    blocks = Blocks(codes, scale, minimum, scales if has_scales else None, minimums if has_minimums else None)
    data = encode(form, blocks)
    np.testing.assert_allclose(form.decode(data), meant(form, blocks), rtol=1e-6, atol=1e-9)
    if name in GGML:
        np.testing.assert_allclose(by_gguf(form, data), meant(form, blocks), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", BITS)
def test_the_largest_code_is_the_declarations(name: str) -> None:
    assert FORMATS[name].most == 2 ** BITS[name] - 1


def meant(form: Format, blocks: Blocks) -> np.ndarray:
    codes = blocks.codes.astype(np.uint8).view(np.int8) if form.is_signed else blocks.codes.astype(np.int64) - form.zero
    per_group = form.numbers // len(form.groups)
    gain = blocks.scale.astype(np.float64)[:, None]
    if blocks.group_scales is not None:
        gain = gain * np.repeat(blocks.group_scales, per_group, axis=1)
    found = gain * codes
    if form.minimum is not None:
        assert blocks.minimum is not None
        offset = form.minimum.factor * blocks.minimum.astype(np.float64)[:, None]
        if blocks.group_minimums is not None:
            offset = offset * np.repeat(blocks.group_minimums, per_group, axis=1)
        found = found - offset
    return found


def test_the_block_of_two_bits_by_hand() -> None:
    """docs/formats.md, byte by byte."""
    codes = np.arange(64).reshape(4, 16) % 4
    data = [0x00, 0x38, 0x00, 0x34]  # 0.5, 0.25
    data += [n | (15 - n) << 4 for n in (1, 2, 3, 15)]
    data += [int(sum(codes[n][i] << 2 * n for n in range(4))) for i in range(16)]
    scales = [1, 2, 3, 15]
    expected = [0.5 * scales[n] * codes[n][i] - 0.25 * (15 - scales[n]) for n in range(4) for i in range(16)]
    assert FORMATS["INT2"].decode(np.array([data], np.uint8))[0].tolist() == expected


def test_the_block_of_three_bits_by_hand() -> None:
    """docs/formats.md, byte by byte: numbers 16 apart in one byte, their highest bits eight neighbours to a byte."""
    codes = [(5 * n + n // 8) % 8 for n in range(64)]
    data = [0x00, 0x38, 0x00, 0xB4]  # 0.5, -0.25
    data += [sum((codes[16 * n + i] % 4) << 2 * n for n in range(4)) for i in range(16)]
    data += [sum((codes[8 * n + i] >> 2) << i for i in range(8)) for n in range(8)]
    assert FORMATS["INT3"].decode(np.array([data], np.uint8))[0].tolist() == [0.5 * code - 0.25 for code in codes]


def test_the_block_of_four_bits_by_hand() -> None:
    data = [0x00, 0x38, 0x00, 0xB4] + [i % 16 | (15 - i % 16) << 4 for i in range(32)]  # 0.5, -0.25
    expected = [0.5 * (i % 16) - 0.25 for i in range(32)] + [0.5 * (15 - i % 16) - 0.25 for i in range(32)]
    assert FORMATS["INT4"].decode(np.array([data], np.uint8))[0].tolist() == expected
