"""Weighted sums of a prompt's experts, some of which another compute unit has computed.

Would catch: a sum that depends on where an expert is computed, outputs added in another order than that of the experts,
lists of rows without room for added ones, quantised rows taken for bf16 because there are many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from smoe.bounds import BF16, INT8
from smoe.formats.registry import FORMATS
from smoe.kernels.expert_work import Expert
from smoe.kernels.experts import TokenExperts
from smoe.kernels.isa import widest
from smoe.kernels.matrix import Matrix, in_bf16, products_of
from smoe.kernels.prompt_experts import Chosen, PromptExperts
from smoe.kernels.spinning_pool import SpinningPool
from tests.formats.blocks import random_rows

pytestmark = pytest.mark.skipif(widest() is None, reason="needs llvmlite and AVX2")
HIDDEN, INNER, TOKENS = 256, 512, 90
COUNTS = (1, 7, 40, 9, TOKENS, 12)


@pytest.fixture
def kernel() -> Iterator[TokenExperts]:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    with SpinningPool(2, in_own_order=True) as pool:
        yield TokenExperts(pool, HIDDEN, INNER, torch.nn.functional.silu(bits))


def numbers(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Experts:
    """Experts whose matrices stay in memory."""

    def __init__(self, form: str, activations: str) -> None:
        self._kept: list[object] = []
        self.matrices = [self._of(form, activations, n) for n in range(len(COUNTS))]

    def _of(self, form: str, activations: str, n: int) -> Sequence[Matrix]:
        shapes = ((2 * INNER, HIDDEN), (HIDDEN, INNER))
        if form == "bf16":
            up, down = (numbers(*shape, seed=n) * 0.1 for shape in shapes)
            self._kept += [up, down]
            return list(in_bf16(up.t(), down.t()))
        made = []
        for rows, columns in shapes:
            data = random_rows(FORMATS[form], rows, columns, seed=n)
            self._kept.append(data)
            made.append(Matrix(data.ctypes.data, rows, columns, products_of(FORMATS[form], activations)))
        return made


@pytest.mark.parametrize(("form", "activations"), [("bf16", BF16), ("Q8_0", INT8), ("Q4_K", INT8), ("FP8", BF16)])
@pytest.mark.parametrize("elsewhere", [{0, 2, 4}, {1, 3, 5}, set(range(len(COUNTS)))], ids=str)
def test_the_sum_does_not_depend_on_who_computes(
    kernel: TokenExperts, form: str, activations: str, elsewhere: set[int]
) -> None:
    experts, x = Experts(form, activations), numbers(TOKENS, HIDDEN, seed=99)
    alone, shared = PromptExperts(kernel, x), PromptExperts(kernel, x)
    for n, (matrices, count) in enumerate(zip(experts.matrices, COUNTS, strict=True)):
        tokens = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(n))[:count]
        gains = np.full(count, 0.1 * (n + 1), np.float32)
        alone.add(Chosen(matrices, tokens.numpy(), gains))
        if n in elsewhere:
            outputs = x.new_empty(count, HIDDEN)
            kernel.forward(x[tokens].contiguous(), [Expert(matrices, [(i, i) for i in range(count)])], outputs)
            assert outputs.isfinite().all()
            shared.add(Chosen((), tokens.numpy(), gains, outputs))
        else:
            shared.add(Chosen(matrices, tokens.numpy(), gains))
    assert alone.flush() == shared.flush() == len(COUNTS)
    assert torch.equal(alone.total, shared.total) and bool(alone.total.isfinite().all())
