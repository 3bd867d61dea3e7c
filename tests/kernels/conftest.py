"""Every format and every instruction set, for the tests of what is generated.

Of the session, so that the tests of one format and instruction set follow each other: what is compiled for them is then
compiled by one worker.
"""

from __future__ import annotations

import pytest

from smoe.formats.base import Format
from smoe.formats.plain import PLAIN
from smoe.formats.registry import FORMATS
from smoe.kernels import jit
from smoe.kernels.isa import ISAS, Isa
from tests import promised


@pytest.fixture(scope="session", autouse=True)
def compiled_in_this_process() -> None:
    """These tests compile hundreds of kernels. A process for each of them takes half as long as the compiler."""
    jit.llvm()


@pytest.fixture(scope="session", params=promised.cells_of(ISAS), ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> Isa:
    return request.param


LIKE_OTHERS = ("W4_64", "W8_32", "W8_64")
"""Formats that differ from one that is tested by the length of a block alone."""


@pytest.fixture(
    scope="session",
    params=[form for form in (FORMATS | PLAIN).values() if form.name not in LIKE_OTHERS],
    ids=lambda form: form.name,
)
def form(request: pytest.FixtureRequest) -> Format:
    return request.param
