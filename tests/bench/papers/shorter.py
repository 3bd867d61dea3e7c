"""A paper's reproduction on less than its settings ask for."""

from __future__ import annotations

from types import ModuleType

import pytest

from bench.papers.claims import Reproduction


def reproduced(paper: ModuleType, settings: int, **less: object) -> Reproduction:
    """In this process, with `less` in the place of the module's constants; so many settings are ticked."""
    ticks: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in less.items():
            patch.setattr(paper, name, value)
        patch.setattr(paper, "usable_cores", lambda: 1)
        result: Reproduction = paper.reproduce(ticks.append)
    assert sum(ticks) == settings
    return result
