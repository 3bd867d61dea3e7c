"""Every format's declaration against decoders of others and some written here by hand.

Would catch: a swapped nibble, a scale of the wrong group, a sign, a block read one byte off.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe.formats.base import Field, Format, Group
from smoe.formats.registry import FORMATS, GGML, OPENAI
from smoe.formats.released import RELEASED
from tests.formats.blocks import by_others, put_scalar, random_rows

every = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
of_ggml = pytest.mark.parametrize("form", GGML.values(), ids=GGML)


@of_ggml
def test_the_block_is_as_large_as_in_ggml(form: Format) -> None:
    assert GGML_QUANT_SIZES[GGMLQuantizationType[form.name]] == (form.numbers, form.nbytes)


@pytest.mark.parametrize("form", (GGML | OPENAI | RELEASED).values(), ids=GGML | OPENAI | RELEASED)
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), spread=st.sampled_from([0.0, 1e-7, 0.01, 100.0]))
def test_numbers_are_those_of_others(form: Format, seed: int, spread: float) -> None:
    """Any codes; scales that are zero, denormal in 16 bits, usual and large."""
    data = random_rows(form, 3, 2 * form.numbers, seed, spread)
    np.testing.assert_array_equal(form.decode(data), by_others(form, data))


def test_q8_0_by_hand() -> None:
    codes = list(range(-128, -96))
    data = np.frombuffer(struct.pack("<e32b", 0.5, *codes), np.uint8)
    assert FORMATS["Q8_0"].decode(data).tolist() == [0.5 * code for code in codes]


def test_q4_k_by_hand() -> None:
    """Eight groups of 32: scale and minimum in six bits each, those of the last four in pieces."""
    scales, minimums = [1, 2, 3, 63, 5, 17, 33, 62], [7, 0, 63, 1, 48, 2, 15, 16]
    packed = [scales[n] | (scales[n + 4] >> 4) << 6 for n in range(4)]
    packed += [minimums[n] | (minimums[n + 4] >> 4) << 6 for n in range(4)]
    packed += [(scales[n + 4] & 15) | (minimums[n + 4] & 15) << 4 for n in range(4)]
    codes = np.random.default_rng(0).integers(0, 16, 256)
    pairs = [codes[64 * (n // 32) + n % 32] | codes[64 * (n // 32) + 32 + n % 32] << 4 for n in range(128)]
    data = np.frombuffer(struct.pack("<2e12B128B", 0.25, 0.5, *packed, *pairs), np.uint8)
    expected = [0.25 * scales[n // 32] * codes[n] - 0.5 * minimums[n // 32] for n in range(256)]
    assert FORMATS["Q4_K"].decode(data).tolist() == expected


def test_pairs_of_mxfp4_by_hand() -> None:
    """Number 2j is in the lower half of byte j, 2j + 1 in the upper one."""
    codes = [2 * n % 16 for n in range(32)]
    data = np.array([128, *(codes[2 * j] | codes[2 * j + 1] << 4 for j in range(16))], np.uint8)
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert FORMATS["MXFP4_PAIRS"].decode(data).tolist() == [2.0 * table[code] for code in codes]


@every
def test_every_number_has_one_place(form: Format) -> None:
    """Runs cover the block once, in whole registers of the widest kind, and stay inside its bytes."""
    runs = [run for group in form.groups for run in group.runs]
    numbers = [run.first + n * run.step for run in runs for n in range(run.numbers)]
    assert sorted(numbers) == list(range(form.numbers))
    assert all(run.numbers % 16 == 0 for run in runs)
    assert len({sum(run.numbers for run in group.runs) for group in form.groups}) == 1, "groups of one size"
    used = [field.byte + run.numbers - 1 for run in runs for field in run.fields if isinstance(field, Field)]
    assert max(used + [f.byte for group in form.groups for f in codes_of(group)]) < form.nbytes


NO_NUMBERS = {
    "E8M0": (255,),
    "F16": (0x7C00, 0x7E00, 0x7FFF, 0xFC00, 0xFE00, 0xFFFF),
    "F32": (0x7F800000, 0xFF800000, 0x7FC00000),
}
LARGEST = {"E8M0": (254,), "F16": (0x7BFF, 0xFBFF), "F32": (0x7F7FFFFF, 0xFF7FFFFF)}


def codes_of(group: Group) -> tuple[Field, ...]:
    return group.scale + group.minimum


@every
def test_scales_that_are_no_numbers_are_found(form: Format) -> None:
    data = random_rows(form, 4, form.numbers, 0)
    assert form.is_finite(data)
    for scalar in form.scalars:
        for is_finite, found in ((True, LARGEST), (False, NO_NUMBERS)):
            for bits in found[scalar.kind]:
                changed = data.copy()
                number = np.frombuffer(bits.to_bytes(scalar.nbytes, "little"), f"V{scalar.nbytes}").reshape(1, 1)
                put_scalar(changed[2:3], scalar, number)
                assert form.is_finite(changed) is is_finite


def test_codes_that_are_no_numbers_are_found() -> None:
    for name, byte in (("FP8", 9), ("NVFP4_64", 4), ("NVFP4_128", 11)):
        form = FORMATS[name]
        for code in (0x7F, 0xFF):
            data = random_rows(form, 4, form.numbers, 0)
            data[2, byte] = code
            assert not form.is_finite(data)
            data[2, byte] = 8
            assert form.is_finite(data)
