"""The proof at load of products with quantised matrices, on right and on wrong ones.

Would catch: a proof that takes what activations lose in 8 bits for the kernel's own error, or the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from smoe.bounds import BF16, INT8
from smoe.formats.base import Format
from smoe.formats.registry import FORMATS
from smoe.kernels import proof
from smoe.kernels.isa import widest
from smoe.kernels.matrix import Matrix, products_of
from smoe.kernels.proof import is_as_near
from smoe.kernels.spinning_pool import SpinningPool, is_supported
from tests.formats.blocks import random_rows

pytestmark = pytest.mark.skipif(widest(INT8) is None, reason="this CPU has no instruction set that kernels are for")
OUTPUTS, COLUMNS = 64, 512


@pytest.fixture(scope="module")
def pool() -> Iterator[SpinningPool]:
    with SpinningPool(2, has_bf16=is_supported()) as made:
        yield made


def is_proven(pool: SpinningPool, form: Format, activations: str) -> bool:
    data = torch.from_numpy(random_rows(form, OUTPUTS, COLUMNS, seed=2))
    return is_as_near(pool, Matrix(data.data_ptr(), OUTPUTS, COLUMNS, products_of(form, activations)), form, data)


@pytest.mark.parametrize("activations", [BF16, INT8])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_right_is_found_right(pool: SpinningPool, name: str, activations: str) -> None:
    assert is_proven(pool, FORMATS[name], activations)


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "Q6_K", "INT4"])
def test_other_activations_than_meant_are_noticed(
    pool: SpinningPool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "in_8_bits", lambda form, x: x.astype(float))
    assert not is_proven(pool, FORMATS[name], INT8)
