"""What the tests of single parts share."""

from __future__ import annotations

import pytest

from smoe.fastpath import decoder_layer


@pytest.fixture
def each_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer computes its parts as one work."""
    monkeypatch.setattr(decoder_layer, "speed_up", lambda *_: 0)
