"""The folder of a model of which nothing is known yet."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path, own_cache: None) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"
