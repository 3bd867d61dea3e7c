"""The tasks of a prompt's experts by machine code, compared with those that `ExpertWork` makes one by one.

Would catch: a wrong address, row or unit number, experts that wait for another's products, units of another size, a
format's functions used for the matrices of another format, experts of different formats taken for alike.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from smoe.bounds import BF16, INT8
from smoe.formats.registry import FORMATS
from smoe.kernels import tasks
from smoe.kernels.byte_experts import ByteExperts, RoutedRows, RowMemory, addresses_of, form_of_all
from smoe.kernels.expert_work import Expert, ExpertWork
from smoe.kernels.experts import TokenExperts
from smoe.kernels.isa import widest
from smoe.kernels.matrix import Matrix, added_rows, products_of
from smoe.kernels.spinning_pool import SpinningPool

pytestmark = pytest.mark.skipif(widest() is None, reason="needs llvmlite and AVX2")
HIDDEN, INNER, TOKENS, LIST = 512, 256, 700, 8
"""`LIST`: the field of a task that contains the address of a list of rows."""


@pytest.fixture
def kernel() -> Iterator[TokenExperts]:
    with SpinningPool(2, in_own_order=True) as pool:
        yield TokenExperts(pool, HIDDEN, INNER, torch.zeros(1 << 16, dtype=torch.bfloat16))


def matrices(n: int, form: str = "Q4_K", down: str = "Q6_K", parts: int = 2) -> Sequence[Matrix]:
    """The matrices of an expert, at addresses that no task reads here."""
    shapes = [*[(2 * INNER // parts, HIDDEN, form)] * parts, (HIDDEN, INNER, down)]
    return [
        Matrix((n + 1) << 20 | m << 16, outputs, columns, products_of(FORMATS[name], INT8))
        for m, (outputs, columns, name) in enumerate(shapes)
    ]


def rows_in(address: int) -> list[int]:
    """The words of the list of rows at an address."""
    count = ctypes.c_int64.from_address(address).value
    return list((ctypes.c_int64 * (1 + 2 * count)).from_address(address))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("counts", [(1,), (4, 1, 3), (9,), (1, 7, 40, 4, 600, 12)], ids=str)
def test_the_tasks_are_those_made_one_by_one(kernel: TokenExperts, counts: Sequence[int], parts: int) -> None:
    experts = [matrices(n, parts=parts) for n in range(len(counts))]
    form = form_of_all(experts)
    assert form is not None
    tokens = np.concatenate([np.random.default_rng(n).permutation(TOKENS)[:count] for n, count in enumerate(counts)])
    gains = np.ones(len(tokens), np.float32)
    layouts = {each.functions.layout: (n + 1) << 40 for n, each in enumerate(form)}
    memory = RowMemory(layouts, 1 << 44, 1 << 45)
    routed = RoutedRows(np.array(counts), tokens, gains)
    ours = ByteExperts(kernel, form, addresses_of(experts), routed, memory)
    chosen = _whole(experts, counts, tokens)
    theirs = ExpertWork(kernel, 0, memory.outputs, chosen)
    theirs.take_byte_rows(memory.byte_rows, len(tokens))
    theirs.ups()
    theirs.downs()
    totals = [memory.totals + 4 * HIDDEN * int(token) for token in tokens]
    theirs.add_rows(added_rows(INT8), gains.ctypes.data, totals)
    found, wanted = ours.fields, np.array(theirs.fields).reshape(-1, tasks.FIELDS)
    assert ours.units == theirs.units and found.shape == wanted.shape
    gated = {each.functions.gated_rows for each in form}
    is_list = ~np.isin(wanted[:, 7], list(gated))
    assert (found[:, :LIST] == wanted[:, :LIST]).all() and (found[:, LIST + 1 :] == wanted[:, LIST + 1 :]).all()
    assert (found[~is_list] == wanted[~is_list]).all()
    for row in np.flatnonzero(is_list):
        assert rows_in(int(found[row, LIST])) == rows_in(int(wanted[row, LIST]))


def _whole(experts: Sequence[Sequence[Matrix]], counts: Sequence[int], tokens: np.ndarray) -> list[Expert]:
    found, first = [], 0
    for each, count in zip(experts, counts, strict=True):
        found.append(Expert(each, [(int(tokens[row]), row) for row in range(first, first + count)]))
        first += count
    return found


def test_only_experts_of_one_format_are_alike() -> None:
    assert form_of_all([matrices(0), matrices(1)]) is not None
    assert form_of_all([matrices(0), matrices(1, form="Q8_0")]) is None
    assert form_of_all([matrices(0), matrices(1, down="Q8_0")]) is None
    assert form_of_all([matrices(0), matrices(1, parts=1)]) is None
    assert form_of_all([(), matrices(1)]) is None and form_of_all([matrices(0), ()]) is None


def test_rows_in_bf16_are_not_of_this_kind() -> None:
    whole = [each._replace(products=products_of(FORMATS["Q4_K"], BF16)) for each in matrices(0)]
    assert form_of_all([whole]) is None
    assert form_of_all([[each._replace(products=None) for each in whole]]) is None
