"""What the tests of single parts share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from smoe.fastpath import decoder_layer
from smoe.kernels.spinning_pool import SpinningPool
from tests import promised


@pytest.fixture(scope="module")
def own_order() -> Iterator[SpinningPool]:
    """A pool that multiplies in our own order, which every CPU with our kernels has."""
    promised.needs_machine_code()
    with SpinningPool(2, in_own_order=True) as made:
        yield made


@pytest.fixture
def each_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer computes its parts as one work."""
    monkeypatch.setattr(decoder_layer, "speed_up", lambda *_: {})
