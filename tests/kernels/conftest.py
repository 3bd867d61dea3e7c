"""Every format and every instruction set, for the tests of what is generated.

Of the session, so that the tests of one format and instruction set follow each other: what is compiled for them is then
compiled by one worker.
"""

from __future__ import annotations

import pytest

from smoe.formats.base import Format
from smoe.formats.registry import FORMATS
from smoe.kernels.isa import ISAS, Isa


@pytest.fixture(scope="session", params=ISAS, ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> Isa:
    if not request.param.is_here:
        pytest.skip(f"this CPU has no {request.param.name}")
    return request.param


@pytest.fixture(scope="session", params=FORMATS.values(), ids=FORMATS)
def form(request: pytest.FixtureRequest) -> Format:
    return request.param
