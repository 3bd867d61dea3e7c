"""The collection of garbage is paused for a block only, and stays off where it was off.

Would catch a program whose garbage is never collected.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from smoe.garbage import collection_paused


@pytest.fixture(autouse=True)
def enabled_afterwards() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("is_on", [True, False])
def test_a_block_without_collections(is_on: bool) -> None:
    if not is_on:
        gc.disable()
    with collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled() is is_on


def test_a_block_that_raises() -> None:
    with pytest.raises(ValueError, match="x"), collection_paused():
        raise ValueError("x")
    assert gc.isenabled()
